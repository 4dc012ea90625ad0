"""List scheduling: build a schedule task by task from priorities, in one pass, never above the
memory cap.

The next task starts as early as any can; among a device's tasks that can start then (or within
`slack` ticks) the one with the highest priority is taken. Only the first unscheduled task of each
class is a candidate.

Memory cannot block the pass for ever: a task that takes memory is only a candidate if, after it,
  there is room for
all that the oldest unfinished micro-batch of each model still has to take on that device. The
globally oldest micro-batch of a model can then always go on, on every device, and frees what it
holds.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fuse_jax.fusion.intra_stage.graph import Graph

NO_CAP = -1
_FAR = 1 << 60


@njit(cache=True)
def _reserve(ids, size, take, pool_model, pool_take, pool_give, at, device, need, oldest):
    """Oldest unfinished micro-batch of each model on a device [2], and the memory it has yet to
    take [2].
    """
    oldest[0], oldest[1], need[0], need[1] = _FAR, _FAR, 0, 0
    for pool in range(pool_model.shape[0]):
        model = pool_model[pool]
        oldest[model] = min(oldest[model], at[device, pool_give[pool]])
    for pool in range(pool_model.shape[0]):
        model, cls = pool_model[pool], pool_take[pool]
        if at[device, cls] <= oldest[model] < size[cls]:
            need[model] += take[ids[device, cls, oldest[model]]]


@njit(cache=True)
def _earliest(pred, pred_lag, end, free, task):
    """Earliest start of a task on a device that is free then, or _FAR while its input is not
    scheduled.
    """
    begin = free
    for z in range(2):
        before = pred[task, z]
        if before >= 0:
            if end[before] < 0:
                return _FAR
            begin = max(begin, end[before] + pred_lag[task, z])
    return begin


@njit(cache=True)
def list_schedule(graph, priority, slack, cap, order, start, end):
    """Fill order [D, L], start and end [n]; makespan in ticks, or -1 if the cap holds no
    micro-batch of each model.

    priority float64 [n], higher first; slack ticks; cap quanta, -1 for none. Every start is the
    earliest for the order built.
    """
    # Local names: passing the whole graph on for every task costs more than the scheduling, in
    # reference counts.
    ids, size, take, give, owner = graph.ids, graph.size, graph.take, graph.give, graph.model
    pools, taking, giving = graph.pool_model, graph.pool_take, graph.pool_give
    pred, pred_lag, succ, duration = graph.pred, graph.pred_lag, graph.succ, graph.duration
    home, tail = graph.device, graph.tail
    devices, classes = ids.shape[0], ids.shape[1]
    count = duration.shape[0]
    end[:] = -1
    at = np.zeros((devices, classes), np.int64)
    free = np.zeros(devices, np.int64)
    held = np.zeros(devices, np.int64)
    placed = np.zeros(devices, np.int64)
    soonest = np.zeros(devices, np.int64)
    chosen = np.zeros(devices, np.int64)
    stale = np.ones(devices, np.bool_)
    begins = np.empty(classes, np.int64)
    need, oldest = np.empty(2, np.int64), np.empty(2, np.int64)
    makespan = 0
    for _ in range(count):
        device = -1
        for d in range(devices):
            if stale[d]:
                stale[d] = False
                first = _FAR
                if cap >= 0:
                    _reserve(ids, size, take, pools, taking, giving, at, d, need, oldest)
                for cls in range(classes):
                    begins[cls] = _FAR
                    if at[d, cls] >= size[cls]:
                        continue
                    task = ids[d, cls, at[d, cls]]
                    begin = _earliest(pred, pred_lag, end, free[d], task)
                    if cap >= 0 and begin < _FAR and take[task] > 0:
                        model = owner[task]
                        # the reserve holds the task's own memory if its micro-batch is the oldest
                        extra = take[task] if at[d, cls] > oldest[model] else 0
                        if held[d] + need[0] + need[1] + extra > cap:
                            begin = _FAR
                    begins[cls] = begin
                    first = min(first, begin)
                soonest[d], chosen[d] = first, -1
                best = 0.0
                for cls in range(classes):
                    if begins[cls] < _FAR and begins[cls] <= first + slack:
                        rank = priority[ids[d, cls, at[d, cls]]]
                        if chosen[d] < 0 or rank > best:
                            best, chosen[d] = rank, cls
            if soonest[d] < _FAR and (device < 0 or soonest[d] < soonest[device]):
                device = d
        if device < 0:
            return -1
        cls = chosen[device]
        task = ids[device, cls, at[device, cls]]
        start[task] = _earliest(pred, pred_lag, end, free[device], task)
        end[task] = start[task] + duration[task]
        free[device] = end[task]
        held[device] += take[task] - give[task]
        at[device, cls] += 1
        order[device, placed[device]] = task
        placed[device] += 1
        makespan = max(makespan, end[task] + tail[task])
        stale[device] = True
        for z in range(2):
            after = succ[task, z]
            if after >= 0:
                stale[home[after]] = True
    return makespan


def static_priorities(graph: Graph, head: np.ndarray, tail: np.ndarray) -> list[np.ndarray]:
    """The portfolio: nine fixed priority vectors, float64 [n] each, higher first.

    Longest tail; earliest head; backward first and forward first, by micro-batch or by tail; one
    model first; least slack. A W always comes after what could run instead of it, but for the
    plain tail, head and slack rules.
    """
    head, tail = head.astype(float), tail.astype(float)
    far = 4.0 * (head.max() + tail.max() + graph.duration.max() + 1.0)
    forward, backward = (graph.kind == 0) * far, (graph.kind == 1) * far
    last = (graph.kind == 2) * 4 * far
    by_batch = -graph.micro_batch * graph.duration.mean() + tail / far
    tail_b = backward + tail - last
    return [
        tail,
        -head,
        backward + by_batch - last,
        forward + by_batch - last,
        tail_b,
        forward + tail - last,
        tail_b + (graph.model == 0) * 16 * far,
        tail_b + (graph.model == 1) * 16 * far,
        tail - head,
    ]
