"""Time a schedule again after a move: what the annealers spend their evaluations on.

A schedule in hand is two labels a task: `end`, when it ends, and `after`, the longest way from
there to the end of the step. A move changes the order inside a window of one device's row. Three
tools, from cheap to sure:

* `may_fit` judges a move from the labels around the window alone (Balas & Vazacopoulos 1998).
  Nearly all moves that would make the step too long end there.
* Labels are corrected outwards from the window until nothing changes: the bubbles of a schedule
  absorb most moves (measured: three of 3,072 tasks change).
* All that starts after the window's begin is timed anew, which notices a deadlock: for moves that
  shift much, and for problems with tasks of no length, whose circles no label would show.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fuse_jax.fusion.intra_stage.cost import evaluate

# Drawing and judging a move costs about as much as timing this many tasks (measured).
MOVE_COST = 48
DEADLOCK = -1
TOO_LONG = -2
_SHIFTS_MUCH = -3


class Labels(NamedTuple):
    """Times of a schedule of n tasks, ticks, and scratch.

    end, after int64 [n]: see above; position int64 [n]: place of each task in its row. local: all
    tasks take time, so labels may be corrected locally. log, log_value, queue int64 [n], queued
    bool [n] (all False), ends, afters int64 [L]: scratch.
    """

    end: np.ndarray
    after: np.ndarray
    position: np.ndarray
    local: bool
    log: np.ndarray
    log_value: np.ndarray
    queue: np.ndarray
    queued: np.ndarray
    ends: np.ndarray
    afters: np.ndarray


@njit(cache=True)
def new_labels(graph, order):
    """Labels of a valid schedule."""
    count, length = graph.duration.shape[0], order.shape[1]
    labels = Labels(
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        graph.duration.min() > 0,
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.bool_),
        np.zeros(length, np.int64),
        np.zeros(length, np.int64),
    )
    label_all(graph, order, labels)
    return labels


@njit(cache=True)
def label_all(graph, order, labels):
    """Label a valid schedule from nothing."""
    evaluate(graph, order, np.empty_like(labels.end), labels.end)
    labels.after[:] = 0
    _afters_anew(graph, order, labels.after, 0, order.shape[1] - 1)
    for d in range(order.shape[0]):
        for k in range(order.shape[1]):
            labels.position[order[d, k]] = k


@njit(cache=True)
def latest(graph, order, end):
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
def may_fit(graph, order, labels, device, low, high, limit):
    """Whether no path through positions low..high of a device's row seems longer than `limit`.

    The labels are those of the schedule before the move, `position` of that after it. A guess, for
    what lies on other devices between two tasks of the window may change too: measured wrong for
    one refused move in 30,000.
    """
    pred, pred_lag, succ, succ_lag = graph.pred, graph.pred_lag, graph.succ, graph.succ_lag
    duration, home = graph.duration, graph.device
    position, ends, afters = labels.position, labels.ends, labels.afters
    behind = 0
    if high + 1 < order.shape[1]:
        task = order[device, high + 1]
        behind = labels.after[task] + duration[task]
    for k in range(high, low - 1, -1):
        task = order[device, k]
        longest = max(graph.tail[task], behind)
        for z in range(2):
            later = succ[task, z]
            if later >= 0:
                rest = labels.after[later]
                if home[later] == device and position[later] <= high:
                    if position[later] < k:
                        return False
                    rest = afters[position[later]]
                longest = max(longest, succ_lag[task, z] + duration[later] + rest)
        afters[k] = longest
        behind = longest + duration[task]
    clock = labels.end[order[device, low - 1]] if low > 0 else 0
    for k in range(low, high + 1):
        task = order[device, k]
        before = pred[task, 0]
        if before >= 0:
            ready = labels.end[before]
            if home[before] == device and position[before] >= low:
                if position[before] > k:
                    return False
                ready = ends[position[before]]
            clock = max(clock, ready + pred_lag[task, 0])
        clock += duration[task]
        ends[k] = clock
        if clock + afters[k] > limit:
            return False
    return True


@njit(cache=True)
def _spread(graph, tail, order, labels, forwards, device, low, high, limit):
    """Correct `end` (or, not `forwards`, `after`) outwards from a window.

    Returns (0, TOO_LONG as soon as an end + tail exceeds `limit`, or _SHIFTS_MUCH; labels logged).
    Around a circle labels grow until one of the two.
    """
    source, source_lag = (graph.pred, graph.pred_lag) if forwards else (graph.succ, graph.succ_lag)
    sink = graph.succ if forwards else graph.pred
    duration, home, position = graph.duration, graph.device, labels.position
    value = labels.end if forwards else labels.after
    queue, queued, log, log_value = labels.queue, labels.queued, labels.log, labels.log_value
    length, room, step = order.shape[1], queue.shape[0], 1 if forwards else -1
    begin, stop = (low, min(high + 1, length - 1)) if forwards else (high, max(low - 1, 0))
    last, most = 0, room // 4
    for k in range(begin, stop + step, step):
        queue[last] = order[device, k]
        queued[queue[last]] = True
        last += 1
    first, waiting, logged, status = 0, last, 0, 0
    last %= room
    while waiting > 0:
        task = queue[first]
        first = first + 1 if first + 1 < room else 0
        waiting -= 1
        queued[task] = False
        if status < 0:
            continue
        row, k = home[task], position[task]
        # `end` counts the task itself, `after` does not: it begins where the next one begins
        own = duration[task] if forwards else 0
        label = 0 if forwards else graph.tail[task]
        if 0 <= k - step < length:
            beside = order[row, k - step]
            label = max(label, value[beside] + (0 if forwards else duration[beside]))
        for z in range(2):
            other = source[task, z]
            if other >= 0:
                reach = value[other] + source_lag[task, z] + (0 if forwards else duration[other])
                label = max(label, reach)
        label += own
        if label == value[task]:
            continue
        log[logged], log_value[logged] = task, value[task]
        logged += 1
        value[task] = label
        if forwards and label + tail[task] > limit:
            status = TOO_LONG
        elif logged >= most:
            status = _SHIFTS_MUCH
        for z in range(3):
            if z < 2:
                next_ = sink[task, z]
            else:
                next_ = order[row, k + step] if 0 <= k + step < length else -1
            if next_ >= 0 and not queued[next_]:
                queue[last] = next_
                queued[next_] = True
                last = last + 1 if last + 1 < room else 0
                waiting += 1
    return status, logged


@njit(cache=True)
def _ends_anew(graph, tail, order, labels, device, low, limit):
    """Time again all that starts no sooner than position `low` of a device's row can.

    Returns (0, DEADLOCK, or TOO_LONG as soon as some end + tail exceeds `limit`; tasks logged).
    """
    pred, pred_lag, succ, home = graph.pred, graph.pred_lag, graph.succ, graph.device
    duration, end, log, log_value = graph.duration, labels.end, labels.log, labels.log_value
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
                if end[order[d, middle]] - duration[order[d, middle]] < since:
                    cut = middle + 1
                else:
                    high = middle
        at[d] = cut
        free[d] = end[order[d, cut - 1]] if cut > 0 else 0
        stack[d] = d
        for k in range(cut, length):
            task = order[d, k]
            log[logged], log_value[logged] = task, end[task]
            end[task] = -1
            logged += 1
    top, done = devices, 0
    while top > 0:
        top -= 1
        d = stack[top]
        k, clock = at[d], free[d]
        while k < length:
            task = order[d, k]
            before = pred[task, 0]
            if before >= 0:
                if end[before] < 0:
                    break
                clock = max(clock, end[before] + pred_lag[task, 0])
            clock += duration[task]
            end[task] = clock
            if clock + tail[task] > limit:
                return TOO_LONG, logged
            k += 1
            done += 1
            for z in range(2):
                later = succ[task, z]
                if later >= 0:
                    other = home[later]
                    if other != d and at[other] < length and order[other, at[other]] == later:
                        stack[top] = other
                        top += 1
        at[d], free[d] = k, clock
    return (DEADLOCK if done < logged else 0), logged


@njit(cache=True)
def _afters_anew(graph, order, after, device, high):
    """Reckon `after` again of all that ends no later than position `high` of a device's row can;
    how many.
    """
    pred, succ, succ_lag, home = graph.pred, graph.succ, graph.succ_lag, graph.device
    duration, tail = graph.duration, graph.tail
    devices, length = order.shape
    since = 0
    if high + 1 < length:
        task = order[device, high + 1]
        since = after[task] + duration[task]
    at, behind = np.empty(devices, np.int64), np.zeros(devices, np.int64)
    stack = np.empty(2 * duration.shape[0] + devices, np.int64)
    todo = 0
    for d in range(devices):
        cut = high
        if d != device:
            low, cut = -1, length - 1
            while low < cut:
                middle = (low + cut + 1) // 2
                if after[order[d, middle]] >= since:
                    low = middle
                else:
                    cut = middle - 1
        at[d] = cut
        if cut + 1 < length:
            task = order[d, cut + 1]
            behind[d] = after[task] + duration[task]
        stack[d] = d
        for k in range(cut + 1):
            after[order[d, k]] = -1
        todo += cut + 1
    top = devices
    while top > 0:
        top -= 1
        d = stack[top]
        while at[d] >= 0:
            task = order[d, at[d]]
            longest, ready = max(behind[d], tail[task]), True
            for z in range(2):
                later = succ[task, z]
                if later >= 0:
                    if after[later] < 0:
                        ready = False
                        break
                    longest = max(longest, after[later] + duration[later] + succ_lag[task, z])
            if not ready:
                break
            after[task] = longest
            behind[d] = longest + duration[task]
            at[d] -= 1
            before = pred[task, 0]
            if before >= 0:
                other = home[before]
                if other != d and at[other] >= 0 and order[other, at[other]] == before:
                    stack[top] = other
                    top += 1
    return todo


@njit(cache=True)
def update_ends(graph, tail, order, labels, device, low, high, limit):
    """New ends after a move inside positions low..high of a device's row.

    tail [n]: lower bounds on `after` in any schedule, to give up early. Returns (0, DEADLOCK or
    TOO_LONG; labels logged for `undo_ends`; labels reckoned).
    """
    spent = 0
    if labels.local:
        status, logged = _spread(graph, tail, order, labels, True, device, low, high, limit)
        if status != _SHIFTS_MUCH:
            return status, logged, logged
        undo_ends(labels, logged)
        spent = logged
    status, logged = _ends_anew(graph, tail, order, labels, device, low, limit)
    return status, logged, spent + logged


@njit(cache=True)
def undo_ends(labels, logged):
    """Put the logged ends back, the latest first."""
    for k in range(logged - 1, -1, -1):
        labels.end[labels.log[k]] = labels.log_value[k]


@njit(cache=True)
def update_afters(graph, tail, order, labels, device, low, high):
    """New `after` once a move inside positions low..high is kept; labels reckoned."""
    spent = 0
    if labels.local:
        status, logged = _spread(graph, tail, order, labels, False, device, low, high, 0)
        if status == 0:
            return logged
        for k in range(logged - 1, -1, -1):
            labels.after[labels.log[k]] = labels.log_value[k]
        spent = logged
    return spent + _afters_anew(graph, order, labels.after, device, high)
