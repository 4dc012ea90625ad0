"""One update in flight: what is timed, and when the program is made anew. Engines are stand-ins."""

import types
import weakref

import pytest

from fuse_jax.config import IntraStageConfig
from fuse_jax.fusion.intra_stage.flight import StepError
from fuse_jax.training import pipeline_step
from fuse_jax.training.pipeline_plan import Plan
from fuse_jax.training.pipeline_shared import Pipelines
from fuse_jax.training.pipeline_step import PipelineStep

BATCH = types.SimpleNamespace(buckets=[types.SimpleNamespace(count=8)])
STATE = types.SimpleNamespace(params={})
PLAN = Plan(None, True, 10.0, 10.0, "")
WAITED, SEARCH, COMPILE = 0.25, 5.0, 60.0  # s, in halves of halves: sums are exact


class Flight:
    def __init__(self, run):
        self.run, self.error, self.early = run, None, run.walking > 0

    def ended(self):
        return self.early

    def wait(self):
        if self.error:
            raise self.error
        if not self.early:
            self.run.now += WAITED


class Engine:
    """Compiles in its first call."""

    program = None

    def __init__(self, run):
        run.alive_at_making.append(run.engine is not None and run.engine() is not None)
        run.engine, run.enough, self.run, self.compiled = weakref.ref(self), True, run, False

    def fits(self, minibatch):
        return self.run.enough

    def prepare(self, minibatch, schedule):
        self.run.now += self.run.searching

    def __call__(self, state, prepared, schedule):
        self.run.now += self.run.walking if self.compiled else COMPILE
        self.compiled = True
        self.run.flight = Flight(self.run)
        return state, {}, self.run.flight


class Run:
    """A step, its clock and what it has noted."""

    def __init__(self, monkeypatch):
        self.now, self.searching, self.enough, self.engine = 0.0, 0.0, True, None
        self.walking = 0.0  # s in the call, in which the update then ends
        self.alive_at_making, self.noted, self.drifts = [], [], False
        mesh = types.SimpleNamespace(shape={"pipe": 2})
        self.shared = Pipelines(IntraStageConfig(), None, mesh, None, {}, say=str)
        plans = types.SimpleNamespace(plan=lambda counts: PLAN, serial=lambda train, counts: PLAN)
        self.shared.planner, self.shared.choice = plans, types.SimpleNamespace(transport="pair")
        self.shared.note = lambda plan, seconds: self.noted.append(seconds)
        self.shared.look_for_drift = self.look
        monkeypatch.setattr(pipeline_step, "Compiled", lambda *_: Engine(self))
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(pipeline_step, "time", clock)
        self.step = PipelineStep(self.shared, ("actor", "critic"))

    def look(self, params, minibatch):
        self.shared.searched_again += self.drifts
        self.drifts = False

    def update(self):
        return self.step(STATE, BATCH)[1]


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def test_only_updates_that_the_host_waited_for_are_timed(run):
    run.update()
    run.update()  # waits for the first, in which all was compiled
    assert run.noted == []
    run.update()
    assert run.noted == [WAITED]
    run.searching, run.flight.early = SEARCH, True
    run.update()  # the one before ended in the search
    run.searching = 0.0
    run.step.wait()
    assert run.noted == [WAITED] * 2


def test_an_update_that_ends_in_its_call_took_as_long_as_that(run):
    """The host walks through dispatched tasks: it is rarely done before the devices."""
    run.update()
    run.walking = WAITED
    run.update()
    run.now += SEARCH  # of whatever the host does between two updates
    run.walking = 2 * WAITED
    run.update()
    assert run.noted == [WAITED]
    run.flight.error = StepError(1, None, "burnt")
    with pytest.raises(StepError):
        run.step.wait()
    assert run.noted == [WAITED]


@pytest.mark.parametrize("enough", [True, False])
def test_the_first_update_after_a_search_or_a_compilation_is_not_timed(run, enough):
    run.update()
    run.drifts = True
    run.update()  # still by the plans of before
    run.enough = enough
    assert run.update()["pipeline_recompiled"] == (not enough)
    assert run.noted == []
    run.update()  # waits for one that was compiled in its call, or not
    assert run.noted == [WAITED] * enough
    run.update()
    assert run.noted == [WAITED] * (1 + enough)


def test_a_program_is_made_anew_though_the_update_before_failed(run):
    run.update()
    run.shared.searched_again += 1
    run.enough, run.flight.error = False, StepError(1, None, "burnt")
    with pytest.raises(StepError, match="burnt"):
        run.update()
    assert run.update()["pipeline_recompiled"] == 1.0
    assert run.update()["pipeline_recompiled"] == 0.0
    assert len(run.alive_at_making) == 2


def test_a_program_is_released_before_the_next_one_is_made(run):
    run.update()
    run.shared.searched_again += 1
    run.enough = False
    run.update()
    assert run.alive_at_making == [False, False]
