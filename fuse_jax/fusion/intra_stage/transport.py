"""How a result gets from one device of a compiled pipeline to its neighbour.

A transport is used inside the manual region of a mesh whose first axis is `pipe`. Its `receive` and
`send` are called inside a task, `exchange` between two steps of the loop; a transport does its work
in one of the two places and nothing in the other:

* `Mailbox`: inside. A device goes from task to task and waits for nothing but its own message, so
  times are those of the `ideal` cost model. In-process, CPU.
* `Pair`: between ticks, neighbours that have something for one another, even pairs before odd ones
  (`rendezvous`). Grouped collectives, which involve the two devices only, and may therefore stand
  in a conditional that the others do not enter.
* `Ring`: every tick, everyone to both neighbours (`lockstep` on CPU, where a permute waits for all
  devices of the program).

A transport of asynchronous sends inside tasks on another platform has the mailbox's place.

Nothing in a task may become a collective permute: on CPU it waits for devices that do other tasks,
for ever.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from fuse_jax.fusion.intra_stage import mailbox
from fuse_jax.fusion.intra_stage.tables import Row

AXES = ("pipe", "data", "tensor")
TransportName = Literal["mailbox", "pair", "ring"]


class Arrivals(NamedTuple):
    """What came from device d-1 and d+1, flat; meaningless where the tables expect nothing."""

    below: Array
    above: Array


class Transport(Protocol):
    """See the page above. `run` is an int32 that each operation takes and hands on, so that a
    device's operations keep their order.

    ticked: whether steps are ticks (see `tables.py`).
    """

    @property
    def ticked(self) -> bool: ...

    def begin(self) -> Array:
        """Before the first step; `run`."""
        ...

    def receive(self, run: Array, row: Row, size: int, dtype: Any) -> tuple[Array, Array | None]:
        """First thing in a task: `run`, and its message, flat `[size]`, or None if in its slot."""
        ...

    def send(
        self, run: Array, row: Row, result: Array, room: int, after: list[Array]
    ) -> tuple[Array, Any]:
        """Last thing in a task: `run`, and what `exchange` takes of the flat `result`.

        after: what the task makes beside it, and its end is not noted before.
        """
        ...

    def nothing(self, room: int, dtype: Any) -> Any:
        """What `exchange` takes of a device that has no task."""
        ...

    def exchange(self, row: Row, sent: Any) -> Arrivals | None:
        """At the end of a step."""
        ...

    def finish(self, run: Array) -> Array | None:
        """After the last step, before any collective: float32 0.0 to add to what that reads."""
        ...


@dataclass(frozen=True)
class Mailbox:
    """Messages by C++ operations in the process (`mailbox.py`); made for one executable."""

    program: mailbox.Program
    ticked: bool = False

    def begin(self) -> Array:
        return mailbox.begin(self.program, *_place())

    def receive(self, run: Array, row: Row, size: int, dtype: Any) -> tuple[Array, Array | None]:
        device, lane = _place()
        like = jax.ShapeDtypeStruct((size,), dtype)
        message = mailbox.recv(
            self.program, like, run=run, device=device, lane=lane, task=row.task, tag=row.receive
        )
        return run, message

    def send(
        self, run: Array, row: Row, result: Array, room: int, after: list[Array]
    ) -> tuple[Array, Any]:
        del room
        device, lane = _place()
        sent = mailbox.send(
            self.program,
            result,
            run=run,
            device=device,
            lane=lane,
            task=row.task,
            to=row.to,
            tag=row.tag,
            after=after,
        )
        return run + sent.astype(run.dtype), ()

    def nothing(self, room: int, dtype: Any) -> Any:
        del room, dtype
        return ()

    def exchange(self, row: Row, sent: Any) -> Arrivals | None:
        del row, sent
        return None

    def finish(self, run: Array) -> Array | None:
        device, lane = _place()
        return mailbox.finish(self.program, run=run, device=device, lane=lane)


@dataclass(frozen=True)
class _Ticked:
    """What the two tick transports share: everything but the exchange.

    program: notes which task each device is in, for the message about a device that hangs and for
    the timeline; None where the mailbox cannot be had.
    """

    devices: int
    program: mailbox.Program | None = None
    ticked: bool = True

    def begin(self) -> Array:
        if self.program is None:
            return jnp.zeros((), jnp.int32)
        return mailbox.begin(self.program, *_place())

    def receive(self, run: Array, row: Row, size: int, dtype: Any) -> tuple[Array, Array | None]:
        del size, dtype
        if self.program is not None:
            device, lane = _place()
            noted = mailbox.mark(self.program, run=run, device=device, lane=lane, task=row.task)
            run = run + noted.astype(run.dtype)
        return run, None

    def send(
        self, run: Array, row: Row, result: Array, room: int, after: list[Array]
    ) -> tuple[Array, Any]:
        if self.program is not None:
            device, lane = _place()
            noted = mailbox.leave(
                self.program, result, run=run, device=device, lane=lane, task=row.task, after=after
            )
            run = run + noted.astype(run.dtype)
        return run, jnp.pad(result, (0, room - result.size))

    def nothing(self, room: int, dtype: Any) -> Any:
        return jnp.zeros((room,), dtype)

    def finish(self, run: Array) -> Array | None:
        del run
        return None


@dataclass(frozen=True)
class Pair(_Ticked):
    """Grouped all-gathers of neighbours that exchange something in this tick."""

    def __post_init__(self) -> None:
        if self.devices > 1 and self.devices % 2:
            raise ValueError(
                f"the pair transport deals {self.devices} devices into pairs: use an even number "
                "of pipeline devices, or the ring"
            )

    def exchange(self, row: Row, sent: Any) -> Arrivals | None:
        if self.devices == 1:
            return None
        odd_device = lax.axis_index("pipe") % 2

        def swap(first: int, own: Array) -> Array:
            groups = [[d, (d + 1) % self.devices] for d in range(first, self.devices, 2)]
            both = lax.all_gather(own, "pipe", axis_index_groups=groups)
            # A device's place in its group; the other's value is wanted.
            place = odd_device if first == 0 else 1 - odd_device
            return lax.dynamic_index_in_dim(both, 1 - place, keepdims=False)

        def keep(own: Array) -> Array:
            return own

        even = lax.cond(row.even > 0, lambda own: swap(0, own), keep, sent)
        odd = sent  # two devices are one pair
        if self.devices > 2:
            odd = lax.cond(row.odd > 0, lambda own: swap(1, own), keep, sent)
        is_odd = odd_device > 0
        return Arrivals(below=jnp.where(is_odd, even, odd), above=jnp.where(is_odd, odd, even))


@dataclass(frozen=True)
class Ring(_Ticked):
    """Two permutes a tick, one up and one down, of all devices."""

    def exchange(self, row: Row, sent: Any) -> Arrivals | None:
        del row
        if self.devices == 1:
            return None
        up = [(d, d + 1) for d in range(self.devices - 1)]
        down = [(to, source) for source, to in up]
        return Arrivals(lax.ppermute(sent, "pipe", up), lax.ppermute(sent, "pipe", down))


def make_transport(
    name: TransportName, devices: int, lanes: int = 1, *, timeout_s: float = 120.0
) -> Transport:
    """The transport `name` for one executable over `devices` x `lanes` (data x tensor).

    timeout_s: seconds that the mailbox lets a device wait for another.

    Where the mailbox cannot be had, pair and ring work without its notes, and say so once.

    Raises ValueError for a name or number of devices it cannot serve, NativeError where `mailbox`
    cannot be built.
    """
    if name not in ("mailbox", "pair", "ring"):
        raise ValueError(f"transport {name!r} is not one of mailbox, pair, ring")
    if name == "mailbox":
        return Mailbox(mailbox.Program(devices, lanes, timeout_s))
    why = mailbox.unavailable_because()
    noted = None if why else mailbox.Program(devices, lanes, timeout_s)
    if why:
        _warn_unnoted(why)
    return Pair(devices, noted) if name == "pair" else Ring(devices, noted)


@functools.cache
def _warn_unnoted(why: str) -> None:
    warnings.warn(
        "pipeline tasks are not noted: a step that fails or hangs ends without the name of its "
        f"task, and there is no measured timeline ({why})",
        stacklevel=3,
    )


def _place() -> tuple[Array, Array]:
    """(device, lane) of this shard."""
    lane = lax.axis_index("data") * lax.axis_size("tensor") + lax.axis_index("tensor")
    return lax.axis_index("pipe"), lane
