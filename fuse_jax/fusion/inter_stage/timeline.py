"""What ran where and when in one iteration, recorded without waiting for any device.

A piece of work is noted when it is dispatched, with an array that is ready when the device is done
with it, and how long it is expected to take. `settle` looks at those arrays and fills in the ends.
A device works in the order of dispatch, so work starts when it is dispatched or when the piece
before it has ended. Times are in ms from the start of the timeline.

Looking costs a core, so a piece is due to be looked for when it should have ended, or, if the
device has more to do and there is no `hurry`, half-way through the next piece; and with one that is
due, all that should have ended. If nothing is due, only what each device has to do last is looked
for. So it is known soon when a device has nothing left to do; the border between two pieces that
follow each other at once may be noted late, by up to half of the second.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from math import inf
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fuse_jax.fusion.inter_stage.spans import Span
from fuse_jax.fusion.trace import Trace


class Record(NamedTuple):
    """A span, when it was dispatched (ms), its place in the order of events, and its samples."""

    span: Span
    dispatched: float
    order: int
    samples: tuple[int, ...]


class Finish(NamedTuple):
    """A sample was read to be finished: its id, the instance, ms, and its place in the order."""

    sample_id: int
    instance: int
    at: float
    order: int


@dataclass(slots=True)
class _Work:
    """Dispatched; `array` is None once it has ended."""

    instance: int
    kind: str
    array: Any
    count: int
    name: str
    dispatched: float
    order: int
    samples: tuple[int, ...]
    expected: float
    start: float = 0.0
    end: float = 0.0

    def record(self) -> Record:
        span = Span(self.instance, self.kind, self.start, self.end, self.count, self.name)
        return Record(span, self.dispatched, self.order, self.samples)


READ = frozenset(("decode", "score"))  # the kinds whose results the controller reads
# A piece that should have ended is looked for again after this share of what it should have taken.
AGAIN = 1 / 16
SHORTEST = 0.2  # ms between two looks for one piece, at least


class Timeline:
    """The timeline of `instances` rows. Costs a clock read a dispatch and a poll a `settle`.

    `hurry`: look for every piece as soon as it should have ended. Set by the controller.
    """

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.finishes: list[Finish] = []
        self._started = time.perf_counter()
        self._order = 0
        self._free_at = [0.0] * instances
        self._open: list[deque[_Work]] = [deque() for _ in range(instances)]
        self._due = [inf] * instances
        self._spare = [0.0] * instances  # how much later than `_due` will do if there is no hurry
        self._link: list[deque[_Work]] = [deque() for _ in range(instances)]
        self.hurry = True
        self._ended: list[_Work] = []

    def now(self) -> float:
        """ms since the start."""
        return (time.perf_counter() - self._started) * 1e3

    def dispatched(
        self,
        instance: int,
        kind: str,
        array: jax.Array,
        count: int,
        name: str = "",
        samples: tuple[int, ...] = (),
        expected: float = 0.0,
    ) -> None:
        """Work of `kind` (see spans.KINDS) was handed to `instance`; `array` is its last result.

        `expected`: ms that it should take.
        """
        now = self.now()
        work = _Work(instance, kind, array, count, name, now, self._next(), samples, expected)
        if kind == "weights":
            self._link[instance].append(work)
            return
        self._open[instance].append(work)
        if len(self._open[instance]) <= 2:
            self._plan(instance)

    def finished(self, sample_id: int, instance: int) -> None:
        """A sample came out of `instance`."""
        self.finishes.append(Finish(sample_id, instance, self.now(), self._next()))

    def settle(self) -> list[int]:
        """Note the end of what has ended, as far as it is looked for (see the module). Never waits.

        Returns the instance of each piece of a kind that is read.
        """
        ended: list[int] = []
        now = self.now()
        any_due = min(self._dues()) <= now
        for instance, queue in enumerate(self._open):
            if self._link[instance]:
                self._settle_link(self._link[instance])
            if not queue or (any_due and self._due[instance] > now):
                continue
            if not queue[0 if any_due else -1].array.is_ready():
                if any_due:
                    self._due[instance] = now + max(AGAIN * queue[0].expected, SHORTEST)
                    self._spare[instance] = 0.0
                continue
            while queue and queue[0].array.is_ready():
                work = queue.popleft()
                self._end(work, max(work.dispatched, self._free_at[instance]))
                self._free_at[instance] = work.end
                if work.kind in READ:
                    ended.append(instance)
            self._plan(instance)
        return ended

    def next_look(self) -> float:
        """ms until the first piece is due; `inf` if no instance has anything to do."""
        return min(self._dues()) - self.now()

    def _dues(self) -> list[float]:
        """When to look for what each instance does now, in ms."""
        return self._due if self.hurry else list(map(add, self._due, self._spare))

    def _plan(self, instance: int) -> None:
        queue = self._open[instance]
        if not queue:
            self._due[instance] = inf
            return
        start = max(queue[0].dispatched, self._free_at[instance])
        self._due[instance] = start + queue[0].expected
        self._spare[instance] = queue[1].expected / 2 if len(queue) > 1 else 0.0

    def _settle_link(self, link: deque[_Work]) -> None:
        while link and link[0].array.is_ready():
            work = link.popleft()
            self._end(work, work.dispatched)

    def drop(self, instance: int) -> None:
        """Forget what was dispatched to an instance that failed: it will not end."""
        self._open[instance].clear()
        self._link[instance].clear()
        self._plan(instance)

    def wait(self) -> None:
        """Wait for everything dispatched, and note its end."""
        self.hurry = True
        while any(self._open) or any(self._link):
            self.settle()
            time.sleep(1e-4)

    @property
    def records(self) -> list[Record]:
        """What has ended. Made when asked for: the controller has better things to do."""
        return [work.record() for work in self._ended]

    @property
    def spans(self) -> list[Span]:
        """What has ended, by start."""
        return sorted((record.span for record in self.records), key=lambda span: span.start)

    def trace(self) -> Trace:
        """The timeline for Perfetto: a row an instance, and one for weights on their way to it."""
        trace = Trace()
        for record in sorted(self.records, key=lambda record: record.span[:3]):
            span = record.span
            row = f"instance {span.instance}" + (" link" if span.kind == "weights" else "")
            name = " ".join(filter(None, (span.kind, span.name)))
            extra = {"samples": list(record.samples)} if record.samples else {}
            trace.span(
                "inter-stage",
                row,
                name,
                span.start,
                span.end,
                count=span.count,
                dispatched_ms=round(record.dispatched, 3),
                **extra,
            )
        return trace

    def write(self, path: str | Path) -> None:
        """Write the Chrome trace."""
        self.trace().write(path)

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _end(self, work: _Work, start: float) -> None:
        work.start, work.end = start, max(self.now(), start)
        work.array = None  # it may hold a cache
        self._ended.append(work)
