"""Forward-backward improvement: list schedules whose priorities come from another schedule's
times.

Schedule forwards by planned start; then the time-reversed problem by planned end; then forwards
again. Each pass packs what the one before left loose (Li & Willis 1992, Tormos & Lova 2001).
Around it an annealed walk over the
priorities: shift a class, or shake a window of time, on one device or all.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fuse_jax.fusion.intra_stage.list_scheduling import list_schedule
from fuse_jax.fusion.intra_stage.random_stream import below, normal, uniform

# Placing a task by list scheduling costs about eight times as much as timing it (measured).
LIST_COST = 8


@njit(cache=True)
def _shake(graph, key, span, spread, state, out):
    """Perturb priorities (minus planned starts): by window and device, by window, by class and
    device, by class, or all.
    """
    out[:] = key
    count, devices, classes = key.shape[0], graph.ids.shape[0], graph.ids.shape[1]
    kind = uniform(state)
    if kind < 0.5:
        device = below(state, devices) if kind < 0.3 else -1
        reach = span * (0.02 + 0.2 * uniform(state)) * (1.0 if kind < 0.3 else 0.5)
        center = uniform(state) * span
        size = spread * (0.5 if kind < 0.3 else 0.3)
        for task in range(count):
            near = abs(-key[task] - center) < reach
            if near and (device < 0 or graph.device[task] == device):
                out[task] += normal(state) * size
    elif kind < 0.75:
        device, cls = below(state, devices), below(state, classes)
        shift = normal(state) * spread
        low, high = 0, graph.size[cls]
        if high > 2 and uniform(state) < 0.5:
            low = below(state, high)
            high = low + 1 + below(state, high - low)
        for m in range(low, high):
            out[graph.ids[device, cls, m]] += shift
    elif kind < 0.9:
        cls = below(state, classes)
        shift, slope = normal(state) * spread * 0.5, normal(state) * spread * 0.1
        for device in range(devices):
            for m in range(graph.size[cls]):
                out[graph.ids[device, cls, m]] += shift + slope * device
    else:
        for task in range(count):
            out[task] += normal(state) * spread * 0.2


@njit(cache=True)
def forward_backward(graph, back, key, budget, target, cap, state, best_order):
    """Walk from priorities `key` until `budget` units of work or `target` ticks; a timed task is
    one unit.

    graph and its reverse `back`; key float64 [n]; best_order int64 [D, L] receives the best
    schedule. Returns (its makespan or -1, work done).
    """
    count = key.shape[0]
    mean = max(1.0, graph.duration.mean())
    order = np.empty_like(best_order)
    start, end, end_back = (
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.int64),
    )
    trial, found, planned = np.empty(count), key.copy(), np.empty(count)
    current, best, used = -1, -1, 0
    while used < budget:
        heat = mean * 0.2 * 0.05 ** (used / budget)
        if current < 0:
            trial[:] = key
        else:
            _shake(graph, key, current, 4.0 * mean, state, trial)
        pick = below(state, 5)
        slack = 0 if pick < 3 else int(mean * (0.3 if pick == 3 else 1.0))
        reached = list_schedule(graph, trial, slack, cap, order, start, end)
        used += LIST_COST * count
        if reached < 0:
            if current < 0:
                return best, used
            continue
        for _ in range(4):
            if best < 0 or reached < best:
                best = reached
                best_order[:] = order
            for task in range(count):
                found[task] = -start[task]
                planned[task] = end[task]
            if best <= target:
                return best, used
            if list_schedule(back, planned, slack, cap, order, start, end_back) < 0:
                break
            for task in range(count):
                planned[task] = end_back[task]
            again = list_schedule(graph, planned, slack, cap, order, start, end)
            used += 2 * LIST_COST * count
            if again < 0 or again >= reached:
                break
            reached = again
        worse = reached - current
        if current < 0 or worse <= 0 or uniform(state) < math.exp(-worse / heat):
            current = reached
            key[:] = found
    return best, used
