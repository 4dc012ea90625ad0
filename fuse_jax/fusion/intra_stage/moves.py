"""Moves in a device's row, shared by the annealers, and the memory a row holds.

A row is a string of classes: moving a task means moving its class letter, after which each class
is numbered again in index order.
"""

from __future__ import annotations

from numba import njit


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
def positions(order, position):
    """Fill position [n] with each task's place in its row."""
    for d in range(order.shape[0]):
        for k in range(order.shape[1]):
            position[order[d, k]] = k
