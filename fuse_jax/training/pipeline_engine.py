"""One way to run the pipelined updates of a set of models: a compiled program, or dispatched tasks.

Both take a mini-batch and a schedule and end in `ppo_step`'s update, compiled for the shapes of the
run. What is planned, and who waits for what, is `pipeline_step.py`'s.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.fusion.intra_stage.dispatch import Dispatch
from fuse_jax.fusion.intra_stage.executor import collect
from fuse_jax.fusion.intra_stage.flight import (
    CollectiveFlight,
    DispatchFlight,
    Flight,
    MailboxFlight,
)
from fuse_jax.fusion.intra_stage.layout import (
    Layout,
    deal_micro_batches,
    most_rows,
    trained_pipelines,
)
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.intra_stage.stages import join_params, split_params
from fuse_jax.fusion.intra_stage.tables import slots_needed
from fuse_jax.fusion.intra_stage.transport import Mailbox, make_transport
from fuse_jax.training.gradients import Metrics, finish_metrics
from fuse_jax.training.minibatch import Minibatch
from fuse_jax.training.pipeline_gradients import PipelineGradients
from fuse_jax.training.pipeline_plan import Planner
from fuse_jax.training.pipeline_shared import Pipelines, counts_of, usual_counts
from fuse_jax.training.ppo_step import ppo_step
from fuse_jax.training.state import CompiledStep, TrainState

SPARE_SLOTS = 2  # beyond what the usual mini-batch's schedules need
XLA_CPU_TIMEOUT = 30.0  # s; it gives a collective up after 40
STEP_MARGIN = 3.0  # times its prediction, that a step may take before it is said to hang


class Compiled:
    """The pipeline as one program, with the optimiser's update in it."""

    def __init__(self, shared: Pipelines, train: tuple[str, ...], minibatch: Minibatch) -> None:
        planner, choice = shared.planner, shared.choice
        assert planner is not None and choice is not None and choice.transport != "dispatch"
        hp, mesh, settings = shared.hp, shared.mesh, shared.settings
        transport = make_transport(
            choice.transport, mesh.shape["pipe"], shared.lanes, timeout_s=settings.timeout
        )
        layout = make_layout(planner, train, minibatch, ticked=transport.ticked)
        stages = shared.model_stages(mesh.shape["tensor"])
        self.gradients = PipelineGradients(layout, mesh, hp, transport, stages)
        self.program: Any = getattr(transport, "program", None)
        self._transport, self._timeout = transport, settings.timeout
        if self.program is None:  # then it is that of the whole step, however long one takes
            self._timeout += STEP_MARGIN * choice.plan.predicted / 1e3
        elif jax.default_backend() == "cpu":  # before XLA ends the process, naming no task
            self._timeout = min(self._timeout, XLA_CPU_TIMEOUT)
        gradients: Any = partial(self.gradients, hp=hp, train=train)
        bound = partial(ppo_step, hp=hp, gradients=gradients)
        archs = {"actor": hp.actor, "critic": hp.critic}
        self.compiled = CompiledStep(bound, archs, shared.run_mesh)
        self._shared, self._planner, self._train = shared, planner, train

    def fits(self, minibatch: Minibatch) -> bool:
        """Whether there is room for the schedules of the plans as they are now."""
        planner = self._shared.planner
        assert planner is not None
        needed = most_slots(planner, self._train, minibatch, ticked=self._transport.ticked)
        layout = self.gradients.layout
        return all(needed[name] <= room for name, room in zip(layout.models, layout.slots))

    def precompile(self, state: TrainState, minibatch: Minibatch) -> None:
        plan = self._planner.serial(self._train, counts_of(minibatch))
        self.compiled.precompile(state, self.prepare(minibatch, plan.schedule))

    def prepare(self, minibatch: Minibatch, schedule: Schedule) -> Any:
        return self.gradients.place(self.gradients.prepare(minibatch, schedule))

    def __call__(
        self, state: TrainState, planned: Any, schedule: Schedule
    ) -> tuple[TrainState, Metrics, Flight]:
        state, metrics = self.compiled(state, planned)
        outputs = next(iter(metrics.values()))
        if isinstance(self._transport, Mailbox):
            return state, metrics, MailboxFlight(schedule, outputs, self._transport.program)
        return state, metrics, CollectiveFlight(schedule, outputs, self.program, self._timeout)


