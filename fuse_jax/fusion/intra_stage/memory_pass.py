"""The memory pass: lower the peak of a schedule while its makespan stays within a hard limit.

RLHFuse's second annealing (arXiv 2409.13221, Algorithm 2) scores the sum of the devices' peaks; a
peak is flat almost everywhere, so nearly all moves look alike. Here the energy is, over all
devices, (excess of the peak over the level + 0.1 x area above the level) / the smallest
activation: moves that shave a plateau count before the peak falls. The level is one quantum below
what was reached and falls with every success. Schedules that would take longer than the limit are
never accepted, and given up as soon as an end + tail exceeds it.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fuse_jax.fusion.intra_stage.moves import move_task, row_memory
from fuse_jax.fusion.intra_stage.random_stream import below, uniform
from fuse_jax.fusion.intra_stage.retime import (
    MOVE_COST,
    label_all,
    may_fit,
    new_labels,
    undo_ends,
    update_afters,
    update_ends,
)

_AREA_WEIGHT = 0.1
_LONGEST_MOVE = 12


@njit(cache=True)
def _aimed_move(take, give, order, peaks, level, state):
    """A move against the excess of some device: delay a take behind the next release, or bring a
    release forward.
    """
    devices, length = order.shape
    first = below(state, devices)
    device = first
    while peaks[device] <= level:
        device = (device + 1) % devices
        if device == first:
            return -1, 0, 0
    held, seen, spot = 0, 0, -1
    for k in range(length):
        task = order[device, k]
        held += take[task]
        if held > level and take[task] > 0:
            seen += 1
            if below(state, seen) == 0:
                spot = k
        held -= give[task]
    if uniform(state) < 0.5:
        source, back = spot, below(state, 4)
        while back > 0 and source > 0:
            source -= 1
            if take[order[device, source]] > 0:
                back -= 1
        to = source + 1
        while to < length and give[order[device, to]] == 0:
            to += 1
        if take[order[device, source]] == 0 or to >= length:
            return -1, 0, 0
        return device, source, min(length - 1, to + below(state, 2))
    source, ahead = spot + 1, below(state, 3)
    while source < length:
        if give[order[device, source]] > 0:
            if ahead == 0:
                break
            ahead -= 1
        source += 1
    if source >= length:
        return -1, 0, 0
    return device, source, max(0, spot - below(state, 3))


@njit(cache=True)
def _measure(graph, order, level, peaks, areas):
    """Fill peaks and areas [D]; energy before division: excess + weighted area, quanta."""
    energy = 0.0
    for d in range(order.shape[0]):
        peaks[d], areas[d] = row_memory(graph.take, graph.give, order, d, level)
        energy += max(0, peaks[d] - level) + _AREA_WEIGHT * areas[d]
    return energy


@njit(cache=True)
def lower_memory(
    graph, tail, order, limit, level, goal, budget, cycle, hot, cold, state, best_order
):
    """Lower the peak of a schedule no longer than `limit` ticks until `budget` tasks were timed
    or the peak is `goal`.

    tail int64 [n] as in `anneal_makespan`; order int64 [D, L] changed in place; level: first peak
    aimed at, quanta; cycle: tasks timed from hot to cold (temperatures in smallest activations).
    best_order receives the lowest schedule. Returns (its peak, tasks timed).
    """
    count, devices, length = graph.duration.shape[0], order.shape[0], order.shape[1]
    labels = new_labels(graph, order)
    peaks, areas = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    smallest = graph.take.max()
    for task in range(count):
        if 0 < graph.take[task] < smallest:
            smallest = graph.take[task]
    energy = _measure(graph, order, level, peaks, areas)
    best = peaks.max()
    best_order[:] = order
    lowest, lowest_order = energy, order.copy()
    used, began, steps, heat = count, 0, 0, hot
    while used < budget and best > goal:
        if steps % 64 == 0:
            share = (used - began) / cycle
            if share >= 1.0:
                began, share = used, 0.0
                order[:] = lowest_order
                label_all(graph, order, labels)
                energy = _measure(graph, order, level, peaks, areas)
            heat = hot * (cold / hot) ** share * smallest
        steps += 1
        used += MOVE_COST
        if uniform(state) < 0.3:
            device, source, to = _aimed_move(graph.take, graph.give, order, peaks, level, state)
            if device < 0:
                continue
        else:
            device, source, reach = below(state, devices), below(state, length), 1
            while reach < _LONGEST_MOVE and uniform(state) < 0.7:
                reach += 1
            to = source + (reach if uniform(state) < 0.5 else -reach)
        if to < 0 or to >= length or to == source:
            continue
        if (
            abs(to - source) == 1
            and graph.cls[order[device, source]] == graph.cls[order[device, to]]
        ):
            continue
        low, high = min(source, to), max(source, to)
        move_task(graph, order, labels.position, device, source, to)
        kept = may_fit(graph, order, labels, device, low, high, limit)
        if kept:
            peak, area = row_memory(graph.take, graph.give, order, device, level)
            change = max(0, peak - level) - max(0, peaks[device] - level)
            trial = energy + change + _AREA_WEIGHT * (area - areas[device])
            kept = trial <= energy - heat * math.log(1.0 - uniform(state))
        if kept:
            status, logged, spent = update_ends(
                graph, tail, order, labels, device, low, high, limit
            )
            used += spent
            if status < 0:
                undo_ends(labels, logged)
                kept = False
        if not kept:
            move_task(graph, order, labels.position, device, to, source)
            continue
        used += update_afters(graph, tail, order, labels, device, low, high)
        energy = trial
        peaks[device], areas[device] = peak, area
        if energy < lowest - 0.5:
            lowest = energy
            lowest_order[:] = order
        if peak < best and peaks.max() < best:
            best = peaks.max()
            best_order[:] = order
        if energy <= 0.5 and peaks.max() <= level:
            level = best - 1
            energy = _measure(graph, order, level, peaks, areas)
            lowest = energy
            lowest_order[:] = order
            began = used
    return best, used
