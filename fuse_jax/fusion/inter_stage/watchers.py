"""Threads that wait for devices, so that the controller need not look whether they are done.

One thread a row (a queue of work that ends in order) blocks on an array of its oldest piece,
without the interpreter's lock, and says when it was there. Looking at every device in short
pauses instead costs the controller its core and sees ends late.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax

LEAVE_S = 30.0  # at exit, for what devices still do
THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Ended(NamedTuple):
    """A piece of work, and the `time.perf_counter()` at which its array was there."""

    work: Any
    at: float


class _Row:
    """One thread and what it waits for."""

    def __init__(self, ended: queue.SimpleQueue[Ended]) -> None:
        self.cpu = 0.0
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A daemon, for a device may never end what it does.
        thread = threading.Thread(target=self._run, args=(ended,), name="watcher", daemon=True)
        THREADS.add(thread)
        thread.start()

    def watch(self, work: Any, array: jax.Array) -> None:
        self._todo.put((work, array))

    def close(self) -> None:
        self._todo.put(None)

    def forget(self) -> None:
        """All but what it waits for right now."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._todo.get_nowait()

    def _run(self, ended: queue.SimpleQueue[Ended]) -> None:
        while (due := self._todo.get()) is not None:
            work, array = due
            with contextlib.suppress(Exception):  # whoever reads it is told how it ended
                array.block_until_ready()
            at = time.perf_counter()
            due = array = None  # it may hold a cache
            self.cpu = time.thread_time()
            ended.put(Ended(work, at))
            work = None


class Watchers:
    """See the module. Close it when nothing more is to be watched."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._rows: dict[Hashable, _Row] = {}

    def watch(self, row: Hashable, work: Any, array: jax.Array) -> None:
        """Tell of `work` once `array` is there.

        Work of one row is told of in this order.
        """
        watching = self._rows.get(row)
        if watching is None:
            watching = self._rows[row] = _Row(self._ended)
        watching.watch(work, array)

    def wait(self, seconds: float) -> Ended | None:
        """What ends next; None if nothing does within `seconds`."""
        try:
            return self._ended.get(timeout=seconds)
        except queue.Empty:
            return None

    def ended(self) -> list[Ended]:
        """What else has ended by now."""
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def forget(self, row: Hashable) -> None:
        """Let go of what `row` still waits for, but for what may be told of next."""
        if row in self._rows:
            self._rows[row].forget()

    @property
    def cpu(self) -> float:
        """Seconds of a core that the threads took."""
        return sum(row.cpu for row in self._rows.values())

    def close(self) -> None:
        """End the threads, each once what it waits for has ended. Does not wait for them."""
        for row in self._rows.values():
            row.close()


@atexit.register
def _leave() -> None:
    """A thread that comes back from a device while the interpreter is torn down aborts it."""
    end = time.monotonic() + LEAVE_S
    for thread in list(THREADS):
        thread.join(max(end - time.monotonic(), 0.0))
