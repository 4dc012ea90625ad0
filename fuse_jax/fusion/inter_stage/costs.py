"""What was measured of one instance: a decode step, a prefill, a scoring batch, a move.

All times are in ms, of one instance with everything else idle. Shapes are fixed (a slot count, rows
of a prefill, rows of a scoring bucket), so a dispatch costs the same however many of its rows are
real; whether decoding gets cheaper with fewer live slots is what the decode table says.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fuse_jax.buckets import Bucket


@dataclass(frozen=True)
class Geometry:
    """The shapes all instances share, which no policy ever changes.

    `columns` are what is scored of each sample (`scoring.columns.Column`), `buckets` the shapes of
    scoring batches; `prefill_rows` is also the most rows of one move.
    """

    instances: int
    slots: int
    chunk: int
    prefill_rows: int
    buckets: tuple[Bucket, ...]
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("instances", "slots", "chunk", "prefill_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        lengths = [bucket.length for bucket in self.buckets]
        if not lengths or lengths != sorted(set(lengths)) or min(b.rows for b in self.buckets) < 1:
            raise ValueError(f"buckets={self.buckets}: give ascending lengths, rows of at least 1")
        if not self.columns or len(set(self.columns)) != len(self.columns):
            raise ValueError(f"columns={self.columns}: name each column to score once")


@dataclass(frozen=True)
class DecodeTable:
    """ms of one decode step by live slots and context: `step_ms[i][j]` at `live[i]`, `context[j]`.

    Between points and beyond `context`'s ends it is linear (constant below the first, and where
    there is one point only); beyond the ends of `live` it is constant. `statistic` is what context
    means: tokens of the "longest" live slot (this engine reads all slots as far as the longest
    goes), or their "mean" (engines that read each slot's own length).
    """

    live: tuple[int, ...]
    context: tuple[int, ...]
    step_ms: tuple[tuple[float, ...], ...]
    statistic: Literal["longest", "mean"] = "longest"

    def __post_init__(self) -> None:
        for name in ("live", "context"):
            points = getattr(self, name)
            if not points or list(points) != sorted(set(points)):
                raise ValueError(f"decode.{name}={points}: give distinct values, ascending")
        if len(self.step_ms) != len(self.live) or any(
            len(row) != len(self.context) for row in self.step_ms
        ):
            raise ValueError("decode.step_ms must have a row a `live` and an entry a `context`")
        if not all(ms > 0 and math.isfinite(ms) for row in self.step_ms for ms in row):
            raise ValueError(f"decode.step_ms={self.step_ms}: every time must be positive")
        if self.statistic not in ("longest", "mean"):
            raise ValueError(f"decode.statistic={self.statistic!r}: 'longest' or 'mean'")

    def __call__(self, live: int, context: float) -> float:
        """ms of a step with `live` live slots at `context` tokens."""
        row = self._row(live)
        points = self.context
        if len(points) == 1 or context <= points[0]:
            return row[0]
        j = min(bisect_right(points, context), len(points) - 1)
        share = (context - points[j - 1]) / (points[j] - points[j - 1])
        return max(row[j - 1] + share * (row[j] - row[j - 1]), 1e-9)

    @cached_property
    def _rows(self) -> dict[int, tuple[float, ...]]:
        return {}

    def _row(self, live: int) -> tuple[float, ...]:
        """The table's row at `live`, made once: the simulator asks a few values very often."""
        row = self._rows.get(live)
        if row is None:
            points = self.live
            at = min(max(live, points[0]), points[-1])
            i = min(bisect_right(points, at), len(points) - 1)
            low = max(i - 1, 0)
            span = points[i] - points[low]
            share = (at - points[low]) / span if span else 0.0
            pairs = zip(self.step_ms[low], self.step_ms[i], strict=True)
            row = self._rows[live] = tuple(a + share * (b - a) for a, b in pairs)
        return row

    def saturation(self, slots: int, factor: float = 1.25) -> int:
        """The most live slots, up to `slots`, at which a step takes at most `factor` times as long
        as with one, half-way between the table's contexts (RLHFuse's BS_max)."""
        middle = (self.context[0] + self.context[-1]) / 2
        limit = factor * self(1, middle)
        return max([n for n in range(1, slots + 1) if self(n, middle) <= limit], default=1)


@dataclass(frozen=True)
class Costs:
    """Measured times of one instance, in ms.

    Args:
      decode: one decode step.
      prefill_ms: length bucket -> one prefill of `prefill_rows` rows, their insertion included.
        Buckets beyond the longest prompt's are what re-prefilling a moved sample needs.
      score_ms: column -> one scoring batch of each bucket.
      move_ms, move_token_ms: moving the cache of one group of at most `prefill_rows` live slots, as
        move_ms + move_token_ms * tokens in it (this engine moves whole rows: the second is 0).
      weights_ms: bringing the frozen weights from the host to one instance; 0 = always there.
      host_ms: between two dispatches of one instance, the host's own time.
    """

    decode: DecodeTable
    prefill_ms: Mapping[int, float]
    score_ms: Mapping[str, Sequence[float]]
    move_ms: float = 0.0
    move_token_ms: float = 0.0
    weights_ms: float = 0.0
    host_ms: float = 0.0

    def __post_init__(self) -> None:
        named = {f"prefill_ms[{k}]": v for k, v in self.prefill_ms.items()}
        for column, times in self.score_ms.items():
            named |= {f"score_ms[{column!r}][{i}]": ms for i, ms in enumerate(times)}
        for name in ("move_ms", "move_token_ms", "weights_ms", "host_ms"):
            named[name] = getattr(self, name)
        for name, ms in named.items():
            if not (ms >= 0 and math.isfinite(ms)):
                raise ValueError(f"{name}={ms}: must be a finite time in ms, 0 or more")
        if not self.prefill_ms:
            raise ValueError("prefill_ms is empty: give the time of each prompt bucket")

    @cached_property
    def _buckets(self) -> list[int]:
        return sorted(self.prefill_ms)

    def check(self, geometry: Geometry) -> None:
        """Raises ValueError if a column or bucket of `geometry` has no time."""
        for column in geometry.columns:
            found = len(self.score_ms.get(column, ()))
            if found != len(geometry.buckets):
                raise ValueError(
                    f"score_ms[{column!r}] has {found} times for {len(geometry.buckets)} buckets: "
                    "give one a bucket"
                )

    def prefill_bucket(self, length: int) -> int:
        """The bucket that `length` tokens are prefilled in. Raises ValueError if none holds it."""
        for bucket in self._buckets:
            if length <= bucket:
                return bucket
        raise ValueError(f"no prefill bucket holds {length} tokens: prefill_ms has {self._buckets}")

    def move_by_cache(self, contexts: Sequence[int]) -> float:
        """ms of moving the caches of live slots holding `contexts` tokens, as one group."""
        return self.move_ms + self.move_token_ms * sum(contexts)

    def move_by_prefill(self, contexts: Sequence[int], rows: int) -> float:
        """ms of reading moved samples of `contexts` tokens anew, `rows` of a bucket at a time."""
        held: dict[float, int] = {}
        for context in contexts:
            bucket = next((b for b in self._buckets if context <= b), math.inf)
            held[bucket] = held.get(bucket, 0) + 1
        return sum(
            -(-count // rows) * (self.prefill_ms[int(b)] if b < math.inf else math.inf)
            for b, count in held.items()
        )
