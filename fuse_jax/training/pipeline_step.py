"""PPO updates trained in pipelines: `ppo_step.Step`'s interface, run by a schedule.

What is compiled depends on the models that train (both, or the critic alone while it warms up or
after a KL early stop); which schedule runs, on the micro-batches of the mini-batch at hand. At most
one update is in flight: the next one begins by waiting for it, so an error names its task.

The state keeps the layout that rollout, scoring and checkpoints know; a step moves the layers to
their stages by sharding alone.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax.numpy as jnp

from fuse_jax.fusion.intra_stage.flight import Flight
from fuse_jax.fusion.intra_stage.tables import SlotsError
from fuse_jax.training.gradients import Metrics
from fuse_jax.training.minibatch import Minibatch
from fuse_jax.training.pipeline_engine import Compiled, Dispatched
from fuse_jax.training.pipeline_plan import Plan
from fuse_jax.training.pipeline_shared import Pipelines, counts_of
from fuse_jax.training.pipeline_timeline import write_timeline
from fuse_jax.training.state import TrainState

TIMELINE_AT = 3  # the update whose timeline is noted: warm


class _Update(NamedTuple):
    """The one that is in flight. started: if it is timed; seconds: it took, if that is known."""

    flight: Flight
    plan: Plan
    started: float | None
    seconds: float | None


class PipelineStep:
    """Updates of the models in `train` (one of both, or the critic alone), by pipeline."""

    def __init__(self, pipelines: Pipelines, train: tuple[str, ...]) -> None:
        self._shared, self._train = pipelines, train
        self._engine: Compiled | Dispatched | None = None
        self._flight: _Update | None = None
        self._made = 0  # engines
        self._updates = 0
        self._searched = 0  # the search whose schedules the engine has room for

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
        schedule needs more slots than were compiled; pipeline_recompiled: 1 if schedules that were
        searched again did, and the program was made anew. Raises StepError of the update before.
        """
        made = self._made
        engine = self._engine_of(state, minibatch)
        recompiled = 0 < made < self._made
        plan, prepared, fallback = self._prepare(engine, minibatch)  # while the last one runs
        self.wait()
        both = len(self._train) == 2
        if both:
            self._shared.look_for_drift(state.params, minibatch)
        if both and self._updates == TIMELINE_AT and engine.program is not None:
            engine.program.record(True)
        # A program that is made anew may be compiled in the call; a plan from before a search that
        # was made just now is of other task times.
        timed = self._updates > 0 and not recompiled
        timed &= self._searched == self._shared.searched_again
        started = time.monotonic() if timed else None
        state, metrics, flight = engine(state, prepared, plan.schedule)
        # A dispatched one may have ended by the time the host has walked through it.
        seconds = None
        if started is not None and flight.ended():
            seconds = time.monotonic() - started
        self._flight = _Update(flight, plan, started, seconds)
        self._shared.land = self._land
        self._updates += 1
        shown = {
            "pipeline_fused": plan.fused,
            "pipeline_serial": not plan.fused and both,
            "pipeline_alone": not both,
            "pipeline_fallback": fallback,
            "pipeline_recompiled": recompiled,
            "pipeline_predicted_ms": plan.predicted,
        }
        return state, metrics | {name: jnp.float32(value) for name, value in shown.items()}

    def _prepare(
        self, engine: Compiled | Dispatched, minibatch: Minibatch
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
        land, self._shared.land = self._shared.land, None
        if land is not None:
            land()

    def _land(self) -> None:
        assert self._flight is not None
        flight, plan, started, seconds = self._flight
        self._flight = None
        # One that ended while the host did other things (a search takes seconds) says no time.
        late = flight.ended()
        flight.wait()
        if len(self._train) == 1:
            return
        if started is not None and not late:
            seconds = time.monotonic() - started
        if seconds is not None:
            self._shared.note(plan, seconds)
        if self._updates == TIMELINE_AT + 1:
            self._write_timeline(plan)

    def _engine_of(self, state: TrainState, minibatch: Minibatch) -> Compiled | Dispatched:
        shared = self._shared
        searched = self._searched != shared.searched_again
        if self._engine is not None and searched and not self._engine.fits(minibatch):
            self.wait()  # if that raises, the next call asks again
            shared.say(
                "pipeline: schedules that were searched again need more slots than were "
                "compiled: the program is made anew (pipeline_recompiled counts it)"
            )
            self._engine = None  # released before the new one is compiled
        if self._engine is None:
            _, choice = shared.start(state.params, minibatch)
            kind = Dispatched if choice.transport == "dispatch" else Compiled
            self._engine = kind(shared, self._train, minibatch)
            self._made += 1
        self._searched = shared.searched_again
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
