"""Which schedule, over which transport, an update is run with.

A mini-batch is so many micro-batches of each length; for each such count the best schedule is
searched once, with measured task times, under the cost model of the transport that runs it.
Everything here is on the host and plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fuse_jax.config import IntraStageConfig
from fuse_jax.fusion.intra_stage.baselines import alone, concatenated_1f1b
from fuse_jax.fusion.intra_stage.cost import CostModel
from fuse_jax.fusion.intra_stage.layout import deal_micro_batches, relative_lengths
from fuse_jax.fusion.intra_stage.plans import find_plan
from fuse_jax.fusion.intra_stage.problem import MODELS, Pipeline, Problem
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.training.pipeline_profile import TaskTimes

Transport = Literal["mailbox", "dispatch", "pair", "ring"]
# What a schedule takes under each transport. Among those that are predicted alike the first here is
# taken: a mailbox costs the host nothing a task, as dispatch does, and both call their devices back
# when one fails, where a collective ends the process; a pair keeps two devices waiting, a ring all.
COSTS: dict[Transport, CostModel] = {
    "mailbox": "ideal",
    "dispatch": "ideal",
    "pair": "rendezvous",
    "ring": "lockstep",
}
DIGITS = 2  # significant ones of a time that is searched with: noise is no new problem


@dataclass(frozen=True)
class Plan:
    """What an update is run with, and what it is predicted to take (ms)."""

    schedule: Schedule
    fused: bool
    predicted: float
    serial: float
    why: str


@dataclass
class Planner:
    """Plans by the counts of a mini-batch, each made once.

    stages: devices of one pipeline of (actor, critic). cost_model: of the transport.
    """

    settings: IntraStageConfig
    devices: int
    stages: tuple[int, int]
    times: TaskTimes
    cost_model: CostModel = "ideal"

    def __post_init__(self) -> None:
        self._plans: dict[tuple[int, ...], Plan] = {}

    def problem(self, counts: Sequence[int]) -> Problem:
        """The problem of `counts[b]` micro-batches of bucket b."""
        actor, critic = (
            _pipeline(counts, self.times[name], stages, self.devices // stages, direction)
            for name, stages, direction in zip(MODELS, self.stages, ("up", "down"))
        )
        problem = Problem(actor, critic, devices=self.devices)
        # No more in flight than both models' 1F1B pipelines together: slots stay few.
        peaks = [alone(problem, model).peak_memory for model in (0, 1)]
        return Problem(actor, critic, devices=self.devices, memory_cap=sum(peaks) + 1e-3)

    def plan(self, counts: Sequence[int]) -> Plan:
        """The plan of a mini-batch that trains both models."""
        key = tuple(counts)
        if key not in self._plans:
            self._plans[key] = self._make(self.problem(counts))
        return self._plans[key]

    def serial(self, train: Sequence[str], counts: Sequence[int]) -> Plan:
        """1F1B of the models in `train`, one after the other, whatever the settings say."""
        problem = self.problem(counts)
        if len(train) == 2:
            schedule, why = concatenated_1f1b(problem), "serial"
        else:
            schedule = alone(problem, MODELS.index(train[0]))
            why = f"only the {train[0]} trains"
        ms = schedule.makespan(self.cost_model)
        return Plan(schedule, False, ms, ms, why)

    def _make(self, problem: Problem) -> Plan:
        serial = concatenated_1f1b(problem)
        serial_ms = serial.makespan(self.cost_model)
        if self.settings.schedule == "serial":
            why = "fusion.intra_stage.schedule=serial"
            return Plan(serial, False, serial_ms, serial_ms, why)
        found, _ = find_plan(
            problem, cost_model=self.cost_model, evaluations=self.settings.search_evaluations
        )
        against = f"fused {found.makespan:.1f} ms, serial {serial_ms:.1f} ms predicted"
        if self.settings.schedule == "auto" and not found.makespan < serial_ms:
            return Plan(serial, False, serial_ms, serial_ms, f"fusion would not gain: {against}")
        return Plan(found.schedule, True, found.makespan, serial_ms, against)


def _pipeline(
    counts: Sequence[int],
    times: Mapping[str, np.ndarray],
    stages: int,
    replicas: int,
    direction: Literal["up", "down"],
) -> Pipeline:
    """One model's pipeline. Its stages' times are those of the longest bucket; others are relative
    to it, by all their tasks.
    """
    dealt = deal_micro_batches(counts, replicas)
    total = np.sum([table.sum(axis=1) for table in times.values()], axis=0)
    relative = [rounded(float(one / total[-1])) for one in total]
    stage = {kind: [rounded(float(ms)) for ms in table[-1]] for kind, table in times.items()}
    return Pipeline(
        stages,
        dealt.shape[1],
        stage["F"],
        stage["B"],
        activation=1.0,
        direction=direction,
        lengths=relative_lengths(dealt, relative),
    )


def rounded(value: float) -> float:
    """To DIGITS significant digits."""
    if value <= 0:
        return 0.0
    return round(value, DIGITS - 1 - math.floor(math.log10(value)))


@dataclass(frozen=True)
class Choice:
    """The transport, its predicted step of a usual mini-batch, and the reason, to be shown."""

    transport: Transport
    plan: Plan
    why: str


def choose(planner: Planner, counts: Sequence[int], available: Mapping[Transport, str]) -> Choice:
    """The transport of the best predicted step of a usual mini-batch, and `planner` set to it.

    available: for each transport why it cannot be used, empty where it can. A transport that
    `fusion.intra_stage.transport` names is taken (the caller has refused it if it cannot be used).
    """
    wanted = planner.settings.transport
    names: list[Transport] = [n for n in COSTS if not available[n]]
    if wanted != "auto":
        names = [wanted]
    plans: dict[CostModel, Plan] = {}
    for name in names:
        cost = COSTS[name]
        if cost not in plans:
            other = Planner(planner.settings, planner.devices, planner.stages, planner.times, cost)
            plans[cost] = other.plan(counts)
    best = min(names, key=lambda name: plans[COSTS[name]].predicted)  # the first of equals
    planner.cost_model = COSTS[best]
    least = plans[COSTS[best]].predicted
    predicted = {n: plans[COSTS[n]].predicted for n in names if n != best}
    rest = [
        f"{n} {ms:.1f} ms{' (equal: less preferred)' if ms == least else ''}"
        for n, ms in predicted.items()
    ]
    left_out = [f"{n}: {why}" for n, why in available.items() if why and wanted == "auto"]
    why = "; ".join([*rest, *left_out]) or f"fusion.intra_stage.transport={wanted}"
    return Choice(best, plans[COSTS[best]], why)
