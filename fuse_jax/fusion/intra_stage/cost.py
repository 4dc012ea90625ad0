"""When each task of a schedule runs, under the transport that carries data between devices.

Every model keeps the device orders; they differ in what a transfer blocks. `ideal`: nothing (a
mailbox or single-controller dispatch): each task starts when its device and its input are there.
The others cut the
step in ticks: a device does at most one task a tick, a task's tick is its earliest under unit
  durations, and at the
end of a tick devices exchange results:

* `rendezvous`: the two ends of each transfer wait for each other (pair collectives), even pairs
  first, then odd, then the rest.
* `neighbour`: each device waits for the devices next to it every tick, one at either end of the
  line (a permute between adjacent devices, coupled locally; no link closes a ring, for no
  pipeline without virtual stages sends over it).
* `lockstep`: every device waits for all (a permute that is global).
* `deferred`: pair transfers, begun at the next tick's start and overlapped with its task; the
  data is there a tick later.

A transfer takes the model's `lag`. Measured makespans of such transports: tick-locked ones can
lose the whole gain of fusion, so a search must score with the model of the transport that will
run its schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit

from fuse_jax.fusion.intra_stage.graph import Graph

CostModel = Literal["ideal", "rendezvous", "neighbour", "lockstep", "deferred"]
COST_MODELS: tuple[CostModel, ...] = ("ideal", "rendezvous", "neighbour", "lockstep", "deferred")
DEADLOCK = -1


@dataclass(frozen=True)
class Timing:
    """Start and end of every task in ticks, int64 [n] by task id, and the makespan in ticks."""

    start: np.ndarray
    end: np.ndarray
    makespan: int


class TransportError(ValueError):
    """A cost model that cannot carry the schedule's transfers."""


@njit(cache=True)
def evaluate(graph, order, start, end):
    """Earliest start and end of all tasks under `order` [D, L] with free transfers; makespan, or
    -1 on a deadlock.
    """
    devices, length = order.shape
    count = graph.duration.shape[0]
    for task in range(count):
        end[task] = -1
    at = np.zeros(devices, np.int64)
    free = np.zeros(devices, np.int64)
    stack = np.empty(2 * count + devices, np.int64)
    for device in range(devices):
        stack[device] = device
    top, done, makespan = devices, 0, 0
    while top > 0:
        top -= 1
        device = stack[top]
        while at[device] < length:
            task = order[device, at[device]]
            begin = free[device]
            ready = True
            for z in range(2):
                before = graph.pred[task, z]
                if before >= 0:
                    if end[before] < 0:
                        ready = False
                        break
                    arrival = end[before] + graph.pred_lag[task, z]
                    begin = max(begin, arrival)
            if not ready:
                break
            start[task] = begin
            end[task] = begin + graph.duration[task]
            free[device] = end[task]
            at[device] += 1
            done += 1
            makespan = max(makespan, end[task] + graph.tail[task])
            for z in range(2):
                after = graph.succ[task, z]
                if after >= 0:
                    other = graph.device[after]
                    if other != device and at[other] < length and order[other, at[other]] == after:
                        stack[top] = other
                        top += 1
    return makespan if done == count else -1


@njit(cache=True)
def _ticks(graph, order, latency, tick):
    """Earliest tick of each task under unit durations, a transfer taking `latency` ticks; tick
    count or -1.
    """
    devices, length = order.shape
    count = graph.duration.shape[0]
    for task in range(count):
        tick[task] = -1
    at = np.zeros(devices, np.int64)
    done, last = 0, -1
    moved = True
    while moved:
        moved = False
        for device in range(devices):
            while at[device] < length:
                task = order[device, at[device]]
                now = tick[order[device, at[device] - 1]] + 1 if at[device] > 0 else 0
                ready = True
                for z in range(2):
                    before = graph.pred[task, z]
                    if before >= 0:
                        if tick[before] < 0:
                            ready = False
                            break
                        step = latency if graph.device[before] != device else 1
                        now = max(now, tick[before] + step)
                if not ready:
                    break
                tick[task] = now
                last = max(last, now)
                at[device] += 1
                done += 1
                moved = True
    return last + 1 if done == count else -1


@njit(cache=True)
def _destination(graph, task):
    """(device that needs the task's result, lag), or (-1, 0) if none other does."""
    for z in range(2):
        after = graph.succ[task, z]
        if after >= 0 and graph.device[after] != graph.device[task]:
            return graph.device[after], graph.succ_lag[task, z]
    return -1, 0


@njit(cache=True)
def _couple(clock, one, other, lag):
    meet = max(clock[one], clock[other]) + lag
    clock[one] = meet
    clock[other] = meet


