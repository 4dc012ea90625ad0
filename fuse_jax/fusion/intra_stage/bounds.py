"""How fast a schedule can be, and how little memory it can need: bounds that no schedule beats.

All times in ticks, all memory in quanta. Notation for a device d: W its total work, h the least
head and q the least tail of its tasks (`heads.py`). Every bound holds for every schedule that
keeps the rules of `problem.py`, with any cost model, for the others only delay the ideal times.

B1 device: d does nothing before h and nothing after T - q, and must do W between: T >= h + W + q.
B2 one machine: drop all constraints but heads, tails and "one task at a time" on d, and let tasks
  be interrupted; Jackson's rule solves that exactly. Taken for both models together and for each
  alone (Carlier & Pinson 1989).
B3 equal models, unsplit, opposite directions: the middle device has h = floor((N-1)/2) f and q =
  floor((N-1)/2) b, so T >= 2M(f+b) + floor((N-1)/2)(f+b). The closed form of B1.
B4 equal models, split backward: work may end with a W, whose tail is 0: T >= 2M(f+b+w) +
  floor((N-1)/2) f.
B5 memory windows, with a cap A: before b (the least head of a B on d) d can only run forwards,
  and no memory comes back, so it works at most F(A) = the most forward time of micro-batches that
  fit in A together. In the last c (the least tail of an F on d) it runs only backwards of what is
  in flight then: at most G(A). Hence T >= h + W + q + max(0, b - h - F(A)) + max(0, c - q -
  G(A)); if the windows could overlap (b + c > the bound otherwise known) only the larger of the
  two deficits is counted.
B6 Little's law: a micro-batch stays in flight on d at least its way to the last stage and back.
The memory integral over time
  is at least the sum of (amount x least stay) and at most A (T - h - q).
B7 occupancy: in a schedule of length T, a forward starts at the latest at T - tail - duration,
  and its memory comes back at the earliest at head + duration of the task that frees it. The
  micro-batches between these two points at any one instant are all held then. (M = N, T =
  (M+N-1)(f+b): all N forwards of stage 0 start before any can be freed.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fuse_jax.fusion.intra_stage.graph import Graph, build_graph
from fuse_jax.fusion.intra_stage.heads import heads_and_tails, preemptive_makespan
from fuse_jax.fusion.intra_stage.problem import TICKS_PER_MS, Problem, to_quanta, to_ticks


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the makespan in ticks; a closed form that does not apply is 0."""

    device: int
    one_machine: int
    equal_models: int
    equal_split: int
    memory_windows: int
    little: int
    occupancy: int

    @property
    def makespan(self) -> int:
        """The best of them, ticks."""
        return max(vars(self).values())

    @property
    def makespan_ms(self) -> float:
        """The best of them, ms."""
        return self.makespan / TICKS_PER_MS


@dataclass(frozen=True)
class _Device:
    """What B1, B5 and B6 need of one device: see the notation above; `stays` is the sum of amount
    x least stay.
    """

    head: int
    work: int
    tail: int
    first_backward: int
    last_forward: int
    forwards: tuple[tuple[int, int, int], ...]  # (ticks, quanta, how many)
    backwards: tuple[tuple[int, int, int], ...]
    stays: float


def _least_stays(graph: Graph) -> np.ndarray:
    """Least time from the start of a task's micro-batch to the task's end on the data path alone
    [n].
    """
    reach = graph.duration.copy()
    pending = np.flatnonzero(graph.pred[:, 0] >= 0)
    for _ in range(int(graph.stage.max() + 1) * 2 + 1):
        before = graph.pred[pending, 0]
        longer = reach[before] + graph.pred_lag[pending, 0] + graph.duration[pending]
        if (longer == reach[pending]).all():
            break
        reach[pending] = longer
    return reach


