"""What the pipelined updates of a run share: task times, plans, the transport, and the drift."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from fuse_jax.config import IntraStageConfig
from fuse_jax.fusion.intra_stage.layout import trained_pipelines
from fuse_jax.fusion.intra_stage.stages import StageFunctions
from fuse_jax.training.gradients import HyperParameters
from fuse_jax.training.minibatch import Minibatch
from fuse_jax.training.pipeline_gradients import model_stages
from fuse_jax.training.pipeline_plan import Choice, Plan, Planner, Transport, choose
from fuse_jax.training.pipeline_profile import measure_tasks

WINDOW = 8  # updates between two looks at the drift


class Pipelines:
    """What the steps of a run share: task times, plans, and how the last update went.

    Args:
      mesh: (pipe, data, tensor). run_mesh: of the state, over the same devices in the same order.
      available: for each transport why it cannot be used, empty where it can.
      workdir: where the timeline goes; None for nowhere.
      wrap: what is put around the stage functions of a model (to pace or to break them).
    """

    def __init__(
        self,
        settings: IntraStageConfig,
        hp: HyperParameters,
        mesh: Mesh,
        run_mesh: Mesh,
        available: dict[Transport, str],
        *,
        say: Callable[[str], None] = print,
        workdir: Path | None = None,
        wrap: Callable[[str, StageFunctions], StageFunctions] | None = None,
    ) -> None:
        self.settings, self.hp, self.mesh, self.run_mesh = settings, hp, mesh, run_mesh
        self.available, self.say, self.workdir, self._wrap = available, say, workdir, wrap
        pipe = mesh.shape["pipe"]
        self.stages = (settings.actor_stages or pipe, settings.critic_stages or pipe)
        self.planner: Planner | None = None
        self.choice: Choice | None = None
        self.searched_again = 0
        self.land: Callable[[], None] | None = None  # waits for the update that is under way
        self._told = False
        self._ratios: list[float] = []
        self._usual: float | None = None

    def model_stages(self, tensor: int = 1) -> dict[str, StageFunctions]:
        """Stage functions of both models, of one of `tensor` shards."""
        stages = model_stages(self.hp, tensor)
        if self._wrap is None:
            return stages
        return {name: self._wrap(name, functions) for name, functions in stages.items()}

    @property
    def lanes(self) -> int:
        """Devices of one pipe position."""
        return self.mesh.shape["data"] * self.mesh.shape["tensor"]

    def start(self, params: dict[str, Any], minibatch: Minibatch) -> tuple[Planner, Choice]:
        """Measure, plan and choose, the first time; then what was chosen."""
        if self.planner is None or self.choice is None:
            self.planner = self._measured(params, minibatch)
            self.choice = choose(self.planner, usual_counts(minibatch), self.available)
            plan = self.choice.plan
            self.say(
                f"pipeline: {self.choice.transport}, predicted {plan.predicted:.1f} ms an update "
                f"({'fused' if plan.fused else 'serial'}: {plan.why}); {self.choice.why}"
            )
        return self.planner, self.choice

    def _measured(self, params: dict[str, Any], minibatch: Minibatch) -> Planner:
        pipe = self.mesh.shape["pipe"]
        any_counts = Planner(self.settings, pipe, self.stages, even_times(self.stages, minibatch))
        pipelines = trained_pipelines(any_counts.problem([1] * len(minibatch.buckets)))
        times = measure_tasks(
            self.model_stages(),
            pipelines,
            params,
            [bucket.micro_batches for bucket in minibatch.buckets],
            self.mesh,
        )
        return Planner(self.settings, pipe, self.stages, times)

    def note(self, plan: Plan, seconds: float) -> None:
        """The time of an update, with nothing else in it: is it still in proportion to what the
        search was told? Where the host had dispatched it only when it had ended, that is the host's
        time, and no less than the devices'.
        """
        if plan.predicted:
            self._ratios.append(1e3 * seconds / plan.predicted)

    def tell_fallback(self, counts: list[int]) -> None:
        """Say once that a fused schedule gave way; the metrics count every time."""
        if not self._told:
            self._told = True
            self.say(
                f"pipeline: the fused schedule of {counts} micro-batches needs more slots than "
                "were compiled: it runs serially (pipeline_fallback counts such updates)"
            )

    def look_for_drift(self, params: dict[str, Any], minibatch: Minibatch) -> None:
        """Measure and search again if updates have become slower or faster than they were."""
        if not self.settings.drift or len(self._ratios) < WINDOW or self.planner is None:
            return
        ratio, self._ratios = statistics.median(self._ratios), []
        if self._usual is None:
            self._usual = ratio
        elif abs(ratio / self._usual - 1.0) > self.settings.drift:
            self.say(
                f"pipeline: updates take {ratio / self._usual:.2f} x their usual time: tasks are "
                "measured and schedules searched again"
            )
            cost_model = self.planner.cost_model
            self.planner = self._measured(params, minibatch)
            self.planner.cost_model = cost_model
            self.searched_again += 1
            self._usual = None


def counts_of(minibatch: Minibatch) -> list[int]:
    """Real micro-batches of each bucket of a mini-batch on the host."""
    return [int(bucket.count) for bucket in minibatch.buckets]


def usual_counts(minibatch: Minibatch) -> list[int]:
    """Counts if samples were spread over the buckets evenly."""
    buckets = len(minibatch.buckets)
    return [-(-len(bucket.micro_batches.tokens) // buckets) for bucket in minibatch.buckets]


def even_times(stages: tuple[int, int], minibatch: Minibatch) -> dict[str, dict[str, np.ndarray]]:
    """Times in proportion to tokens, where only the pipelines' shape is asked for."""
    tokens = [float(np.prod(b.micro_batches.tokens.shape[1:])) for b in minibatch.buckets]
    return {
        name: {kind: np.outer(tokens, np.full(count, cost)) for kind, cost in (("F", 1), ("B", 2))}
        for name, count in zip(("actor", "critic"), stages)
    }
