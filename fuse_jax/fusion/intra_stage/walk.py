"""A schedule as the host walks through it: all it must know to dispatch each task, in order.

What can be settled before a step is settled here: while the step runs, the host's time for a task
is the least that a task can take.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from fuse_jax.fusion.intra_stage.problem import KINDS, MODELS
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.intra_stage.tables import Plan


class Code(NamedTuple):
    """Whose code a task is: what is static about it."""

    model: str
    kind: str
    first: bool
    last: bool


class Message(NamedTuple):
    """What goes between devices: the input of a stage ("x"), the gradient of its output ("g")."""

    what: str
    model: str
    device: int
    micro_batch: int


class Start(NamedTuple):
    """What the host must know to dispatch a task.

    bucket, index: of its micro-batch. x, dy: the messages it reads, there or not; keeps: whether
    others read them after it. sent: the message it sends, None for none.
    """

    task: int
    code: Code
    device: int
    bucket: int
    index: int
    x: Message
    dy: Message | None
    keeps: bool
    sent: Message | None


class Walk(NamedTuple):
    """A schedule, and its tasks in the order in which they are dispatched."""

    schedule: Schedule
    starts: list[Start]


def walk_through(schedule: Schedule, dealt: Mapping[str, np.ndarray]) -> Walk:
    """The walk through a schedule; `dealt` as for `tables.build_tables`."""
    plan = Plan(schedule, dealt, ticked=False)
    return Walk(schedule, [_start_of(plan, task) for task in in_order(schedule, plan)])


def in_order(schedule: Schedule, plan: Plan) -> Iterator[int]:
    """The real tasks: every device's in its order, each after the one it needs, earliest first."""
    start = schedule.timing().start
    at = [0] * len(plan.orders)
    done: set[int] = set()
    waiting: dict[int, int] = {}  # task -> device whose next task needs it
    heap: list[tuple[int, int]] = []

    def offer(device: int) -> None:
        if at[device] < len(plan.orders[device]):
            task = plan.orders[device][at[device]]
            needed = plan.sender(task)
            if needed < 0 or needed in done:
                heapq.heappush(heap, (int(start[task]), device))
            else:
                waiting[needed] = device

    for device in range(len(plan.orders)):
        offer(device)
    while heap:
        _, device = heapq.heappop(heap)
        task = plan.orders[device][at[device]]
        yield task
        done.add(task)
        at[device] += 1
        offer(device)
        if task in waiting:
            offer(waiting.pop(task))


def _start_of(plan: Plan, task: int) -> Start:
    graph = plan.graph
    model, kind = MODELS[graph.model[task]], KINDS[graph.kind[task]]
    device, micro_batch = int(graph.device[task]), int(graph.micro_batch[task])
    pipeline, stage = dict(plan.pipelines)[model], int(graph.stage[task])
    after, sent = plan.receiver(task), None
    if after >= 0:
        what = "x" if kind == "F" else "g"
        sent = Message(what, model, int(graph.device[after]), micro_batch)
    return Start(
        task,
        Code(model, kind, stage == 0, stage == pipeline.stages - 1),
        device,
        *plan.place(task),
        Message("x", model, device, micro_batch),
        None if kind == "F" else Message("g", model, device, micro_batch),
        kind != pipeline.kinds[-1],
        sent,
    )
