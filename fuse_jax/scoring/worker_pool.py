"""Worker processes for reward functions, watched by one thread.

The thread starts the workers, hands each one call at a time, reads what comes back, and kills the
process group of a worker whose call outlasts its time: nothing a function does (endless loops
inside C code included) can hold up more than its own sample. All of it is one `select` loop.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable

from fuse_jax.scoring.reward_call import Outcome
from fuse_jax.scoring.worker import HEADER

START_SECONDS = 120.0  # to start Python and import the function's module
LARGEST_REPLY = 1 << 20  # bytes; a reply is a few hundred, anything above is not ours
COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from fuse_jax.scoring.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
# deliver(key, outcome, seconds), called from the pool's thread.
Deliver = Callable[[Hashable, Outcome, float], None]


class _Worker:
    """One process and the state of the conversation with it."""

    def __init__(self, setup: bytes) -> None:
        self.stream, theirs = socket.socketpair()
        self.stream.setblocking(False)
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        self.process = subprocess.Popen(
            # -P: no directory of ours in front of the path; it is set to this process's own.
            [sys.executable, "-P", "-c", COMMAND, path, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(theirs.fileno(),),
            # Its own group: a kill reaches what the function started, Ctrl-C only the trainer.
            start_new_session=True,
            # A function that imports JAX after all must not take the accelerator's memory.
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        theirs.close()
        self.ready = False
        self.job: Hashable | None = None
        self.busy = False
        self.started = time.monotonic()
        self.deadline = self.started + START_SECONDS
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.put(setup)

    def put(self, body: bytes) -> None:
        self.outbox += HEADER.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now; the rest waits for the next `select`."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # a hang-up is seen by reading
            while self.outbox:
                del self.outbox[: self.stream.send(self.outbox)]

    def messages(self) -> list[dict]:
        """Messages that have arrived whole. Raises EOFError on a hang-up, ValueError on noise."""
        found: list[dict] = []
        ended = False
        try:
            while data := self.stream.recv(1 << 16):
                self.inbox += data
            ended = True
        except BlockingIOError:
            pass
        except ConnectionError:
            ended = True
        while len(self.inbox) >= HEADER.size:
            (count,) = HEADER.unpack_from(self.inbox)
            if count > LARGEST_REPLY:
                raise ValueError(f"a reply of {count} bytes")
            if len(self.inbox) < HEADER.size + count:
                break
            body = bytes(self.inbox[HEADER.size : HEADER.size + count])
            del self.inbox[: HEADER.size + count]
            found.append(json.loads(body))
        if ended and not found:
            raise EOFError
        return found

    def end(self) -> str:
        """Kill the worker and all it started, reap it, and say how it had ended."""
        # Before the process is reaped: until then its group's number can't be anybody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.stream.close()
        code = self.process.wait()
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class WorkerPool:
    """`workers` processes that call `function` ("module:name" or "file.py:name")."""

    def __init__(self, function: str, workers: int, timeout: float, deliver: Deliver) -> None:
        """Returns once a worker has the function loaded.

        Raises ValueError saying why the function can't be used.
        """
        self.timeout = timeout
        self.failure = ""
        self._count = workers
        self._deliver = deliver
        self._setup = pickle.dumps({"function": function, "directory": os.getcwd()})
        self._waiting: collections.deque[tuple[Hashable, bytes]] = collections.deque()
        self._workers: list[_Worker] = []
        self._fruitless = 0  # workers that ended without a call since the last result
        self._settled = threading.Event()  # a worker is ready, or the pool has failed
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarmed = socket.socketpair()
        self._alarm.setblocking(False)
        self._alarmed.setblocking(False)
        self._selector.register(self._alarmed, selectors.EVENT_READ)
        # Workers die with the thread that starts them, so one thread starts all and lives as long.
        self._thread = threading.Thread(target=self._watch, name="reward-workers", daemon=True)
        self._thread.start()
        self._settled.wait()
        if self.failure:
            self.close()
            raise ValueError(self.failure)

    def submit(self, key: Hashable, body: bytes) -> None:
        """Queue a pickled call; its outcome is delivered under `key`. From any thread."""
        self._waiting.append((key, body))
        self._wake()

    def processes(self) -> list[int]:
        """Process ids of the workers that live now."""
        return [worker.process.pid for worker in list(self._workers)]

    def close(self) -> None:
        """Kill the workers and wait until they are gone. May be called twice."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is on its way anyhow; or closed
            self._alarm.send(b"!")

    # From here on everything runs in the pool's thread.

    def _watch(self) -> None:
        why = "the pool is closed"
        try:
            while not self._closing:
                self._employ()
                for key, events in self._selector.select(self._patience()):
                    if key.data is None:
                        self._alarmed.recv(1 << 12)
                        continue
                    if events & selectors.EVENT_WRITE:
                        key.data.flush()
                    if events & selectors.EVENT_READ and key.data in self._workers:
                        self._read(key.data)
                self._expire()
        except _Unusable as error:
            why = str(error)
        except BaseException as error:
            why = f"the watching thread failed: {error!r}"
            raise
        finally:
            self._stop(why)

    def _stop(self, why: str) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._selector.close()
        self._alarmed.close()
        self._alarm.close()
        self.failure = why
        self._settled.set()
        self._deliver(None, Outcome(math.nan, "closed", why), 0.0)

    def _employ(self) -> None:
        """Replace workers that ended, give idle ones a call, and set what to select for."""
        while len(self._workers) < self._count:
            worker = _Worker(self._setup)
            self._workers.append(worker)
            self._selector.register(worker.stream, selectors.EVENT_READ, worker)
        for worker in self._workers:
            if worker.ready and not worker.busy and self._waiting:
                worker.job, body = self._waiting.popleft()
                worker.busy, worker.started = True, time.monotonic()
                worker.deadline = worker.started + self.timeout
                worker.put(body)
            write = selectors.EVENT_WRITE if worker.outbox else 0
            wanted = selectors.EVENT_READ | write
            if self._selector.get_key(worker.stream).events != wanted:
                self._selector.modify(worker.stream, wanted, worker)

    def _patience(self) -> float | None:
        """Seconds until the next deadline; None = no deadline."""
        deadline = min(worker.deadline for worker in self._workers)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

    def _read(self, worker: _Worker) -> None:
        try:
            messages = worker.messages()
        except EOFError:
            self._lost(worker, "worker died")
            return
        except ValueError as error:
            self._lost(worker, "worker died", f"it sent noise, {error}")
            return
        for message in messages:
            self._take(worker, message)

    def _take(self, worker: _Worker, message: dict) -> None:
        if not worker.ready:
            if "failed" in message:
                raise _Unusable(message["failed"])
            worker.ready, worker.deadline = True, math.inf
            self._settled.set()
        elif worker.busy:
            seconds = message.pop("seconds")
            late = seconds > self.timeout  # whether or not this thread was in time to see it
            self._finish(worker, self._timed_out() if late else Outcome(**message), seconds)

    def _finish(self, worker: _Worker, outcome: Outcome, seconds: float) -> None:
        job, worker.job, worker.busy = worker.job, None, False
        worker.deadline = math.inf
        self._fruitless = 0
        self._deliver(job, outcome, seconds)

    def _timed_out(self) -> Outcome:
        return Outcome(math.nan, "timeout", f"timeout: longer than {self.timeout:g} s")

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now]:
            self._read(worker)  # an answer may have come in the meantime
            if worker in self._workers and worker.deadline <= now:
                self._lost(worker, "timeout")

    def _lost(self, worker: _Worker, kind: str, how: str = "") -> None:
        """End `worker` and settle what it was doing."""
        self._workers.remove(worker)
        self._selector.unregister(worker.stream)
        end = worker.end()
        if worker.busy:
            died = Outcome(math.nan, kind, f"{kind}: {how or end}")
            outcome = self._timed_out() if kind == "timeout" else died
            self._finish(worker, outcome, time.monotonic() - worker.started)
            return
        self._fruitless += 1
        if not worker.ready and kind == "timeout":
            raise _Unusable(f"its module took longer than {START_SECONDS:g} s to import")
        if self._fruitless >= 3 * self._count or not self._settled.is_set():
            raise _Unusable(f"its workers end before they are called ({how or end})")


class _Unusable(Exception):
    """No worker will ever answer; the message says why."""
