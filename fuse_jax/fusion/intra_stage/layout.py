"""What a pipeline program is compiled for. All else about a schedule is data it reads at run time.

Devices, stages and directions are those of `problem.py`: replica k of a model with N stages owns
devices kN .. kN+N-1, stage s lies on kN + s ("up") or kN + N-1-s ("down").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fuse_jax.fusion.intra_stage.problem import MODELS, Problem
from fuse_jax.fusion.intra_stage.schedule import ScheduleError


class Branch(NamedTuple):
    """A kind of task that a program holds code for. A bucket is one shape of micro-batches."""

    model: str
    kind: str
    bucket: int


@dataclass(frozen=True)
class PipelineLayout:
    """One model's pipeline on the devices: stages N, replicas K, direction, split backward."""

    stages: int
    replicas: int
    direction: str
    split: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of task there are: F, B and, when split, W."""
        return ("F", "B", "W") if self.split else ("F", "B")

    def device(self, replica: int, stage: int) -> int:
        """Where a stage lies."""
        position = stage if self.direction == "up" else self.stages - 1 - stage
        return replica * self.stages + position


@dataclass(frozen=True)
class Layout:
    """A program's static part.

    pipelines: of the models it trains, by name, actor first. buckets: shapes of micro-batches.
    slots: for each of the models, how many stage inputs and gradients a device can hold at once.
    rows: steps that the tables have room for.
    """

    devices: int
    pipelines: tuple[tuple[str, PipelineLayout], ...]
    buckets: int
    slots: tuple[int, ...]
    rows: int

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models it trains."""
        return tuple(name for name, _ in self.pipelines)

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The tasks' code, branch number 1, 2, ... of a program (0 is idle)."""
        return tuple(
            Branch(name, kind, bucket)
            for name, pipeline in self.pipelines
            for kind in pipeline.kinds
            for bucket in range(self.buckets)
        )


def trained_pipelines(problem: Problem) -> tuple[tuple[str, PipelineLayout], ...]:
    """Pipelines of the models that have micro-batches in `problem`.

    Raises ScheduleError for virtual stages: a device would need several slices of a model.
    """
    if problem.has_chunks:
        raise ScheduleError(
            f"actor.chunks={problem.actor.chunks}, critic.chunks={problem.critic.chunks}: the "
            "compiled pipeline runs one stage of each model on a device; use chunks=1"
        )
    return tuple(
        (name, PipelineLayout(p.stages, replicas, p.direction, p.split))
        for name, p, replicas in zip(MODELS, problem.pipelines, problem.replicas)
        if p.micro_batches
    )


def most_rows(pipelines: Sequence[tuple[str, PipelineLayout]], most: int, ticked: bool) -> int:
    """Steps that any schedule of at most `most` micro-batches (of all replicas) can take.

    A device's own tasks; or, in ticks shared by all devices, every task of every device, one after
    the other. Rows cost 56 bytes, and those not in use no time.
    """
    rows = 0
    for _, pipeline in pipelines:
        each = -(-most // pipeline.replicas) * len(pipeline.kinds)
        rows += each * (pipeline.stages * pipeline.replicas if ticked else 1)
    return max(rows, 1)


def deal_micro_batches(counts: Sequence[int], replicas: int) -> np.ndarray:
    """Which micro-batch is number m of replica k: (bucket, index), int64 `[K, M, 2]`.

    `counts[b]` micro-batches of bucket b are dealt to the replicas in turn, bucket after bucket, so
    that each gets its share of every length. M is the same for all (at least 1); where a replica
    has fewer, -1 stands for an empty micro-batch, which has no tasks.
    """
    real = [(bucket, index) for bucket, count in enumerate(counts) for index in range(count)]
    most = max(1, -(-len(real) // replicas))
    dealt = np.full((replicas, most, 2), -1, np.int64)
    for number, place in enumerate(real):
        dealt[number % replicas, number // replicas] = place
    return dealt


def relative_lengths(dealt: np.ndarray, of_bucket: Sequence[float]) -> list[list[float]]:
    """`lengths` of a `problem.Pipeline`, [K, M]: `of_bucket[b]` for bucket b, 0 if empty."""
    return [[float(of_bucket[b]) if b >= 0 else 0.0 for b, _ in row] for row in dealt]
