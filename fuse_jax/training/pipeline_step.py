"""PPO updates trained in pipelines: `ppo_step.Step`'s interface, run by a schedule.

What is compiled depends on the models that train (both, or the critic alone while it warms up or
after a KL early stop); which schedule runs, on the micro-batches of the mini-batch at hand. At most
one update is in flight: the next one begins by waiting for it, so an error names its task.

The state keeps the layout that rollout, scoring and checkpoints know; a step moves the layers to
their stages by sharding alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.config import IntraStageConfig
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
from fuse_jax.fusion.intra_stage.stages import StageFunctions, join_params, split_params
from fuse_jax.fusion.intra_stage.tables import SlotsError, slots_needed
from fuse_jax.fusion.intra_stage.transport import Mailbox, make_transport
from fuse_jax.training.gradients import HyperParameters, Metrics, finish_metrics
from fuse_jax.training.minibatch import Minibatch
from fuse_jax.training.pipeline_gradients import PipelineGradients, model_stages
from fuse_jax.training.pipeline_plan import Choice, Plan, Planner, Transport, choose
from fuse_jax.training.pipeline_profile import measure_tasks
from fuse_jax.training.pipeline_timeline import write_timeline
from fuse_jax.training.ppo_step import ppo_step
from fuse_jax.training.state import CompiledStep, TrainState

SPARE_SLOTS = 2  # beyond what the usual mini-batch's schedules need
XLA_CPU_TIMEOUT = 30.0  # s; it gives a collective up after 40
WINDOW = 8  # updates between two looks at the drift
TIMELINE_AT = 3  # the update whose timeline is noted: warm


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
        self.flying: PipelineStep | None = None  # whose update has not been waited for
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
        """An update's time: is it still in proportion to what the search was told?"""
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


class PipelineStep:
    """Updates of the models in `train` (one of both, or the critic alone), by pipeline."""

    def __init__(self, pipelines: Pipelines, train: tuple[str, ...]) -> None:
        self._shared, self._train = pipelines, train
        self._engine: _Compiled | _Dispatched | None = None
        self._flight: tuple[Flight, Plan, float] | None = None
        self._updates = 0

    def precompile(self, state: TrainState, minibatch: Minibatch) -> None:
        """Measure, plan and compile now; every mini-batch of a run has the shapes of this one."""
        self._engine_of(state, minibatch).precompile(state, minibatch)

    def text(self) -> str:
        """The compiled program, as XLA prints it. Raises RuntimeError before `precompile`."""
        if self._engine is None:
            raise RuntimeError("not compiled yet: call precompile first")
        return self._engine.compiled.text()

    def __call__(self, state: TrainState, minibatch: Minibatch) -> tuple[TrainState, Metrics]:
        """One update, dispatched: `ppo_step`'s metrics, and `pipeline_*`.

        pipeline_fused, pipeline_serial, pipeline_alone: 1 for what this update was (alone: of a
        model whose partner does not train). pipeline_fallback: 1 if it is serial because the fused
        schedule needs more slots than were compiled. Raises StepError of the update before.
        """
        engine = self._engine_of(state, minibatch)
        plan, prepared, fallback = self._prepare(engine, minibatch)  # while the last one runs
        self.wait()
        both = len(self._train) == 2
        if both:
            self._shared.look_for_drift(state.params, minibatch)
        if both and self._updates == TIMELINE_AT and engine.program is not None:
            engine.program.record(True)
        started = time.monotonic()
        state, metrics, flight = engine(state, prepared, plan.schedule)
        self._flight, self._shared.flying = (flight, plan, started), self
        self._updates += 1
        shown = {
            "pipeline_fused": plan.fused,
            "pipeline_serial": not plan.fused and both,
            "pipeline_alone": not both,
            "pipeline_fallback": fallback,
            "pipeline_predicted_ms": plan.predicted,
        }
        return state, metrics | {name: jnp.float32(value) for name, value in shown.items()}

    def _prepare(
        self, engine: _Compiled | _Dispatched, minibatch: Minibatch
    ) -> tuple[Plan, Any, bool]:
        """The plan of this mini-batch, what its step takes, and whether it is a way out."""
        planner, counts = self._shared.planner, counts_of(minibatch)
        assert planner is not None
        serial = planner.serial(self._train, counts)
        plan = planner.plan(counts) if len(self._train) == 2 else serial
        try:
            return plan, engine.prepare(minibatch, plan.schedule), False
        except SlotsError:
            if plan is serial:
                raise
            self._shared.tell_fallback(counts)
            return serial, engine.prepare(minibatch, serial.schedule), True

    def wait(self) -> None:
        """Until no update of the run is in flight. Raises StepError naming device and task."""
        flying, self._shared.flying = self._shared.flying, None
        if flying is not None:
            flying._land()

    def _land(self) -> None:
        assert self._flight is not None
        flight, plan, started = self._flight
        self._flight = None
        flight.wait()
        if len(self._train) == 1:
            return
        if self._updates > 1:
            self._shared.note(plan, time.monotonic() - started)
        if self._updates == TIMELINE_AT + 1:
            self._write_timeline(plan)

    def _engine_of(self, state: TrainState, minibatch: Minibatch) -> _Compiled | _Dispatched:
        if self._engine is None:
            _, choice = self._shared.start(state.params, minibatch)
            kind = _Dispatched if choice.transport == "dispatch" else _Compiled
            self._engine = kind(self._shared, self._train, minibatch)
        return self._engine

    def _write_timeline(self, plan: Plan) -> None:
        shared, engine = self._shared, self._engine
        assert engine is not None and shared.planner is not None
        spans = None
        if engine.program is not None:
            engine.program.record(False)
            spans = engine.program.spans()
        if shared.workdir is not None:
            write_timeline(shared.workdir, plan.schedule, shared.planner.cost_model, spans)


