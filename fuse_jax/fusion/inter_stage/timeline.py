"""What ran where and when in one iteration, recorded without waiting for any device.

A piece of work is noted when it is dispatched, with an array that is ready when the device is done
with it; a thread waits for it (`watchers`), and `settle` fills in the ends it saw. A device works
in the order of dispatch, so work starts when it is dispatched or when the piece before it has
ended. Times are in ms from the start of the timeline.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import jax
from absl import logging

from fuse_jax.fusion.inter_stage.spans import Span
from fuse_jax.fusion.inter_stage.watchers import Ended, Watchers
from fuse_jax.fusion.trace import Trace

SILENT = 60.0  # seconds without any end after which a warning says who is waited for


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


class _Work(NamedTuple):
    """What was dispatched."""

    instance: int
    kind: str
    count: int
    name: str
    dispatched: float
    order: int
    samples: tuple[int, ...]

    def record(self, start: float, end: float) -> Record:
        span = Span(self.instance, self.kind, start, end, self.count, self.name)
        return Record(span, self.dispatched, self.order, self.samples)


class Timeline:
    """The timeline of `instances` rows. Close it after use."""

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.finishes: list[Finish] = []
        self._started = time.perf_counter()
        self._order = 0
        self._open = [0] * instances  # pieces of work that have not ended
        self._dropped = [False] * instances
        self._watchers = Watchers()
        self._seen: list[Ended] = []  # by `pause`, until `settle` notes it
        self._ended: list[tuple[_Work, float]] = []  # and when
        self._silent, self._patience = 0.0, SILENT

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
        assert not self._dropped[instance], f"instance {instance} was given up"
        work = _Work(instance, kind, count, name, self.now(), self._next(), samples)
        self._open[instance] += 1
        self._watchers.watch((instance, kind == "weights"), work, array)

    def finished(self, sample_id: int, instance: int) -> None:
        """A sample came out of `instance`."""
        self.finishes.append(Finish(sample_id, instance, self.now(), self._next()))

    def pause(self, seconds: float) -> None:
        """Until something ends, but no longer than `seconds`.

        Warns where devices have work and none has ended any for `SILENT` seconds, then for twice as
        long, and so on: a device that hangs cannot be told from one that is slow.
        """
        ended = self._watchers.wait(seconds)
        if ended is not None:
            self._seen.append(ended)
            self._silent, self._patience = 0.0, SILENT
        elif self.open:
            self._silent += seconds
            if self._silent >= self._patience:
                self._patience *= 2
                busy = [index for index, count in enumerate(self._open) if count]
                logging.warning(
                    "no instance has ended anything for %.0f s; waited for: %s (a device that "
                    "hangs holds the run up: end it, and go on with --resume)",
                    self._silent,
                    ", ".join(f"instance {index}" for index in busy),
                )

    def settle(self) -> list[tuple[int, str]]:
        """Note the end of everything that has ended; the instance and kind of each. Never waits."""
        seen, self._seen = self._seen + self._watchers.ended(), []
        news = []
        for work, at in seen:
            if not self._dropped[work.instance]:
                self._open[work.instance] -= 1
                self._ended.append((work, (at - self._started) * 1e3))
                news.append((work.instance, work.kind))
        return news

    @property
    def open(self) -> bool:
        """Whether anything dispatched has not ended, as far as `settle` knows."""
        return any(self._open)

    def drop(self, instance: int) -> None:
        """Forget what was dispatched to an instance that failed: it may never end."""
        self._open[instance], self._dropped[instance] = 0, True
        for link in (False, True):
            self._watchers.forget((instance, link))

    def wait(self) -> None:
        """Wait for everything dispatched, and note its end."""
        self.settle()
        while self.open:
            self.pause(1.0)
            self.settle()

    def close(self) -> None:
        """Watch nothing more."""
        self._watchers.close()

    @property
    def watching_cpu_s(self) -> float:
        """Seconds of a core that waiting for devices took."""
        return self._watchers.cpu

    @property
    def records(self) -> list[Record]:
        """What has ended. Made when asked for: the controller has better things to do."""
        free_at, records = [0.0] * self.instances, []
        for work, end in self._ended:
            instance, start = work.instance, work.dispatched
            if work.kind != "weights":
                start = max(start, free_at[instance])
                free_at[instance] = max(end, start)
            records.append(work.record(start, max(end, start)))
        return records

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