def _items(times: np.ndarray, amounts: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    pairs, counts = np.unique(np.stack([times, amounts]), axis=1, return_counts=True)
    return tuple((int(t), int(a), int(k)) for (t, a), k in zip(pairs.T, counts))


def _devices(graph: Graph, head: np.ndarray, tail: np.ndarray) -> list[_Device]:
    reach = _least_stays(graph)
    found = []
    for device in range(graph.ids.shape[0]):
        mine = np.flatnonzero(graph.device == device)
        forwards, frees = [], []
        for take, give in zip(graph.pool_take, graph.pool_give):
            forwards.append(graph.ids[device, take, : graph.size[take]])
            frees.append(graph.ids[device, give, : graph.size[give]])
        f, g = np.concatenate(forwards), np.concatenate(frees)
        b = graph.pred[g, 0]
        after = np.where(
            graph.kind[g] == 2, graph.duration[g] + graph.duration[b], graph.duration[g]
        )
        stay = reach[g] - reach[f] + graph.duration[f]
        found.append(
            _Device(
                head=int(head[mine].min()),
                work=int(graph.duration[mine].sum()),
                tail=int(tail[mine].min()),
                first_backward=int(head[mine][graph.kind[mine] == 1].min()),
                last_forward=int(tail[f].min()),
                forwards=_items(graph.duration[f], graph.take[f]),
                backwards=_items(after, graph.take[f]),
                stays=float((graph.take[f].astype(float) * stay).sum()),
            )
        )
    return found


def most_time(items: tuple[tuple[int, int, int], ...], cap: int) -> int:
    """Upper bound on the total time of items (ticks, quanta, count) that fit in `cap`; exact for
    at most two kinds.
    """
    if len(items) <= 2:
        (time, amount, count), second = (*items, (0, 0, 0))[:2]
        best = 0
        for used in range(count + 1):
            left = cap - used * amount
            if left < 0:
                break
            more = second[2] if second[1] == 0 else min(second[2], left // second[1])
            best = max(best, used * time + more * second[0])
        return best
    total, left = 0.0, float(cap)
    for time, amount, count in sorted(items, key=lambda i: -i[0] / max(i[1], 1e-9)):
        share = count if amount == 0 else min(count, left / amount)
        total += share * time
        left -= share * amount
    return int(total + 1e-6)


def _windows(devices: list[_Device], cap: int, floor: int) -> int:
    """B5 over all devices; `floor` is what is known without it."""
    best = floor
    for d in devices:
        start = max(0, d.first_backward - d.head - most_time(d.forwards, cap))
        end = max(0, d.last_forward - d.tail - most_time(d.backwards, cap))
        base = d.head + d.work + d.tail
        if d.first_backward + d.last_forward <= max(best, base + max(start, end)):
            best = max(best, base + start + end)
        else:
            best = max(best, base + max(start, end))
    return best


def _equal_forms(problem: Problem) -> tuple[int, int]:
    """B3 and B4, or 0 where they do not apply."""
    one, two = problem.pipelines
    plain = {key: value for key, value in vars(one).items() if key != "direction"}
    same = plain == {key: value for key, value in vars(two).items() if key != "direction"}
    even = all(len(set(row)) == 1 for row in one.stage_times())
    if not (same and even) or one.direction == two.direction or one.chunks > 1 or one.lengths:
        return 0, 0
    if problem.devices != one.stages:
        return 0, 0
    f, b, *w = (to_ticks(row[0]) for row in one.stage_times())
    half, twice = (one.stages - 1) // 2, 2 * one.micro_batches
    if one.split:
        return 0, twice * (f + b + w[0]) + half * f
    return twice * (f + b) + half * (f + b), 0


class BoundFinder:
    """The bounds of one problem; heads, tails and device facts are computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = build_graph(problem)
        self.head, self.tail = heads_and_tails(self.graph)
        self.devices = _devices(self.graph, self.head, self.tail)
        count = self.graph.ids.shape[0]
        self.device = max(d.head + d.work + d.tail for d in self.devices)
        self.one_machine = max(
            preemptive_makespan(self.graph, self.head, self.tail, device, model)
            for device in range(count)
            for model in (-1, 0, 1)
        )

    def makespan(self, cap: int | None = None) -> Bounds:
        """All bounds on the makespan under a memory cap in quanta (None: no cap)."""
        plain = max(self.device, self.one_machine)
        windows = little = occupied = 0
        if cap is not None:
            windows = _windows(self.devices, cap, plain)
            little = max(d.head + d.tail + _ceil(d.stays / cap) for d in self.devices) if cap else 0
            occupied = self._least_time_by_occupancy(cap, max(plain, windows, little))
        return Bounds(
            self.device, self.one_machine, *_equal_forms(self.problem), windows, little, occupied
        )

    def _occupancy(self, makespan: int) -> np.ndarray:
        """B7: memory that every schedule of that length holds at some instant, quanta [D]."""
        graph = self.graph
        most = np.zeros(len(self.devices), np.int64)
        for device in range(len(self.devices)):
            points, change = [], []
            for take, give in zip(graph.pool_take, graph.pool_give):
                f = graph.ids[device, take, : graph.size[take]]
                g = graph.ids[device, give, : graph.size[give]]
                latest = makespan - self.tail[f] - graph.duration[f]
                freed = self.head[g] + graph.duration[g]
                held = latest < freed
                points += [latest[held], freed[held]]
                change += [graph.take[f][held], -graph.take[f][held]]
            at, delta = np.concatenate(points), np.concatenate(change)
            if at.size:
                order = np.lexsort((delta, at))  # at one instant releases come first
                most[device] = max(0, np.cumsum(delta[order]).max())
        return most

    def _least_time_by_occupancy(self, cap: int, low: int) -> int:
        """Least makespan at which B7 does not exceed the cap."""
        return _first(
            low,
            low + int(self.graph.duration.sum()) + int(self.tail.max()),
            lambda t: bool((self._occupancy(t) <= cap).all()),
        )

    def memory(self, makespan: int) -> int:
        """Lower bound in quanta on the peak memory of every schedule that takes at most `makespan`
        ticks.
        """
        d = self.devices
        largest = max(sum(a for _, a, _ in dev.forwards) for dev in d)
        one = max(int(amount) for amount in self.graph.take)
        little = max(_ceil(dev.stays / max(1, makespan - dev.head - dev.tail)) for dev in d)
        low = max(one, little, int(self._occupancy(makespan).max()))
        plain = max(self.device, self.one_machine)
        high = max(low, int(self.graph.take.sum()), largest)
        bound = _first(low, high, lambda cap: _windows(d, cap, plain) <= max(makespan, plain))
        return self._attainable(bound)

    def _attainable(self, amount: int) -> int:
        """The least sum of whole micro-batches of some device that reaches `amount`."""
        best = None
        for device in self.devices:
            if len(device.forwards) > 2:
                return amount
            (_, one, count), other = (*device.forwards, (0, 0, 0))[:2]
            for used in range(count + 1):
                rest = max(0, amount - used * one)
                more = 0 if rest == 0 else (-(-rest // other[1]) if other[1] else other[2] + 1)
                if more <= other[2]:
                    total = used * one + more * other[1]
                    best = total if best is None else min(best, total)
        return amount if best is None else max(best, amount)


def _ceil(value: float) -> int:
    """Round up, forgiving the last bits of a float sum."""
    return int(np.ceil(value * (1 - 1e-12) - 1e-6))


def _first(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Least integer in low..high with fits, for a monotone predicate that holds at high."""
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def makespan_bounds(problem: Problem) -> Bounds:
    """B1 to B7 for a problem; B5 to B7 only with its memory cap."""
    cap = None if problem.memory_cap is None else to_quanta(problem.memory_cap)
    return BoundFinder(problem).makespan(cap)
