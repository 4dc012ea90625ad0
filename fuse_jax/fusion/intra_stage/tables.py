"""A schedule as the integers that a compiled pipeline reads: what each device does in each step.

Two kinds of step. With a transport that does not block, a device's step is its own next task. With
one that exchanges in ticks, a step is a tick that all devices share: each does at most one task,
and what it sends is there at the tick's end.

A message is received into a slot, and stays there until its last reader has run: the input of a
stage until its B (W when the backward is split), the gradient that comes back until its B (or W).
Slots are dealt by interval colouring, so a device needs as many as are in use at once. The slot
behind the last one is never read: what has no reader is written there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fuse_jax.fusion.intra_stage.graph import Graph
from fuse_jax.fusion.intra_stage.layout import (
    Branch,
    Layout,
    PipelineLayout,
    trained_pipelines,
)
from fuse_jax.fusion.intra_stage.problem import KINDS, MODELS
from fuse_jax.fusion.intra_stage.schedule import Schedule, ScheduleError


class Row(NamedTuple):
    """What a device does in a step; each an int32, of a row or of all.

    branch: of the layout's, 0 = nothing. task: its id in `build_graph`, -1 = none. index: of the
    micro-batch in its bucket. x_slot, g_slot: where the stage's input and the gradient of its
    output are. receive: tag of the message to wait for, -1 = none. to, tag: where the result goes,
    -1 = nowhere. The rest is for ticks: `below_*` and `above_*` are the slots, in the models'
    pools, of what comes from device d-1 and d+1 at the end of the tick; even and odd: 1 if this
    device exchanges with its neighbour in the pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ...
    """

    branch: Any
    task: Any
    index: Any
    x_slot: Any
    g_slot: Any
    receive: Any
    to: Any
    tag: Any
    below_actor: Any
    below_critic: Any
    above_actor: Any
    above_critic: Any
    even: Any
    odd: Any


@dataclass(frozen=True)
class Tables:
    """rows: int32 `[P, T, len(Row._fields)]`; the first `steps` of T are in use."""

    rows: np.ndarray
    steps: int


class SlotsError(ScheduleError):
    """A schedule that holds more in flight than the program was compiled for."""


def slots_needed(
    schedule: Schedule, dealt: Mapping[str, np.ndarray], ticked: bool
) -> dict[str, int]:
    """Slots a device needs at most for each model of `schedule`; `dealt` as in `build_tables`."""
    plan = Plan(schedule, dealt, ticked)
    return {name: _deal_slots(plan, name)[1] for name, _ in plan.pipelines}


def build_tables(
    schedule: Schedule, dealt: Mapping[str, np.ndarray], layout: Layout, *, ticked: bool
) -> Tables:
    """The tables of `schedule` for a program with `layout`.

    dealt: for each model (bucket, index) of each micro-batch, `[K, M, 2]`, see
    `layout.deal_micro_batches`; the tasks of empty ones are left out.

    Raises:
      ScheduleError: the schedule breaks its problem's rules, or is not one of `layout`.
      SlotsError: it needs more slots than `layout` has.
    """
    plan = Plan(schedule.check(), dealt, ticked)
    if plan.pipelines != layout.pipelines:
        raise ScheduleError(
            f"the program was compiled for {layout.pipelines}, the schedule is one of "
            f"{plan.pipelines}: build another program for it"
        )
    steps = 1 + max((step for step in plan.step.values()), default=-1)
    if steps > layout.rows:
        raise ScheduleError(
            f"the schedule takes {steps} steps, the program has room for {layout.rows}: it was "
            "compiled for fewer micro-batches"
        )
    fields = {name: np.zeros((layout.devices, layout.rows), np.int32) for name in Row._fields}
    for name in ("task", "receive", "to", "tag"):
        fields[name][:] = -1
    trash = dict(zip(layout.models, layout.slots))
    for name in layout.models:
        for side in ("below", "above"):
            fields[f"{side}_{name}"][:] = trash[name]
    row = Row(**fields)
    number = {branch: 1 + i for i, branch in enumerate(layout.branches)}
    for name, pipeline in layout.pipelines:
        slot, needed = _deal_slots(plan, name)
        if needed > trash[name]:
            raise SlotsError(
                f"the schedule needs {needed} slots for the {name}, the program has {trash[name]}: "
                "compile it for more, or search under a memory cap"
            )
        for task in plan.tasks(name):
            _fill(row, plan, task, slot, trash[name], number, pipeline)
    return Tables(np.stack(row, axis=-1), steps)


def _fill(
    row: Row,
    plan: Plan,
    task: int,
    slot: dict[tuple[str, int, int], int],
    trash: int,
    number: dict[Branch, int],
    pipeline: PipelineLayout,
) -> None:
    """Enter one task at its device and step, and what it sends at the receiver's."""
    graph, name = plan.graph, MODELS[plan.graph.model[task]]
    device, at, kind = int(graph.device[task]), plan.step[task], KINDS[graph.kind[task]]
    bucket, index = plan.place(task)
    key = (device, int(graph.micro_batch[task]))
    row.branch[device, at] = number[Branch(name, kind, bucket)]
    row.task[device, at] = task
    row.index[device, at] = index
    row.x_slot[device, at] = slot.get(("x", *key), trash)
    row.g_slot[device, at] = slot.get(("g", *key), trash)
    if plan.sender(task) >= 0:
        row.receive[device, at] = task
    after = plan.receiver(task)
    if after < 0:
        return
    other = int(graph.device[after])
    row.to[device, at], row.tag[device, at] = other, after
    if plan.ticked:
        arrivals = getattr(row, f"{'below' if other > device else 'above'}_{name}")
        what = "x" if kind == "F" else "g"
        arrivals[other, at] = slot[what, other, int(graph.micro_batch[task])]
        pair = row.even if min(device, other) % 2 == 0 else row.odd
        pair[device, at] = pair[other, at] = 1


