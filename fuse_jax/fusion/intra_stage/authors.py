"""The RLHFuse authors' own search (arXiv 2409.13221 §5): greedy start, latency annealing, memory
annealing.

Written from the paper's description and the settings of its artifact, to compare with;
`search.py` is the one to use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit

from fuse_jax.fusion.intra_stage.cost import evaluate
from fuse_jax.fusion.intra_stage.graph import build_graph
from fuse_jax.fusion.intra_stage.moves import row_memory
from fuse_jax.fusion.intra_stage.problem import QUANTA_PER_UNIT, TICKS_PER_MS, Problem, to_quanta
from fuse_jax.fusion.intra_stage.random_stream import below, new_stream, uniform
from fuse_jax.fusion.intra_stage.schedule import Schedule


def authors_greedy(problem: Problem) -> Schedule:
    """The greedy start of RLHFuse's search (arXiv 2409.13221 §5): earliest start first, backward
    before forward.

    A task of the smaller model (less work a device) is passed over if it would end after a task
    of the larger model could start on that device. The cap is not looked at, as there.
    """
    graph = build_graph(problem)
    work = [graph.duration[graph.model == model].sum() for model in (0, 1)]
    return Schedule(problem, _greedy(graph, int(work[1] > work[0])))


@njit(cache=True)
def _greedy(graph, large):
    devices, classes = graph.ids.shape[0], graph.ids.shape[1]
    count = graph.duration.shape[0]
    order = np.zeros((devices, count // devices), np.int64)
    at, free = np.zeros((devices, classes), np.int64), np.zeros(devices, np.int64)
    end, begins = np.full(count, -1, np.int64), np.empty(classes, np.int64)
    far = 1 << 60
    for _ in range(count):
        best, rank, pick_d, pick_c = far, -1, -1, -1
        for d in range(devices):
            first_large = far
            for c in range(classes):
                begins[c] = far
                if at[d, c] < graph.size[c]:
                    task = graph.ids[d, c, at[d, c]]
                    before = graph.pred[task, 0]
                    if before < 0 or end[before] >= 0:
                        arrival = end[before] + graph.pred_lag[task, 0] if before >= 0 else 0
                        begins[c] = max(free[d], arrival)
                        if graph.model[task] == large:
                            first_large = min(first_large, begins[c])
            for c in range(classes):
                if begins[c] == far:
                    continue
                task = graph.ids[d, c, at[d, c]]
                late = begins[c] + graph.duration[task] > first_large
                if graph.model[task] != large and late:
                    continue
                kind = graph.kind[task] if graph.kind[task] < 2 else -1
                if begins[c] < best or (begins[c] == best and kind > rank):
                    best, rank, pick_d, pick_c = begins[c], kind, d, c
        task = graph.ids[pick_d, pick_c, at[pick_d, pick_c]]
        order[pick_d, at[pick_d].sum()] = task
        at[pick_d, pick_c] += 1
        end[task] = best + graph.duration[task]
        free[pick_d] = end[task]
    return order


@dataclass(frozen=True)
class Annealed:
    """Result of the authors' annealing: the schedule and the schedules it evaluated."""

    schedule: Schedule
    evaluations: int


def authors_annealing(
    start: Schedule,
    *,
    evaluations: int = 8_000_000,
    hot: float = 100.0,
    cold: float = 1e-12,
    target: float = 0.0,
    seed: int = 0,
) -> Annealed:
    """Algorithm 1 of RLHFuse (arXiv 2409.13221): swap two adjacent unlike tasks of a random
    device; energy = makespan in ms.

    Temperature falls geometrically from `hot` to `cold` ms over the budget, as alpha = 0.999995
    does over its 6 to 14 million steps. Better is lexicographic: makespan, then peak, then the
    sum of the devices' peaks. Stops at `target` ms.
    """
    order = start.order.copy()
    used = _anneal_latency(
        start.graph,
        order,
        evaluations,
        hot * TICKS_PER_MS,
        cold * TICKS_PER_MS,
        int(target * TICKS_PER_MS),
        new_stream(seed),
    )
    return Annealed(Schedule(start.problem, order), used)