class Dispatched:
    """The pipeline task by task, and the optimiser's update as a program of its own."""

    program = None

    def __init__(self, shared: Pipelines, train: tuple[str, ...], minibatch: Minibatch) -> None:
        planner, hp = shared.planner, shared.hp
        assert planner is not None
        plan = planner.serial(train, counts_of(minibatch))
        self.pipelines = trained_pipelines(plan.schedule.problem)
        self._mesh = shared.mesh
        self._dispatch = Dispatch(
            self.pipelines, shared.mesh, shared.model_stages(), shared.settings.timeout
        )
        archs = {"actor": hp.actor, "critic": hp.critic}
        self.compiled = CompiledStep(self._update, archs, shared.run_mesh)
        self._hp, self._planner, self._train = hp, planner, train

    def _update(self, state: TrainState, sums: Any) -> tuple[TrainState, Metrics]:
        """`ppo_step` from what the tasks have summed."""

        def summed(params: Any, sums: Any) -> tuple[dict[str, Any], Metrics]:
            del params
            grads, metrics = {}, {}
            for name, pipeline in self.pipelines:
                whole = collect(sums[name], pipeline)
                grads[name] = join_params(whole.grads)
                metrics |= whole.metrics
            return grads, finish_metrics(metrics)

        return ppo_step(state, sums, hp=self._hp, gradients=summed)

    def fits(self, minibatch: Minibatch) -> bool:
        """Always: results lie where they are made."""
        del minibatch
        return True

    def precompile(self, state: TrainState, minibatch: Minibatch) -> None:
        """Run every kind of task once, on micro-batches as they are; their sums go nowhere."""
        replicas = max(pipeline.replicas for _, pipeline in self.pipelines)
        each = [
            bucket._replace(count=np.int32(min(replicas, len(bucket.micro_batches.tokens))))
            for bucket in minibatch.buckets
        ]
        minibatch = minibatch._replace(buckets=tuple(each))
        schedule = self._planner.serial(self._train, counts_of(minibatch)).schedule
        sums, flight = self._start(state, self.prepare(minibatch, schedule))
        flight.wait()
        self.compiled.precompile(state, sums)

    def prepare(self, minibatch: Minibatch, schedule: Schedule) -> Any:
        counts = counts_of(minibatch)
        dealt = {n: deal_micro_batches(counts, p.replicas) for n, p in self.pipelines}
        return place_rows(minibatch, self._mesh), self._dispatch.prepare(schedule, dealt)

    def __call__(
        self, state: TrainState, prepared: Any, schedule: Schedule
    ) -> tuple[TrainState, Metrics, Flight]:
        del schedule
        sums, flight = self._start(state, prepared)
        state, metrics = self.compiled(state, sums)
        return state, metrics, flight

    def _start(self, state: TrainState, prepared: Any) -> tuple[Any, DispatchFlight]:
        minibatch, walk = prepared
        weights = {name: split_params(state.params[name]) for name, _ in self.pipelines}
        batches = [bucket.micro_batches for bucket in minibatch.buckets]
        return self._dispatch.run(walk, weights, batches, minibatch.kl_coef)


def make_layout(
    planner: Planner, train: tuple[str, ...], minibatch: Minibatch, *, ticked: bool
) -> Layout:
    """What the program of a run is compiled for: room for its usual and its longest schedules."""
    rooms = [len(bucket.micro_batches.tokens) for bucket in minibatch.buckets]
    slots = most_slots(planner, train, minibatch, ticked=ticked)
    usual = planner.serial(train, usual_counts(minibatch)).schedule
    pipelines = trained_pipelines(usual.problem)
    return Layout(
        planner.devices,
        pipelines,
        len(rooms),
        tuple(needed + SPARE_SLOTS for needed in slots.values()),
        most_rows(pipelines, sum(rooms), ticked),
    )


def most_slots(
    planner: Planner, train: tuple[str, ...], minibatch: Minibatch, *, ticked: bool
) -> dict[str, int]:
    """Slots that each model in `train` needs for its usual and its longest schedules."""
    rooms = [len(bucket.micro_batches.tokens) for bucket in minibatch.buckets]
    usual = usual_counts(minibatch)
    longest = [[room if i == b else 0 for i in range(len(rooms))] for b, room in enumerate(rooms)]
    plans = [(planner.serial(train, counts), counts) for counts in (usual, *longest)]
    if len(train) == 2:
        plans.append((planner.plan(usual), usual))
    most: dict[str, int] = {}
    for plan, counts in plans:
        pipelines = trained_pipelines(plan.schedule.problem)
        dealt = {n: deal_micro_batches(counts, p.replicas) for n, p in pipelines}
        for name, needed in slots_needed(plan.schedule, dealt, ticked).items():
            most[name] = max(most.get(name, 0), needed)
    return most


def place_rows(minibatch: Minibatch, mesh: Mesh) -> Minibatch:
    """On a pipeline mesh, rows cut over data."""

    def placed(leaf: Array) -> NamedSharding:
        return NamedSharding(mesh, P(None, "data") if np.ndim(leaf) else P())

    return jax.device_put(minibatch, jax.tree.map(placed, minibatch))