class Plan:
    """The real tasks of a schedule, the step of each, and who sends to whom.

    pipelines: of the models it trains. orders: each device's task ids. step: of each task id.

    Raises ScheduleError for virtual stages, and if `dealt` is of another size than the schedule.
    """

    def __init__(self, schedule: Schedule, dealt: Mapping[str, np.ndarray], ticked: bool) -> None:
        self.graph: Graph = schedule.graph
        self.pipelines = trained_pipelines(schedule.problem)
        self.ticked = ticked
        self._dealt = dealt
        for name, pipeline in self.pipelines:
            wanted = (pipeline.replicas, getattr(schedule.problem, name).micro_batches)
            if dealt[name].shape[:2] != wanted:
                raise ScheduleError(
                    f"{name}: {dealt[name].shape[:2]} (replicas, micro-batches) were dealt, the "
                    f"schedule has {wanted}"
                )
        orders = schedule.order.tolist()
        self.orders = [[task for task in row if self.place(task)[0] >= 0] for row in orders]
        self.step = self._ticks() if ticked else self._positions()

    def place(self, task: int) -> tuple[int, int]:
        """(bucket, index) of a task's micro-batch; (-1, -1) if that is empty."""
        graph = self.graph
        dealt = self._dealt[MODELS[graph.model[task]]]
        bucket, index = dealt[graph.replica[task], graph.micro_batch[task]]
        return int(bucket), int(index)

    def tasks(self, name: str) -> list[int]:
        """A model's real tasks."""
        model = MODELS.index(name)
        return [task for row in self.orders for task in row if self.graph.model[task] == model]

    def sender(self, task: int) -> int:
        """The task of another device whose result this one waits for, or -1."""
        before = int(self.graph.pred[task, 0])
        elsewhere = before >= 0 and self.graph.device[before] != self.graph.device[task]
        return before if elsewhere else -1

    def receiver(self, task: int) -> int:
        """The task of another device that waits for this one's result, or -1."""
        for after in self.graph.succ[task]:
            if after >= 0 and self.graph.device[after] != self.graph.device[task]:
                return int(after)
        return -1

    def _positions(self) -> dict[int, int]:
        return {task: at for row in self.orders for at, task in enumerate(row)}

    def _ticks(self) -> dict[int, int]:
        """Earliest tick of each task: one task a device and tick, a result usable a tick later."""
        step: dict[int, int] = {}
        at = [0] * len(self.orders)
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(self.orders):
                while at[device] < len(row):
                    task = row[at[device]]
                    before = int(self.graph.pred[task, 0])
                    if before >= 0 and before not in step:
                        break
                    earliest = 1 + step[row[at[device] - 1]] if at[device] else 0
                    step[task] = max(earliest, 1 + step[before]) if before >= 0 else earliest
                    at[device] += 1
                    moved = True
        return step


def _deal_slots(plan: Plan, name: str) -> tuple[dict[tuple[str, int, int], int], int]:
    """Slot of every message of a model by ('x' or 'g', device, micro-batch), and how many slots.

    A message that arrives in a step is written before the step's task (own steps) or after it
    (ticks: so the slot that the task read last can take it).
    """
    graph, held = plan.graph, {}
    for task in plan.tasks(name):
        device, micro_batch = int(graph.device[task]), int(graph.micro_batch[task])
        kind, step = KINDS[graph.kind[task]], plan.step[task]
        sender = plan.sender(task)
        if sender >= 0:
            arrival = plan.step[sender] + 1 if plan.ticked else step
            held["x" if kind == "F" else "g", device, micro_batch] = [arrival, step]
        for what in ("x", "g"):
            interval = held.get((what, device, micro_batch))
            if interval is not None:
                interval[1] = max(interval[1], step)
    slot: dict[tuple[str, int, int], int] = {}
    most = 0
    for device in range(len(graph.ids)):
        mine = sorted((first, last, key) for key, (first, last) in held.items() if key[1] == device)
        busy_until: list[int] = []  # by slot
        for first, last, key in mine:
            free = [s for s, until in enumerate(busy_until) if until < first]
            if not free:
                busy_until.append(last)
            else:
                busy_until[free[0]] = last
            slot[key] = free[0] if free else len(busy_until) - 1
        most = max(most, len(busy_until))
    return slot, most
