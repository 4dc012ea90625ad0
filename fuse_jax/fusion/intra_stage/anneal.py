"""Annealing on the makespan: move tasks on a critical path, under a hard memory cap.

Only moves that touch a longest path can shorten a schedule. Half of the moves insert a task at
the edge of (or inside) its block, the run of tasks that follow each other on one device of the
path (van Laarhoven, Aarts & Lenstra 1992; Dell'Amico & Trubian 1993), most others swap two of
them; a few swap any two neighbours.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fuse_jax.fusion.intra_stage.cost import evaluate_under
from fuse_jax.fusion.intra_stage.moves import move_task, positions, row_memory
from fuse_jax.fusion.intra_stage.random_stream import below, uniform
from fuse_jax.fusion.intra_stage.retime import (
    MOVE_COST,
    latest,
    may_fit,
    new_labels,
    undo_ends,
    update_afters,
    update_ends,
)


@njit(cache=True)
def _critical_path(graph, order, labels, makespan, state, path):
    """Fill `path` with one longest path, last task first, ties broken at random; its length."""
    end, position, duration = labels.end, labels.position, graph.duration
    task, ties = -1, 0
    for d in range(order.shape[0]):
        for k in range(order.shape[1] - 1, -1, -1):
            last = order[d, k]
            if end[last] + graph.tail[last] == makespan:
                ties += 1
                if below(state, ties) == 0:
                    task = last
            if end[last] < end[order[d, order.shape[1] - 1]] and graph.tail[last] == 0:
                break
    count = 0
    while task >= 0:
        path[count] = task
        count += 1
        before, ties, start = -1, 0, end[task] - duration[task]
        if position[task] > 0:
            left = order[graph.device[task], position[task] - 1]
            if end[left] == start:
                before, ties = left, 1
        for z in range(2):
            source = graph.pred[task, z]
            if source >= 0 and end[source] + graph.pred_lag[task, z] == start:
                ties += 1
                if before < 0 or below(state, ties) == 0:
                    before = source
        task = before
    return count


@njit(cache=True)
def _block(graph, position, path, count, index):
    """First and last position of the run around path[index] on its device."""
    home = graph.device
    first = index
    while first + 1 < count and home[path[first + 1]] == home[path[index]]:
        if position[path[first + 1]] != position[path[first]] - 1:
            break
        first += 1
    last = index
    while last > 0 and home[path[last - 1]] == home[path[index]]:
        if position[path[last - 1]] != position[path[last]] + 1:
            break
        last -= 1
    return position[path[first]], position[path[last]]


@njit(cache=True)
def _draw_move(graph, order, position, path, count, state):
    """(device, source, destination) of a move, (-1, 0, 0) if the draw gave none."""
    kind = uniform(state)
    if kind < 0.1:
        device = below(state, order.shape[0])
        source = below(state, order.shape[1])
        return device, source, source + 1
    index = below(state, count)
    device = graph.device[path[index]]
    source = position[path[index]]
    if kind < 0.5:
        return device, source, source - 1
    first, last = _block(graph, position, path, count, index)
    if first == last:
        return device, source, source + (1 if uniform(state) < 0.5 else -1)
    where = uniform(state)
    if where < 0.4:
        to = first
    elif where < 0.8:
        to = last
    else:
        to = first + below(state, last - first + 1)
    if uniform(state) < 0.2:
        to += 1 if uniform(state) < 0.5 else -1
    return device, source, to


@njit(cache=True)
def anneal_makespan(graph, tail, order, cap, budget, hot, cold, target, state, best_order):
    """Shorten a valid schedule until `budget` tasks were timed or `target` ticks reached.

    tail int64 [n]: lower bounds on what follows each task, to give up early. order int64 [D, L]
    is changed in place; cap quanta, -1 for none; hot, cold: temperatures in ticks. best_order
    receives the best. Returns (its makespan, tasks timed).
    """
    length = order.shape[1]
    labels = new_labels(graph, order)
    path = np.empty(graph.duration.shape[0], np.int64)
    current = latest(graph, order, labels.end)
    best, used, stale, steps = current, graph.duration.shape[0], True, 0
    best_order[:] = order
    heat = hot
    while used < budget and best > target:
        if steps % 64 == 0:
            heat = hot * (cold / hot) ** (used / budget)
        steps += 1
        used += MOVE_COST
        if stale:
            on_path = _critical_path(graph, order, labels, current, state, path)
            used += on_path
            stale = False
        device, source, to = _draw_move(graph, order, labels.position, path, on_path, state)
        if to < 0 or to >= length:
            continue
        if (
            abs(to - source) == 1
            and graph.cls[order[device, source]] == graph.cls[order[device, to]]
        ):
            continue
        low, high = min(source, to), max(source, to)
        limit = current + int(-heat * math.log(1.0 - uniform(state)))
        move_task(graph, order, labels.position, device, source, to)
        kept = may_fit(graph, order, labels, device, low, high, limit)
        if kept and cap >= 0:
            kept = row_memory(graph.take, graph.give, order, device, cap)[0] <= cap
        if kept:
            status, logged, spent = update_ends(
                graph, tail, order, labels, device, low, high, limit
            )
            used += spent
            reached = latest(graph, order, labels.end) if status == 0 else -1
            if status < 0 or reached > limit:
                undo_ends(labels, logged)
                kept = False
        if not kept:
            move_task(graph, order, labels.position, device, to, source)
            stale = uniform(state) < 0.02
            continue
        used += update_afters(graph, tail, order, labels, device, low, high)
        current, stale = reached, True
        if current < best:
            best = current
            best_order[:] = order
    return best, used


@njit(cache=True)
def anneal_under(graph, order, model, cap, budget, hot, cold, target, state, best_order):
    """As `anneal_makespan` for the cost models that block: short insertions anywhere, all tasks
    timed each move.
    """
    count, length = graph.duration.shape[0], order.shape[1]
    start, end, position = (
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.int64),
    )
    positions(order, position)
    current = evaluate_under(graph, order, model, start, end)
    best, used = current, count
    best_order[:] = order
    while used < budget and best > target:
        heat = hot * (cold / hot) ** (used / budget)
        used += 8
        device, source = below(state, order.shape[0]), below(state, length)
        reach = 1
        while reach < 8 and uniform(state) < 0.5:
            reach += 1
        to = source + (reach if uniform(state) < 0.5 else -reach)
        if (
            to < 0
            or to >= length
            or graph.cls[order[device, source]] == graph.cls[order[device, to]]
        ):
            continue
        move_task(graph, order, position, device, source, to)
        peak, _ = row_memory(graph.take, graph.give, order, device, 0)
        reached = -1
        if cap < 0 or peak <= cap:
            reached = evaluate_under(graph, order, model, start, end)
            used += count
        if reached >= 0 and reached - current <= -heat * math.log(1.0 - uniform(state)):
            current = reached
            if current < best:
                best = current
                best_order[:] = order
        else:
            move_task(graph, order, position, device, to, source)
    return best, used
