"""The second half of a search: the lowest peak memory at a makespan that must not grow.

First whole searches under falling caps, each stopped as soon as it reaches the makespan: list
scheduling under a cap finds schedules of another shape than shaving an uncapped one can reach.
Then rounds of four kinds in turn: one long cooling of the memory pass from the schedule of the
makespan search; the memory pass from the best; the memory pass from a fresh schedule, searched with
a new seed under a cap a little above the best peak; and a whole search with a new seed under a cap
below the best peak. No kind wins everywhere. The long cooling reaches the lowest peaks of the
authors' second problem (half of its seeds, where short coolings reach none) and is far off on their
fifth, which the searches under a cap win; so it is left out once it ended far above the best. Of
the shorter rounds, small problems want many and large ones few long ones, so their work grows with
the number of tasks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fuse_jax.fusion.intra_stage.bounds import BoundFinder
from fuse_jax.fusion.intra_stage.memory_pass import lower_memory
from fuse_jax.fusion.intra_stage.problem import QUANTA_PER_UNIT
from fuse_jax.fusion.intra_stage.random_stream import new_stream
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.intra_stage.search import Meter, SearchResult, Walk

# Evaluations of one search under a falling cap, and of the pass's first round for a problem of 384
# tasks (in proportion for others); what the falling caps may take of the budget.
_CAP_EVALUATIONS = 20_000
_ROUND_EVALUATIONS = 50_000 / 384
_CAP_SHARE = 0.3
# Work of a search under a cap below the best peak, in timed tasks (about 4 s): smaller
# problems need as much as larger ones. Growth of the memory passes.
_CHASE = 400e6
_GROWTH = 1.15
# Work (about 5 s, at most a share of what is left) and heat of a long cooling; how far above the
# best peak it may end and be tried again.
_LONG, _LONG_SHARE = 640e6, 0.2
_LONG_HOT = 2.0
_FAR = 1.1
_KINDS = ("long", "best", "fresh", "chase")
# Caps in best peaks, or how far below it; temperatures in smallest activations.
_FRESH_CAP = 1.1
_CHASE_GAPS = (0.05, 0.0125, 0.006)
_HOT = (1.0, 0.4)
_COLD = 0.05


def _peak(schedule: Schedule) -> int:
    return int(schedule.memory_profile().max())


def _search_under(
    finder: BoundFinder, cap: int, limit: int, work: float, meter: Meter, seed: int
) -> Schedule | None:
    """A schedule under a cap and within `limit`, if a search of `work` finds one."""
    walk = Walk(finder, cap, limit, seed)
    part = Meter(min(work, meter.left), meter.time_left, meter)
    walk.run(part)
    meter.spend(part.spent)
    return Schedule(finder.problem, walk.order) if walk.makespan <= limit else None


def _fall_by_caps(
    finder: BoundFinder, start: Schedule, limit: int, goal: int, meter: Meter, seed: int
) -> Schedule:
    """Bisect the cap between `goal` and the peak; keep the lowest schedule within `limit`."""
    best, low = start, goal
    work = _CAP_EVALUATIONS * finder.graph.duration.size
    # Down to single quanta: every failed try is also another walk close below the best peak.
    while low < _peak(best) - 1 and not meter.stop:
        cap = (low + _peak(best)) // 2
        lower = _search_under(finder, cap, limit, work, meter, seed)
        if lower is None:
            low = cap
        best = lower or best
    return best


def _cool(
    finder: BoundFinder,
    begin: Schedule,
    limit: int,
    goal: int,
    work: float,
    hot: float,
    state: np.ndarray,
) -> tuple[Schedule, float]:
    """One cooling of the memory pass; (the lowest schedule it passed, work done)."""
    lowest, level = np.empty_like(begin.order), _peak(begin) - 1
    _, used = lower_memory(
        finder.graph,
        finder.tail,
        begin.order.copy(),
        limit,
        level,
        goal,
        work,
        work,
        hot,
        _COLD,
        state,
        lowest,
    )
    return Schedule(finder.problem, lowest), used


def lower_peak(
    found: SearchResult,
    *,
    evaluations: int = 2_000_000,
    time_limit: float | None = None,
    seed: int = 0,
) -> SearchResult:
    """Lowest peak memory of a schedule no longer than `found.makespan`, by RLHFuse's second pass
    with our energy.

    Args:
      found: a result of `search` under the ideal cost model.
      evaluations, time_limit, seed: as in `search`; stopped_by is "bound" if the peak meets the
        memory bound.
    """
    problem = found.schedule.problem
    finder = BoundFinder(problem)
    graph = finder.graph
    meter = Meter(float(evaluations) * graph.duration.size, time_limit)
    limit = found.schedule.timing().makespan
    goal = finder.memory(limit)
    best = found.schedule
    if _peak(best) > goal:
        share = None if time_limit is None else time_limit * _CAP_SHARE
        part = Meter(meter.left * _CAP_SHARE, share, meter)
        best = _fall_by_caps(finder, best, limit, goal, part, seed)
        meter.spend(part.spent)
    state = new_stream(seed)
    turn, growth, failed, far = 0, 1.0, 0, False
    while _peak(best) > goal and not meter.stop:
        kind, rest = _KINDS[turn % 4], turn // 4
        begin: Schedule | None = best
        work = growth * _ROUND_EVALUATIONS * float(graph.duration.size) ** 2
        hot = _HOT[rest % len(_HOT)]
        if kind == "long":
            begin, hot = None if far else found.schedule, _LONG_HOT
            work = min(_LONG, meter.left * _LONG_SHARE)
        elif kind == "fresh":
            cap = int(_peak(best) * _FRESH_CAP)
            begin = _search_under(finder, cap, limit, _CHASE / 4, meter, seed + turn)
        elif kind == "chase" and rest % (1 + failed) != 0:
            begin = None  # below some cap there is nothing: what failed is tried less often
        elif kind == "chase":
            cap = max(goal, int(_peak(best) * (1 - _CHASE_GAPS[failed % len(_CHASE_GAPS)])))
            begin = _search_under(finder, cap, limit, _CHASE, meter, seed + turn)
            failed = failed + 1 if begin is None else 0
        if begin is not None:
            work = meter.grant(work)
            ended, used = _cool(finder, begin, limit, goal, work, hot, state)
            meter.spend(used)
            far = far or (kind == "long" and _peak(ended) > _FAR * _peak(best))
            best = min(best, ended, key=_peak)
        turn += 1
        growth *= _GROWTH
    stopped_by = "bound" if _peak(best) <= goal else meter.stop
    return replace(
        found,
        schedule=best.check(),
        peak_memory=best.peak_memory,
        memory_bound=goal / QUANTA_PER_UNIT,
        evaluations=found.evaluations + round(meter.spent / max(1, graph.duration.size)),
        stopped_by=stopped_by,
        cpu_s=meter.cpu_s,
        clocked=found.clocked or meter.clocked,
    )
