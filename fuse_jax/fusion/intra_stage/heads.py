"""Earliest starts, shortest tails and one-machine relaxations: the kernels under the bounds.

The head r of a task is a lower bound on its start, its tail q one on the time from its end to the
end of the step; both use one model alone on its devices (the other only ever delays).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fuse_jax.fusion.intra_stage.graph import Graph, reverse


def class_order(graph: Graph) -> np.ndarray:
    """before[x, y] = on a device, micro-batch m of class y always precedes micro-batch m of class
    x; bool [C, C].

    On one device forwards run in chunk order, then backwards in the opposite order, each W after
    its B.
    """
    count = graph.size.size
    label = np.full((count, 3), -1, np.int64)
    for cls in range(count):
        members = graph.ids[0, cls, : graph.size[cls]]
        if members.size:
            task = members[0]
            label[cls] = graph.model[task], graph.chunk[task], graph.kind[task]
    before = np.zeros((count, count), bool)
    for x, (model, chunk, kind) in enumerate(label):
        for y, (other, chunk2, kind2) in enumerate(label):
            if x == y or model != other or model < 0:
                continue
            if kind2 == 0:
                before[x, y] = kind > 0 or chunk2 < chunk
            elif kind2 == 1 and kind > 0:
                before[x, y] = chunk2 > chunk or (chunk2 == chunk and kind == 2)
    return before


@njit(cache=True)
def _topological(graph):
    """All tasks so that data predecessors and the previous task of the class come first."""
    count = graph.duration.shape[0]
    devices, classes = graph.ids.shape[0], graph.ids.shape[1]
    follow = np.full(count, -1, np.int64)
    waits = np.zeros(count, np.int64)
    for device in range(devices):
        for cls in range(classes):
            for m in range(1, graph.size[cls]):
                follow[graph.ids[device, cls, m - 1]] = graph.ids[device, cls, m]
                waits[graph.ids[device, cls, m]] += 1
    for task in range(count):
        for z in range(2):
            if graph.pred[task, z] >= 0:
                waits[task] += 1
    out = np.empty(count, np.int64)
    filled = 0
    for task in range(count):
        if waits[task] == 0:
            out[filled] = task
            filled += 1
    done = 0
    while done < filled:
        task = out[done]
        done += 1
        for z in range(3):
            after = follow[task] if z == 2 else graph.succ[task, z]
            if after >= 0:
                waits[after] -= 1
                if waits[after] == 0:
                    out[filled] = after
                    filled += 1
    return out, follow


@njit(cache=True)
def _one_machine(graph, head, device, cls, m, before, at):
    """Least end of all tasks of a device that precede task m of a class, run by increasing head."""
    classes = graph.size.shape[0]
    at[:] = 0
    clock = 0
    while True:
        best, first = -1, 0
        for y in range(classes):
            limit = m if y == cls else (min(m + 1, graph.size[y]) if before[cls, y] else 0)
            if at[y] < limit:
                task = graph.ids[device, y, at[y]]
                if best < 0 or head[task] < first:
                    best, first = y, head[task]
        if best < 0:
            return clock
        task = graph.ids[device, best, at[best]]
        clock = max(clock, head[task]) + graph.duration[task]
        at[best] += 1


@njit(cache=True)
def find_heads(graph, before, release):
    """Earliest start of each task [n], from `release` [n], data edges, class order and what must
    run before it.

    The m-th task of a class runs after every earlier task of the classes before it on the same
    device, which that device cannot finish before the end of their schedule by increasing head.
    """
    order, follow = _topological(graph)
    head = release.copy()
    at = np.zeros(graph.size.shape[0], np.int64)
    devices = graph.ids.shape[0]
    for _ in range(4):
        for task in order:
            end = head[task] + graph.duration[task]
            for z in range(2):
                after = graph.succ[task, z]
                if after >= 0:
                    head[after] = max(head[after], end + graph.succ_lag[task, z])
            if follow[task] >= 0:
                head[follow[task]] = max(head[follow[task]], end)
        changed = False
        for device in range(devices):
            for cls in range(graph.size.shape[0]):
                for m in range(graph.size[cls]):
                    clock = _one_machine(graph, head, device, cls, m, before, at)
                    task = graph.ids[device, cls, m]
                    if clock > head[task]:
                        head[task] = clock
                        changed = True
        if not changed:
            break
    for task in order:  # the last round may have raised heads whose successors must follow
        end = head[task] + graph.duration[task]
        for z in range(2):
            after = graph.succ[task, z]
            if after >= 0:
                head[after] = max(head[after], end + graph.succ_lag[task, z])
        if follow[task] >= 0:
            head[follow[task]] = max(head[follow[task]], end)
    return head


def heads_and_tails(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """Heads and tails of all tasks, ticks, int64 [n] each; tails include the model's `tail`."""
    before = class_order(graph)
    head = find_heads(graph, before, np.zeros_like(graph.duration))
    tail = find_heads(reverse(graph), np.ascontiguousarray(before.T), graph.tail.copy())
    return head, tail


@njit(cache=True)
def preemptive_makespan(graph, head, tail, device, model):
    """Jackson's preemptive schedule of a device's tasks of one model (-1: both): least max of end
    + tail.

    At any time the released task with the longest tail runs. Inside a class heads grow and tails
    shrink, so only the first unfinished task of each class competes.
    """
    classes = graph.size.shape[0]
    at = np.zeros(classes, np.int64)
    left = np.zeros(classes, np.int64)
    used = np.zeros(classes, np.bool_)
    for cls in range(classes):
        if graph.size[cls] > 0:
            task = graph.ids[device, cls, 0]
            used[cls] = model < 0 or graph.model[task] == model
            left[cls] = graph.duration[task]
    clock, worst = 0, 0
    while True:
        best, wake = -1, -1
        for cls in range(classes):
            if not used[cls] or at[cls] >= graph.size[cls]:
                continue
            task = graph.ids[device, cls, at[cls]]
            if head[task] > clock:
                if wake < 0 or head[task] < wake:
                    wake = head[task]
            elif best < 0 or tail[task] > tail[graph.ids[device, best, at[best]]]:
                best = cls
        if best < 0:
            if wake < 0:
                return worst
            clock = wake
            continue
        step = left[best] if wake < 0 else min(left[best], wake - clock)
        clock += step
        left[best] -= step
        if left[best] == 0:
            worst = max(worst, clock + tail[graph.ids[device, best, at[best]]])
            at[best] += 1
            if at[best] < graph.size[best]:
                left[best] = graph.duration[graph.ids[device, best, at[best]]]
