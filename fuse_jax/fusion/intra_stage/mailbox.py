"""Messages between the devices of one program on CPU, from inside a compiled step.

`send` never blocks and `recv` waits for the one message it names, so a device is held up by
nothing but the data it needs: the ideal cost model. The operations are C++ (mailbox.cc, see
native.py); results carry no gradient.

A *device* is an index on the pipe axis; a *lane* is the flat index on the other axes of the mesh,
and messages stay in their lane. A *task* is an id of `graph.build_graph`, here only to name it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from fuse_jax.fusion.intra_stage import native

SOURCE = Path(__file__).with_name("mailbox.cc")
TARGETS = {
    "fuse_jax_mailbox_begin": "MailboxBegin",
    "fuse_jax_mailbox_recv": "MailboxRecv",
    "fuse_jax_mailbox_send": "MailboxSend",
    "fuse_jax_mailbox_mark": "MailboxMark",
    "fuse_jax_mailbox_leave": "MailboxLeave",
    "fuse_jax_mailbox_finish": "MailboxFinish",
}
STATES = ("idle", "waiting", "running", "done")
Scalar = Any  # an int32 scalar: a Python int or a traced array
_ids = itertools.count(1)
_lock = threading.Lock()


class DrainError(RuntimeError):
    """A device does not come back from a task: the program cannot run again in this process."""


class Failure(NamedTuple):
    """Whom a step that was given up waited for, and what was noticed."""

    device: int
    lane: int
    task: int
    reason: str


class Progress(NamedTuple):
    """Where one device is: its last task (-1 = none), its state and the seconds in it."""

    device: int
    lane: int
    task: int
    state: str
    seconds: float


def unavailable_because() -> str:
    """Why the mailbox cannot be used here, in one line; empty where it can.

    The first call builds its library, if that is not there yet.
    """
    if jax.default_backend() != "cpu":
        return f"the mailbox works between CPU devices, and these are {jax.default_backend()}"
    if jax.process_count() > 1:
        return "the mailbox works inside one process"
    return native.unavailable_because(SOURCE)


def available() -> bool:
    """Whether the mailbox can be used here."""
    return not unavailable_because()


@functools.cache
def _library() -> ctypes.CDLL:
    with _lock:
        library = native.load(SOURCE)
        native.register(library, TARGETS)
    i32, i64, f64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    pointer = ctypes.c_void_p
    arguments = {
        "mailbox_create": (i64, i32, i32, f64),
        "mailbox_blame": (i64, i32, ctypes.c_char_p),
        "mailbox_failure": (i64, pointer, pointer, pointer, i64),
        "mailbox_progress": (i64, pointer, pointer, pointer),
        "mailbox_drain": (i64,),
        "mailbox_pending": (i64,),
        "mailbox_record": (i64, i32),
        "mailbox_spans": (i64, pointer, i64),
    }
    for name, types in arguments.items():
        getattr(library, name).argtypes = types
    library.mailbox_pending.restype = library.mailbox_spans.restype = i64
    return library


@dataclass(frozen=True)
class Program:
    """The mailboxes of one compiled step, over `devices` x `lanes`.

    timeout_s: seconds a device waits for another before the run is given up. Every executable
    needs a program of its own: runs are told apart by counting them.

    Raises NativeError where the library cannot be built.
    """

    devices: int
    lanes: int = 1
    timeout_s: float = 120.0
    id: int = field(default_factory=lambda: next(_ids), init=False)

    def __post_init__(self) -> None:
        _library().mailbox_create(self.id, self.devices, self.lanes, self.timeout_s)

    def failure(self) -> Failure | None:
        """Why the program was given up, or None."""
        slot, task, text = ctypes.c_int32(), ctypes.c_int32(), ctypes.create_string_buffer(1000)
        found = _library().mailbox_failure(
            self.id, ctypes.byref(slot), ctypes.byref(task), text, len(text)
        )
        if not found:
            return None
        device, lane = divmod(slot.value, self.lanes)
        return Failure(device, lane, task.value, text.value.decode())

    def blame(self, device: int, lane: int, reason: str) -> None:
        """Give the run up for what that device's last task did: every wait ends in an error."""
        _library().mailbox_blame(self.id, device * self.lanes + lane, reason.encode())

    def progress(self) -> list[Progress]:
        """Where every device is."""
        count = self.devices * self.lanes
        task, state = np.empty(count, np.int32), np.empty(count, np.int32)
        seconds = np.empty(count, np.float64)
        _library().mailbox_progress(self.id, task.ctypes, state.ctypes, seconds.ctypes)
        return [
            Progress(*divmod(i, self.lanes), int(task[i]), STATES[state[i]], float(seconds[i]))
            for i in range(count)
        ]

    def drain(self, timeout_s: float = 10.0) -> None:
        """Forget all messages and the failure, so that the next run works.

        Call it once the outputs of the failed run are settled: a device that is still in a task
        of that run is refused when it comes back.

        Raises DrainError if an operation still waits after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not _library().mailbox_drain(self.id):
            if time.monotonic() > deadline:
                raise DrainError(f"mailbox: operations still wait after {timeout_s:g} s")
            time.sleep(0.001)

    def pending(self) -> int:
        """Messages sent and not received."""
        return _library().mailbox_pending(self.id)

    def record(self, on: bool) -> None:
        """Start (forgetting what there was) or stop noting when tasks run."""
        _library().mailbox_record(self.id, int(on))

    def spans(self) -> Float[np.ndarray, "n 5"]:
        """What was noted: run, device * lanes + lane, task, start and end in seconds."""
        room = _library().mailbox_spans(self.id, None, 0)
        rows = np.zeros((room, 5), np.float64)
        found = _library().mailbox_spans(self.id, rows.ctypes, room)
        return rows[: min(room, found)]


def _head(*scalars: Scalar) -> Int[Array, " n"]:
    return jnp.stack([jnp.asarray(value, jnp.int32).reshape(()) for value in scalars])


def _call(name: str, out: Any, program: Program, *operands: Array) -> Array:
    call = jax.ffi.ffi_call(f"fuse_jax_mailbox_{name}", out, has_side_effect=True)
    return call(*operands, program=np.int64(program.id))


_ZERO = jax.ShapeDtypeStruct((), jnp.float32)


def begin(program: Program, device: Scalar, lane: Scalar = 0) -> Int[Array, ""]:
    """Enter the next run of the program; its number, which every other operation asks for."""
    out = jax.ShapeDtypeStruct((), jnp.int32)
    return _call("begin", out, program, _head(0, device, lane, -1))


def recv(
    program: Program,
    like: Any,
    *,
    run: Scalar,
    device: Scalar,
    lane: Scalar = 0,
    task: Scalar,
    tag: Scalar,
) -> Array:
    """The message `tag` sent to this device, of `like`'s shape and dtype: waits until it is there.

    With tag < 0 there is none: zeros at once. Either way `task` is noted as begun.
    """
    out = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return _call("recv", out, program, _head(run, device, lane, task, tag))


def send(
    program: Program,
    x: Array,
    *,
    run: Scalar,
    device: Scalar,
    lane: Scalar = 0,
    task: Scalar,
    to: Scalar,
    tag: Scalar,
    after: Sequence[Array] = (),
) -> Float[Array, ""]:
    """Leave `x` as message `tag` for device `to` (none if to < 0) and note the end of `task`, once
    `after` is there.

    A tag is used once a run and receiver. Returns 0.0, there once the message is.
    """
    return _call("send", _ZERO, program, x, _head(run, device, lane, task, to, tag), *after)


def mark(
    program: Program, *, run: Scalar, device: Scalar, lane: Scalar = 0, task: Scalar
) -> Float[Array, ""]:
    """Note `task` as begun, for a transport that sends by other means. Returns 0.0."""
    return _call("mark", _ZERO, program, _head(run, device, lane, task))


def leave(
    program: Program,
    x: Array,
    *,
    run: Scalar,
    device: Scalar,
    lane: Scalar = 0,
    task: Scalar,
    after: Sequence[Array] = (),
) -> Float[Array, ""]:
    """Note the end of `task`, marked before, once its results `x` and `after` are there. 0.0."""
    return _call("leave", _ZERO, program, x, _head(run, device, lane, task), *after)


def finish(program: Program, *, run: Scalar, device: Scalar, lane: Scalar = 0) -> Float[Array, ""]:
    """Wait until all devices and lanes are here; 0.0.

    To stand between the tasks and the first collective over the devices: a device that failed in
    its last task would leave the others waiting in that collective, which ends the process.
    """
    return _call("finish", _ZERO, program, _head(run, device, lane, -1))
