"""Shared parts of the annealers: move a task, time again what the move changed, undo, find a
critical path.

A device's row is a string of classes: moving a task means moving its class letter, after which
each class is numbered again in index order. Times before the moved window stay, so only tasks
that start at or after it are timed again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

DEADLOCK = -1
TOO_LONG = -2


@njit(cache=True)
def move_task(graph, order, position, device, source, to):
    """Move the class letter at `source` to `to` in a device's row; the opposite call undoes it."""
    task = order[device, source]
    cls, m = graph.cls[task], graph.micro_batch[task]
    step = 1 if source < to else -1
    k = source
    while k != to:
        following = order[device, k + step]
        if graph.cls[following] == cls:
            order[device, k] = graph.ids[device, cls, m]
            m += step
        else:
            order[device, k] = following
        position[order[device, k]] = k
        k += step
    order[device, to] = graph.ids[device, cls, m]
    position[order[device, to]] = to


@njit(cache=True)
def row_memory(take, give, order, device, level):
    """(Peak of a device's row, area above `level` over the tasks that take memory), quanta."""
    held, peak, area = 0, 0, 0
    for k in range(order.shape[1]):
        task = order[device, k]
        if take[task] > 0:
            held += take[task]
            peak = max(peak, held)
            area += max(0, held - level)
        held -= give[task]
    return peak, area


@njit(cache=True)
def reschedule(graph, tail, order, start, end, device, low, limit, log, log_start, log_end):
    """Time again after a change of `device`'s row from position `low` on.

    Returns (makespan, or DEADLOCK, or TOO_LONG as soon as some end + tail exceeds `limit`; tasks
    logged). The old times of all tasks concerned stand in the log for `undo`.
    """
    pred, pred_lag, succ, home = graph.pred, graph.pred_lag, graph.succ, graph.device
    duration = graph.duration
    devices, length = order.shape
    since = end[order[device, low - 1]] if low > 0 else 0
    at, free = np.empty(devices, np.int64), np.empty(devices, np.int64)
    stack = np.empty(2 * duration.shape[0] + devices, np.int64)
    logged = 0
    for d in range(devices):
        cut = low
        if d != device:
            cut, high = 0, length
            while cut < high:
                middle = (cut + high) // 2
                if start[order[d, middle]] < since:
                    cut = middle + 1
                else:
                    high = middle
        at[d] = cut
        free[d] = end[order[d, cut - 1]] if cut > 0 else 0
        stack[d] = d
        for k in range(cut, length):
            task = order[d, k]
            log[logged], log_start[logged], log_end[logged] = task, start[task], end[task]
            end[task] = -1
            logged += 1
    top, done = devices, 0
    while top > 0:
        top -= 1
        d = stack[top]
        k, clock = at[d], free[d]
        while k < length:
            task = order[d, k]
            begin, ready = clock, True
            for z in range(2):
                before = pred[task, z]
                if before >= 0:
                    if end[before] < 0:
                        ready = False
                        break
                    begin = max(begin, end[before] + pred_lag[task, z])
            if not ready:
                break
            clock = begin + duration[task]
            start[task], end[task] = begin, clock
            if clock + tail[task] > limit:
                return TOO_LONG, logged
            k += 1
            done += 1
            for z in range(2):
                after = succ[task, z]
                if after >= 0:
                    other = home[after]
                    if other != d and at[other] < length and order[other, at[other]] == after:
                        stack[top] = other
                        top += 1
        at[d], free[d] = k, clock
    if done < logged:
        return DEADLOCK, logged
    return _latest(graph, order, end), logged


@njit(cache=True)
def _latest(graph, order, end):
    """Makespan of a timed schedule: last ends, and last gradients with their tails."""
    latest = 0
    for d in range(order.shape[0]):
        latest = max(latest, end[order[d, order.shape[1] - 1]])
        for pool in range(graph.pool_give.shape[0]):
            cls = graph.pool_give[pool]
            if graph.size[cls] > 0:
                task = graph.ids[d, cls, graph.size[cls] - 1]
                latest = max(latest, end[task] + graph.tail[task])
    return latest


@njit(cache=True)
def undo(start, end, logged, log, log_start, log_end):
    """Put the logged times back."""
    for k in range(logged):
        start[log[k]], end[log[k]] = log_start[k], log_end[k]


@njit(cache=True)
def positions(order, position):
    """Fill position [n] with each task's place in its row."""
    for d in range(order.shape[0]):
        for k in range(order.shape[1]):
            position[order[d, k]] = k