def authors_memory_annealing(
    start: Schedule,
    *,
    evaluations: int = 8_000_000,
    hot: float = 100.0,
    cold: float = 1e-16,
    goal: float = 0.0,
    seed: int = 0,
) -> Annealed:
    """Algorithm 2: take one task out and put it in elsewhere on its device; energy = sum of the
    devices' peaks.

    Neighbours with a longer makespan are rejected. Temperatures in the problem's memory unit;
    stops when the peak is `goal`.
    """
    order = start.order.copy()
    used = _anneal_peaks(
        start.graph,
        order,
        evaluations,
        hot * QUANTA_PER_UNIT,
        cold * QUANTA_PER_UNIT,
        to_quanta(goal),
        new_stream(seed),
    )
    return Annealed(Schedule(start.problem, order), used)


@njit(cache=True)
def _renumber(graph, order, device):
    """Number a device's classes in index order again, whatever the row says now."""
    at = np.zeros(graph.size.shape[0], np.int64)
    for k in range(order.shape[1]):
        cls = graph.cls[order[device, k]]
        order[device, k] = graph.ids[device, cls, at[cls]]
        at[cls] += 1


@njit(cache=True)
def _anneal_latency(graph, order, budget, hot, cold, target, state):
    """Algorithm 1 in place; `order` ends as the best. Returns the evaluations used."""
    devices, length = order.shape
    start, end = np.empty_like(graph.duration), np.empty_like(graph.duration)
    peaks = np.empty(devices, np.int64)
    for d in range(devices):
        peaks[d] = row_memory(graph.take, graph.give, order, d, 0)[0]
    current = evaluate(graph, order, start, end)
    best, best_peak, best_sum, best_order = current, peaks.max(), peaks.sum(), order.copy()
    used = 1
    while used < budget and best > target:
        heat = hot * (cold / hot) ** (used / budget)
        device, left = below(state, devices), below(state, length - 1)
        if graph.cls[order[device, left]] == graph.cls[order[device, left + 1]]:
            continue
        one, two = order[device, left], order[device, left + 1]
        order[device, left], order[device, left + 1] = two, one
        reached = evaluate(graph, order, start, end)
        used += 1
        worse = reached - current
        if reached < 0 or (worse > 0 and uniform(state) >= math.exp(-worse / heat)):
            order[device, left], order[device, left + 1] = one, two
            continue
        current = reached
        peaks[device] = row_memory(graph.take, graph.give, order, device, 0)[0]
        peak, total = peaks.max(), peaks.sum()
        if (current, peak, total) < (best, best_peak, best_sum):
            best, best_peak, best_sum = current, peak, total
            best_order[:] = order
    order[:] = best_order
    return used


@njit(cache=True)
def _anneal_peaks(graph, order, budget, hot, cold, goal, state):
    """Algorithm 2 in place; `order` ends as the best. Returns the evaluations used."""
    devices, length = order.shape
    start, end = np.empty_like(graph.duration), np.empty_like(graph.duration)
    peaks, row = np.empty(devices, np.int64), np.empty(length, np.int64)
    for d in range(devices):
        peaks[d] = row_memory(graph.take, graph.give, order, d, 0)[0]
    current = evaluate(graph, order, start, end)
    best, best_peak, best_sum, best_order = current, peaks.max(), peaks.sum(), order.copy()
    used = 1
    while used < budget and best_peak > goal:
        heat = hot * (cold / hot) ** (used / budget)
        device, source, to = below(state, devices), below(state, length), below(state, length)
        if source == to:
            continue
        row[:] = order[device]
        task, step, k = order[device, source], 1 if source < to else -1, source
        while k != to:
            order[device, k] = order[device, k + step]
            k += step
        order[device, to] = task
        _renumber(graph, order, device)
        used += 1
        peak = row_memory(graph.take, graph.give, order, device, 0)[0]
        worse = peak - peaks[device]
        reached = -1
        if worse <= 0 or uniform(state) < math.exp(-worse / heat):
            reached = evaluate(graph, order, start, end)
        if reached < 0 or reached > best:
            order[device] = row
            continue
        current = reached
        peaks[device] = peak
        highest, total = peaks.max(), peaks.sum()
        if (current, highest, total) < (best, best_peak, best_sum):
            best, best_peak, best_sum = current, highest, total
            best_order[:] = order
    order[:] = best_order
    return used
