"""What ran where and when in one iteration, recorded without waiting for any device.

A piece of work is noted when it is dispatched, with an array that is ready when the device is done
with it. `settle` looks at those arrays and fills in the ends. A device works in the order of
dispatch, so work starts when it is dispatched or when the piece before it has ended. Times are in
ms from the start of the timeline, as exact as `settle` is called often.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

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


class _Open(NamedTuple):
    kind: str
    array: jax.Array
    count: int
    name: str
    dispatched: float
    order: int
    samples: tuple[int, ...]


class Timeline:
    """The timeline of `instances` rows. Costs a clock read a dispatch and a poll a `settle`."""

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.records: list[Record] = []
        self.finishes: list[Finish] = []
        self._started = time.perf_counter()
        self._order = 0
        self._free_at = [0.0] * instances
        self._open: list[deque[_Open]] = [deque() for _ in range(instances)]
        self._link: list[deque[_Open]] = [deque() for _ in range(instances)]

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
        entry = _Open(kind, array, count, name, self.now(), self._next(), samples)
        (self._link if kind == "weights" else self._open)[instance].append(entry)

    def finished(self, sample_id: int, instance: int) -> None:
        """A sample came out of `instance`."""
        self.finishes.append(Finish(sample_id, instance, self.now(), self._next()))

    def settle(self) -> bool:
        """Note the end of everything that has ended, and whether anything has. Never waits."""
        before = len(self.records)
        for instance in range(self.instances):
            queue, link = self._open[instance], self._link[instance]
            while queue and queue[0].array.is_ready():  # type: ignore[attr-defined]
                entry = queue.popleft()
                start = max(entry.dispatched, self._free_at[instance])
                self._free_at[instance] = self._close(entry, instance, start)
            while link and link[0].array.is_ready():  # type: ignore[attr-defined]
                entry = link.popleft()
                self._close(entry, instance, entry.dispatched)
        return len(self.records) > before

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

    def _close(self, entry: _Open, instance: int, start: float) -> float:
        end = max(self.now(), start)
        span = Span(instance, entry.kind, start, end, entry.count, entry.name)
        self.records.append(Record(span, entry.dispatched, entry.order, entry.samples))
        return end