@njit(cache=True)
def _exchange_pairs(graph, row, clock):
    """End of a tick under pair rendezvous: even neighbour pairs, odd ones, then distant pairs by
    sender.
    """
    devices = row.shape[0]
    for turn in range(3):
        for device in range(devices):
            low, high, lag = -1, -1, 0
            if turn < 2 and device % 2 == turn and device + 1 < devices:
                for side in range(2):
                    task = row[device + side]
                    if task >= 0:
                        to, cost = _destination(graph, task)
                        if to == device + 1 - side:
                            low, high, lag = device, device + 1, max(lag, cost)
            elif turn == 2 and row[device] >= 0:
                to, cost = _destination(graph, row[device])
                if to >= 0 and abs(to - device) > 1:
                    low, high, lag = device, to, cost
            if low >= 0:
                _couple(clock, low, high, lag)


@njit(cache=True)
def _exchange_all(graph, row, clock, everyone):
    """End of a tick under a permute that couples adjacent devices, or everyone."""
    devices = row.shape[0]
    lag = 0
    for device in range(devices):
        if row[device] >= 0:
            lag = max(lag, _destination(graph, row[device])[1])
    before = clock.copy()
    for device in range(devices):
        low = 0 if everyone else max(0, device - 1)
        high = devices if everyone else min(devices, device + 2)
        clock[device] = before[low:high].max() + lag


@njit(cache=True)
def _exchange_deferred(graph, sent, began, clock):
    """End of a tick whose exchange carries the previous tick's results, begun with this tick."""
    for device in range(sent.shape[0]):
        if sent[device] >= 0:
            to, lag = _destination(graph, sent[device])
            if to >= 0:
                meet = max(began[device], began[to]) + lag
                clock[device] = max(clock[device], meet)
                clock[to] = max(clock[to], meet)


@njit(cache=True)
def evaluate_ticks(graph, order, model, start, end):
    """Times under a tick-locked transport (1 rendezvous, 2 neighbour, 3 lockstep, 4 deferred);
    makespan or -1.
    """
    devices, length = order.shape
    tick = np.empty(graph.duration.shape[0], np.int64)
    total = _ticks(graph, order, 2 if model == 4 else 1, tick)
    if total < 0:
        return -1
    at = np.zeros(devices, np.int64)
    clock = np.zeros(devices, np.int64)
    row = np.full(devices, -1, np.int64)
    makespan = 0
    for now in range(total):
        began = clock.copy()
        sent = row.copy()
        for device in range(devices):
            row[device] = -1
            if at[device] < length and tick[order[device, at[device]]] == now:
                task = order[device, at[device]]
                at[device] += 1
                row[device] = task
                start[task] = clock[device]
                end[task] = clock[device] + graph.duration[task]
                clock[device] = end[task]
                makespan = max(makespan, end[task] + graph.tail[task])
        if model == 1:
            _exchange_pairs(graph, row, clock)
        elif model == 4:
            _exchange_deferred(graph, sent, began, clock)
        else:
            _exchange_all(graph, row, clock, model == 3)
    return makespan


@njit(cache=True)
def evaluate_under(graph, order, model, start, end):
    """`evaluate` for model 0, `evaluate_ticks` for the others."""
    if model == 0:
        return evaluate(graph, order, start, end)
    return evaluate_ticks(graph, order, model, start, end)


def cost_code(graph: Graph, cost_model: str) -> int:
    """Number of a cost model for the kernels.

    Raises TransportError if the name is unknown, or if `neighbour` would have to carry a transfer
    between distant devices (virtual stages on more than two devices).
    """
    if cost_model not in COST_MODELS:
        raise TransportError(f"cost_model={cost_model!r}: must be one of {', '.join(COST_MODELS)}")
    if cost_model == "neighbour":
        task = np.flatnonzero(graph.pred[:, 0] >= 0)
        hop = np.abs(graph.device[task] - graph.device[graph.pred[task, 0]])
        if hop.size and hop.max() > 1:
            raise TransportError(
                "cost_model='neighbour' carries data to adjacent devices only, but a transfer "
                f"spans {hop.max()} devices (virtual stages): use placement='vee', chunks=1 "
                "or another transport"
            )
    return COST_MODELS.index(cost_model)


def time_order(graph: Graph, order: np.ndarray, cost_model: str = "ideal") -> Timing | None:
    """Timing of `order` int64 [D, L] under a cost model, or None when the order deadlocks."""
    start, end = np.zeros_like(graph.duration), np.zeros_like(graph.duration)
    code = cost_code(graph, cost_model)
    makespan = evaluate_under(graph, order, code, start, end)
    return None if makespan == DEADLOCK else Timing(start, end, int(makespan))
