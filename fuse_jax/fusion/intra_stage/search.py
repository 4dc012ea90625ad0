"""Find a fused schedule: list portfolio, forward-backward improvement, critical-path annealing;
then the memory pass.

The three stages alternate in growing slices until the makespan meets a bound of `bounds.py` (then
it is proven optimal), the budget is spent or the time is up. Budgets count evaluations, so the
same problem, seed and budget give the same schedule on every machine; a time limit can only stop
earlier, between slices, and the result says so. One evaluation is the timing of all tasks once; a
move that times a part again counts that part.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from fuse_jax.fusion.intra_stage.anneal import anneal_makespan, anneal_under
from fuse_jax.fusion.intra_stage.baselines import fused_baselines
from fuse_jax.fusion.intra_stage.bounds import BoundFinder
from fuse_jax.fusion.intra_stage.cost import Timing, cost_code, time_order
from fuse_jax.fusion.intra_stage.graph import Graph, reverse
from fuse_jax.fusion.intra_stage.improve import LIST_COST, forward_backward
from fuse_jax.fusion.intra_stage.list_scheduling import (
    NO_CAP,
    list_schedule,
    static_priorities,
)
from fuse_jax.fusion.intra_stage.memory_pass import lower_memory
from fuse_jax.fusion.intra_stage.problem import (
    TICKS_PER_MS,
    Problem,
    to_quanta,
)
from fuse_jax.fusion.intra_stage.random_stream import new_stream
from fuse_jax.fusion.intra_stage.schedule import Schedule

# Work of the first slice of each stage, in timed tasks (about 10 ms), and its growth.
_FIRST_SLICE = 800_000
_GROWTH = 1.3
# Work that a slice does for one of its own: squeezing walks the looser cap too.
_SLICE_MOST = 1.5
# Looser caps from which schedules are squeezed, and where between bound and best they must end.
_LOOSE_CAPS = (1.25, 1.1)
_SQUEEZE_SHARES = (0.75, 0.5, 0.9, 0.25, 0.6)


@dataclass(frozen=True)
class SearchResult:
    """What a search found. makespan, bound in ms; peak_memory, memory_bound in the problem's unit.

    proven_optimal: the makespan equals the bound. stopped_by: "bound", "budget" or "time".
      evaluations: full-schedule evaluations spent; cpu_s: CPU seconds of this process. memory_bound
      is None unless the memory pass ran. clocked: a time limit cut some work short, so that another
      machine may find another schedule.
    """

    schedule: Schedule
    makespan: float
    bound: float
    proven_optimal: bool
    peak_memory: float
    memory_bound: float | None
    evaluations: int
    stopped_by: str
    cpu_s: float
    cost_model: str = "ideal"
    clocked: bool = False


class Meter:
    """Work left of a budget, and the CPU-time limit. whole: the meter this one is a part of."""

    def __init__(self, work: float, time_limit: float | None, whole: Meter | None = None) -> None:
        self.root: Meter = whole.root if whole else self
        self.clocked = False  # of the root: whether the clock ever cut work short
        self.left = float(work)
        self.spent = 0.0
        self.began = time.process_time()
        self.limit = time_limit

    def spend(self, work: float) -> None:
        self.left -= work
        self.spent += work

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self.began

    @property
    def time_left(self) -> float | None:
        """CPU seconds until the limit, None without one."""
        return None if self.limit is None else self.limit - self.cpu_s

    def grant(self, work: float, most: float = 1.0) -> float:
        """How much of some work may be done: what is left of the budget, and what fits in the time
        left at the rate so far if it does `most` times what it is granted.
        """
        work = min(work, max(self.left, 1.0))
        if self.time_left is None or self.spent == 0:
            return work
        fits = max(1.0, self.time_left * self.spent / max(self.cpu_s, 1e-3) / most)
        self.root.clocked = self.root.clocked or fits < work
        return min(work, fits)

    @property
    def stop(self) -> str:
        """ "" to go on, or why not."""
        if self.left <= 0:
            return "budget"
        if self.limit is not None and self.cpu_s >= self.limit:
            self.root.clocked = True
            return "time"
        return ""


def sequential_order(graph: Graph) -> np.ndarray:
    """One micro-batch at a time, one model after the other: the order that needs the least memory,
    int64 [D, L].
    """
    rows = []
    for device in range(graph.ids.shape[0]):
        mine = np.flatnonzero(graph.device == device)
        # forwards by chunk, then backwards from the last chunk, each W behind its B
        place = np.where(graph.kind[mine] == 0, graph.chunk[mine], 10**6 - graph.chunk[mine])
        keys = (graph.kind[mine], place, graph.micro_batch[mine], graph.model[mine])
        rows.append(mine[np.lexsort(keys)])
    return np.stack(rows).astype(np.int64)


class Walk:
    """State of one makespan search under one cap: the best order so far and how to continue.

    squeezes: whether to look at schedules under looser caps too.
    """

    def __init__(
        self, finder: BoundFinder, cap: int, target: int, seed: int, squeezes: bool = True
    ) -> None:
        self.finder, self.graph, self.cap, self.target = finder, finder.graph, cap, target
        self.seed = seed
        self.back = reverse(finder.graph)
        self.state = new_stream(seed)
        self.priorities = static_priorities(self.graph, finder.head, finder.tail)
        self.order = sequential_order(self.graph)
        self.makespan = self._timing(self.order).makespan
        self.mean = max(1.0, float(self.graph.duration.mean()))
        self.turn = 0
        self.slice = float(_FIRST_SLICE)
        self.looser: list[Walk] = []
        if squeezes and cap > 0:
            # The last without a cap: where a micro-batch fills it, a little more room is none.
            for loose in (*(int(cap * share) for share in _LOOSE_CAPS), NO_CAP):
                bound = finder.makespan(None if loose < 0 else loose).makespan
                self.looser.append(Walk(finder, loose, bound, seed, squeezes=False))

    def _timing(self, order: np.ndarray) -> Timing:
        timing = time_order(self.graph, order)
        assert timing is not None
        return timing

    def offer(self, order: np.ndarray, makespan: int) -> None:
        """Keep an order that is no longer than the best."""
        if 0 <= makespan <= self.makespan:
            self.order, self.makespan = order.copy(), makespan

    def portfolio(self, meter: Meter) -> None:
        """List schedules of all static priorities."""
        order = np.empty_like(self.order)
        start, end = np.zeros_like(self.graph.duration), np.zeros_like(self.graph.duration)
        for priority in self.priorities:
            reached = list_schedule(self.graph, priority, 0, self.cap, order, start, end)
            self.offer(order, reached)
            meter.spend(LIST_COST * start.size)
            if self.makespan <= self.target:
                return

    def step(self, meter: Meter) -> None:
        """One slice: improvement, annealing or, under a cap, squeezing; in turn."""
        work = meter.grant(self.slice, _SLICE_MOST)
        turn, self.turn = self.turn, self.turn + 1
        kinds = 3 if self.looser else 2
        if turn % kinds == 0:
            used = self._improve(turn // kinds, work)
        elif turn % kinds == 1:
            used = self._anneal(turn // kinds, work)
            self.slice *= _GROWTH
        else:
            used = self._squeeze(turn // kinds, work)
        meter.spend(used)

    def _improve(self, round_: int, work: float) -> float:
        """Forward-backward improvement from the best times, or from a static priority."""
        key = self.priorities[(round_ // 2) % len(self.priorities)].copy()
        if round_ % 2 == 0:
            key = -self._timing(self.order).start.astype(float)
        order = np.empty_like(self.order)
        makespan, used = forward_backward(
            self.graph, self.back, key, work, self.target, self.cap, self.state, order
        )
        self.offer(order, makespan)
        return used

    def _anneal(self, round_: int, work: float) -> float:
        """Critical-path annealing from the best order, at one of three temperatures."""
        order = np.empty_like(self.order)
        makespan, used = anneal_makespan(
            self.graph,
            self.finder.tail,
            self.order.copy(),
            self.cap,
            work,
            (0.3, 0.05, 0.6)[round_ % 3] * self.mean,
            0.003 * self.mean,
            self.target,
            self.state,
            order,
        )
        self.offer(order, makespan)
        return used

    def _squeeze(self, round_: int, work: float) -> float:
        """The memory pass on a schedule under a looser cap, at a makespan between bound and best.

        Under a cap the makespan's landscape is rugged: shaving the memory of a fast schedule
        often ends below the best that obeys the cap all the way.
        """
        loose = self.looser[round_ % len(self.looser)]
        part = Meter(work / 2, None)
        loose.run(part)
        share = _SQUEEZE_SHARES[round_ % len(_SQUEEZE_SHARES)]
        limit = max(loose.makespan, self.target + int((self.makespan - self.target) * share))
        if limit >= self.makespan:
            return max(part.spent, 1.0)
        order = np.empty_like(self.order)
        peak, used = lower_memory(
            self.graph,
            self.finder.tail,
            loose.order.copy(),
            limit,
            self.cap,
            self.cap,
            work,
            work,
            1.0,
            0.05,
            self.state,
            order,
        )
        if peak <= self.cap:
            self.offer(order, self._timing(order).makespan)
        return part.spent + used

    def run(self, meter: Meter) -> str:
        """Walk until the target, the budget or the time; says which."""
        if self.turn == 0:
            self.portfolio(meter)
        while self.makespan > self.target:
            if meter.stop:
                return meter.stop
            self.step(meter)
        return "bound"


def result_of(
    finder: BoundFinder,
    order: np.ndarray,
    bound: int,
    meter: Meter,
    stopped_by: str,
    cost_model: str = "ideal",
) -> SearchResult:
    """Check an order and put it with its figures."""
    schedule = Schedule(finder.problem, order).check()
    makespan = schedule.timing(cost_model).makespan
    return SearchResult(
        schedule=schedule,
        makespan=makespan / TICKS_PER_MS,
        bound=bound / TICKS_PER_MS,
        proven_optimal=makespan == bound,
        peak_memory=schedule.peak_memory,
        memory_bound=None,
        evaluations=round(meter.spent / max(1, finder.graph.duration.size)),
        stopped_by=stopped_by,
        cpu_s=meter.cpu_s,
        cost_model=cost_model,
        clocked=meter.clocked,
    )


def search(
    problem: Problem,
    *,
    cost_model: str = "ideal",
    evaluations: int = 2_000_000,
    time_limit: float | None = None,
    seed: int = 0,
) -> SearchResult:
    """Shortest schedule under the problem's memory cap, timed by a cost model.

    Args:
      problem: what to schedule.
      cost_model: of the transport that will run it (`cost.COST_MODELS`). The bounds hold for all,
        but are only near for "ideal".
      evaluations: budget; the search stops before it at a bound.
      time_limit: CPU seconds; the last slice is cut to end near it. The result then depends on
        the machine.
      seed: of the random moves.

    Raises TransportError if the transport cannot carry the problem's transfers.
    """
    meter = Meter(1, time_limit)
    finder = BoundFinder(problem)
    code = cost_code(finder.graph, cost_model)
    meter.left = float(evaluations) * finder.graph.duration.size
    cap = NO_CAP if problem.memory_cap is None else to_quanta(problem.memory_cap)
    bound = finder.makespan(None if cap < 0 else cap).makespan
    walk = Walk(finder, cap, bound, seed)
    if code == 0:
        stopped_by = walk.run(meter)
        return result_of(finder, walk.order, bound, meter, stopped_by)
    return _blocking(finder, walk, bound, meter, cost_model, code)


def _blocking(
    finder: BoundFinder, walk: Walk, bound: int, meter: Meter, cost_model: str, code: int
) -> SearchResult:
    """Anneal under a cost model that blocks, in slices, from the best of several starts under it.

    Starts: the search's ideal schedule, both orders of concatenated 1F1B and the Chimera-like
      merge; those above the cap are left out.
    """
    walk.run(Meter(meter.left / 10, meter.time_left and meter.time_left / 4, meter))
    best, order, turn = -1, walk.order, 0
    for start in (Schedule(finder.problem, walk.order), *fused_baselines(finder.problem)):
        if walk.cap >= 0 and start.memory_profile().max() > walk.cap:
            continue
        timing = time_order(finder.graph, start.order, cost_model)
        if timing is not None and (best < 0 or timing.makespan < best):
            best, order = timing.makespan, start.order
    while best > bound and not meter.stop:
        found = np.empty_like(order)
        hot = (0.3, 0.05, 0.6)[turn % 3] * walk.mean
        work = meter.grant(walk.slice * 4)
        reached, used = anneal_under(
            finder.graph,
            order.copy(),
            code,
            walk.cap,
            work,
            hot,
            0.003 * walk.mean,
            bound,
            walk.state,
            found,
        )
        meter.spend(used)
        walk.slice *= _GROWTH
        turn += 1
        if reached <= best:
            best, order = reached, found
    stopped_by = "bound" if best <= bound else meter.stop
    return result_of(finder, order, bound, meter, stopped_by, cost_model)
