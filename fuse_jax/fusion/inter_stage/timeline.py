"""What ran where and when in one iteration, recorded without waiting for any device.

A piece of work is noted when it is dispatched, with an array that is ready when the device is done
with it. `settle` looks at those arrays and fills in the ends. A device works in the order of
dispatch, so work starts when it is dispatched or when the piece before it has ended. Times are in
ms from the start of the timeline, as exact as `settle` is called often.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
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
    start: float = 0.0
    end: float = 0.0

    def record(self) -> Record:
        span = Span(self.instance, self.kind, self.start, self.end, self.count, self.name)
        return Record(span, self.dispatched, self.order, self.samples)


class Timeline:
    """The timeline of `instances` rows. Costs a clock read a dispatch and a poll a `settle`."""

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.finishes: list[Finish] = []
        self._started = time.perf_counter()
        self._order = 0
        self._free_at = [0.0] * instances
        self._open: list[deque[_Work]] = [deque() for _ in range(instances)]
        self._link: list[deque[_Work]] = [deque() for _ in range(instances)]
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
    ) -> None:
        """Work of `kind` (see spans.KINDS) was handed to `instance`; `array` is its last result."""
        work = _Work(instance, kind, array, count, name, self.now(), self._next(), samples)
        queues = self._link if kind == "weights" else self._open
        queues[instance].append(work)

    def finished(self, sample_id: int, instance: int) -> None:
        """A sample came out of `instance`."""
        self.finishes.append(Finish(sample_id, instance, self.now(), self._next()))

    def settle(self) -> list[int]:
        """Note the end of everything that has ended, and of which instances. Never waits."""
        ended = []
        for instance, queue in enumerate(self._open):
            if queue and queue[0].array.is_ready():
                ended.append(instance)
                while queue and queue[0].array.is_ready():
                    work = queue.popleft()
                    self._end(work, max(work.dispatched, self._free_at[instance]))
                    self._free_at[instance] = work.end
        for link in self._link:
            while link and link[0].array.is_ready():
                work = link.popleft()
                self._end(work, work.dispatched)
        return ended

    def drop(self, instance: int) -> None:
        """Forget what was dispatched to an instance that failed: it will not end."""
        self._open[instance].clear()
        self._link[instance].clear()

    def wait(self) -> None:
        """Wait for everything dispatched, and note its end."""
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
