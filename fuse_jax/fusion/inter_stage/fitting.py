"""From measured times to `Costs`: the median of what was measured of the same thing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable


class DecodeTime(NamedTuple):
    """A chunk that took `ms` for `steps` steps, with `live` slots at `context` tokens.

    `context` is the longest live slot's (see `DecodeTable.statistic`), in the middle of the chunk.
    """

    live: int
    context: float
    steps: int
    ms: float


def fit_decode(times: Iterable[DecodeTime], *, points: int = 4) -> DecodeTable:
    """A table through medians of measured chunks, at up to `points` live counts and contexts.

    More live slots and longer contexts are taken never to be faster: where noise says so, the
    larger time counts. A pair of points without a measurement takes its nearest smaller one's.

    Raises ValueError: no chunk ran a step.
    """
    known = [time for time in times if time.steps > 0 and time.live > 0]
    if not known:
        raise ValueError("no decode chunk that ran a step was measured: run one before fitting")
    live = _spread([time.live for time in known], points)
    context = _spread([max(round(time.context), 1) for time in known], points)
    cells: dict[tuple[int, int], list[float]] = {}
    for time in known:
        cell = _nearest(live, time.live), _nearest(context, time.context)
        cells.setdefault(cell, []).append(time.ms / time.steps)
    lowest = min(median(values) for values in cells.values())
    table = [[lowest] * len(context) for _ in live]
    for i in range(len(live)):
        for j in range(len(context)):
            smaller = [table[i - 1][j]] * (i > 0) + [table[i][j - 1]] * (j > 0)
            table[i][j] = max([lowest, *smaller, *map(median, [cells.get((i, j), [0.0])])])
    return DecodeTable(tuple(live), tuple(context), tuple(map(tuple, table)))


def fit_costs(
    decode: Iterable[DecodeTime],
    prefill: Mapping[int, Sequence[float]],
    score: Mapping[str, Sequence[Sequence[float]]],
    *,
    move: Sequence[float] = (),
    weights: Sequence[float] = (),
    host: Sequence[float] = (),
) -> Costs:
    """Costs of one instance, from times in ms.

    Args:
      decode: chunks.
      prefill: length bucket -> times of one prefill with its insertion. A bucket without times
        takes those of the nearest measured one, in proportion to its length where it is longer.
      score: column -> for each bucket, times of one batch; a bucket without times takes those of
        the nearest measured one, for all hold about as many tokens (see `buckets.make_buckets`).
      move: times of moving one group of cache rows; () = free.
      weights: times of bringing the frozen weights to an instance; () = they are always there.
      host: the host's own time between two dispatches; () = none.

    Raises ValueError: nothing was measured of something.
    """
    return Costs(
        fit_decode(decode),
        {key: ms * max(key / near, 1.0) for key, near, ms in _filled("prefill", prefill)},
        {
            column: tuple(ms for _, _, ms in _filled(f"score[{column!r}]", dict(enumerate(times))))
            for column, times in score.items()
        },
        move_ms=median(move) if move else 0.0,
        weights_ms=median(weights) if weights else 0.0,
        host_ms=median(host) if host else 0.0,
    )


def _filled(name: str, times: Mapping[int, Sequence[float]]) -> list[tuple[int, int, float]]:
    """(key, nearest measured key, its median) of every key, ascending."""
    known = {key: median(values) for key, values in times.items() if values}
    if not known:
        raise ValueError(f"{name}: no time was measured, run at least one before fitting")
    nearest = {key: min(known, key=lambda k, key=key: (abs(k - key), k)) for key in sorted(times)}
    return [(key, near, known[near]) for key, near in nearest.items()]


def _spread(values: Sequence[int], points: int) -> list[int]:
    """The distinct values where they are few, else `points` evenly spaced from low to high."""
    distinct = sorted(set(values))
    if len(distinct) <= points:
        return distinct
    low, high = distinct[0], distinct[-1]
    if points == 1:
        return [high]
    return sorted({round(low + (high - low) * k / (points - 1)) for k in range(points)})


def _nearest(points: Sequence[int], value: float) -> int:
    return min(range(len(points)), key=lambda i: abs(points[i] - value))