class _Compiled:
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
        self.program: Any = transport.program if isinstance(transport, Mailbox) else None
        self._transport, self._timeout = transport, settings.timeout
        if jax.default_backend() == "cpu":  # before XLA itself ends the process, naming no task
            self._timeout = min(self._timeout, XLA_CPU_TIMEOUT)
        gradients: Any = partial(self.gradients, hp=hp, train=train)
        bound = partial(ppo_step, hp=hp, gradients=gradients)
        archs = {"actor": hp.actor, "critic": hp.critic}
        self.compiled = CompiledStep(bound, archs, shared.run_mesh)
        self._planner, self._train = planner, train

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
        noted = getattr(self._transport, "program", None)
        return state, metrics, CollectiveFlight(schedule, outputs, noted, self._timeout)


class _Dispatched:
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
    usual = usual_counts(minibatch)
    longest = [[room if i == b else 0 for i in range(len(rooms))] for b, room in enumerate(rooms)]
    plans = [(planner.serial(train, counts), counts) for counts in (usual, *longest)]
    if len(train) == 2:
        plans.append((planner.plan(usual), usual))
    pipelines = trained_pipelines(plans[0][0].schedule.problem)
    slots = dict.fromkeys((name for name, _ in pipelines), 0)
    for plan, counts in plans:
        dealt = {n: deal_micro_batches(counts, p.replicas) for n, p in pipelines}
        for name, needed in slots_needed(plan.schedule, dealt, ticked).items():
            slots[name] = max(slots[name], needed + SPARE_SLOTS)
    rows = most_rows(pipelines, sum(rooms), ticked)
    devices = planner.devices
    return Layout(devices, pipelines, len(rooms), tuple(slots.values()), rows)


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


def place_rows(minibatch: Minibatch, mesh: Mesh) -> Minibatch:
    """On a pipeline mesh, rows cut over data."""

    def placed(leaf: Array) -> NamedSharding:
        return NamedSharding(mesh, P(None, "data") if np.ndim(leaf) else P())

    return jax.device_put(minibatch, jax.tree.map(placed, minibatch))
