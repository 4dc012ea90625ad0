"""Updates by pipeline: the same bits whatever the schedule, what is counted, and how they fail."""

import dataclasses
import json

import faulty_stages
import jax
import numpy as np
import pipeline_toy as toy
import pytest

from fuse_jax.config import IntraStageConfig, MeshConfig
from fuse_jax.fusion.intra_stage import native
from fuse_jax.fusion.intra_stage.executor import pipeline_mesh
from fuse_jax.fusion.intra_stage.flight import StepError
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.training.pipeline_plan import Plan
from fuse_jax.training.pipeline_shared import WINDOW, Pipelines
from fuse_jax.training.pipeline_step import TIMELINE_AT, PipelineStep
from fuse_jax.training.ppo_step import create_ppo_state, make_step

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
HP = toy.hyper_parameters((2, 2), lr=1e-4)
PARAMS = toy.parameters(HP)
COUNT = 8
BATCH = toy.minibatch(COUNT)
AVAILABLE = {"mailbox": "", "dispatch": "", "pair": "", "ring": ""}
BOTH = ("actor", "critic")


def pipelines(workdir=None, *, hp=HP, data=1, tensor=1, say=str, **settings):
    devices = jax.devices()[: 2 * data * tensor]
    mesh = make_mesh(MeshConfig(2 * data, 1, tensor), devices)
    chosen = IntraStageConfig(**{"transport": "mailbox", "timeout": 0.8} | settings)
    made = pipeline_mesh(2, data, tensor, devices=devices)
    # XLA partitions no operation with side effects, and more than one lane is profiled so.
    wrap = faulty_stages.wrap if data * tensor == 1 else None
    return Pipelines(chosen, hp, made, mesh, AVAILABLE, wrap=wrap, workdir=workdir, say=say)


def fresh(shared):
    params = PARAMS if shared.hp is HP else toy.parameters(shared.hp)
    return create_ppo_state(params, shared.hp, shared.run_mesh)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return pipelines(tmp_path_factory.mktemp("work"), schedule="fused", drift=0.0)


@pytest.fixture(scope="module")
def step(shared):
    """One executable serves the tests here."""
    made = PipelineStep(shared, BOTH)
    made(fresh(shared), BATCH)
    made.wait()
    return made


def run(step, shared, updates=3, batch=BATCH):
    state, collected = fresh(shared), []
    for _ in range(updates):
        state, metrics = step(state, batch)
        collected.append(metrics)
    step.wait()  # names the task, where reading a metric would only tell the error
    return state, [{name: float(value) for name, value in one.items()} for one in collected]


def planned_as(shared, **settings):
    """Make the plans anew under other settings; the executable stays."""
    changed = dataclasses.replace(shared.planner.settings, **settings)
    shared.planner = dataclasses.replace(shared.planner, settings=changed)


def test_fused_and_serial_updates_give_the_same_bits_near_the_plain_step(step, shared):
    fused, of_fused = run(step, shared)
    planned_as(shared, schedule="serial")
    serial, of_serial = run(step, shared)
    planned_as(shared, schedule="fused")
    assert toy.bits((fused.params, fused.opt_state)) == toy.bits((serial.params, serial.opt_state))
    assert [m["pipeline_fused"] for m in of_fused] == [1.0] * 3
    assert [m["pipeline_serial"] for m in of_serial] == [1.0] * 3
    one = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    plain, state = make_step(one, HP), create_ppo_state(PARAMS, HP, one)
    for _ in range(3):
        state, metrics = plain(state, BATCH)
    pairs = zip(jax.tree.leaves(fused.params), jax.tree.leaves(state.params), strict=True)
    assert max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) < 1e-5
    assert of_fused[-1]["actor_loss"] == pytest.approx(float(metrics["actor_loss"]), abs=1e-5)


def greedy(shared):
    """A plan that has all forwards first, and so needs many slots."""
    plan = shared.planner.plan([COUNT])
    graph = plan.schedule.graph
    forwards_first = [
        sorted(row, key=lambda task: (graph.kind[task], graph.model[task], task))
        for row in plan.schedule.order.tolist()
    ]
    problem = dataclasses.replace(plan.schedule.problem, memory_cap=None)
    return Plan(Schedule(problem, np.array(forwards_first)), True, 1.0, 1.0, "")


def test_a_schedule_with_too_much_in_flight_gives_way_to_the_serial_one(step, shared, monkeypatch):
    monkeypatch.setitem(shared.planner._plans, (COUNT,), greedy(shared))
    _, (metrics,) = run(step, shared, 1)
    assert (metrics["pipeline_fallback"], metrics["pipeline_serial"]) == (1.0, 1.0)
    assert metrics["pipeline_fused"] == 0.0


@pytest.mark.parametrize(
    ("kl", "reason"), [(faulty_stages.FAIL, "injected fault"), (faulty_stages.HANG, "waited too")]
)
def test_a_failed_update_names_its_task_and_the_next_one_works(step, shared, kl, reason):
    wanted, _ = run(step, shared, 1)
    broken = BATCH._replace(kl_coef=np.float32(kl))
    with pytest.raises(StepError, match=reason) as caught:
        run(step, shared, 1, broken)
    assert caught.value.device == 1 and str(caught.value.task) == "actor[0] B0 on device 1"
    again, _ = run(step, shared, 1)
    assert toy.bits(again.params) == toy.bits(wanted.params)


def test_the_timeline_of_a_warm_update_is_drawn(step, shared):
    run(step, shared, TIMELINE_AT + 1)
    assert (shared.workdir / "pipeline.png").stat().st_size > 10_000
    events = json.loads((shared.workdir / "pipeline_trace.json").read_text())["traceEvents"]
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = [(groups[e["pid"]], e["name"]) for e in events if e["ph"] == "X"]
    planned = sorted(name for group, name in spans if group == "planned")
    assert planned == sorted(name for group, name in spans if group == "measured")
    assert len(planned) == 2 * 2 * 2 * COUNT  # devices x models x kinds x micro-batches


@pytest.fixture(scope="module")
def dispatched():
    shared = pipelines(transport="dispatch", timeout=60.0)
    step = PipelineStep(shared, BOTH)
    step.precompile(fresh(shared), BATCH)
    return step, shared


@pytest.mark.slow  # compiles a program a task
def test_dispatched_updates_give_the_same_numbers(step, shared, dispatched):
    other, dispatched = dispatched
    compiled, (of_compiled, _) = run(step, shared, 2)
    state, (metrics, _) = run(other, dispatched, 2)
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(compiled.params), strict=True)
    assert max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) < 1e-5
    assert metrics.keys() == of_compiled.keys()
    assert metrics["critic_loss"] == pytest.approx(of_compiled["critic_loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kl", "reason"), [(faulty_stages.FAIL, "injected fault"), (faulty_stages.HANG, "no end")]
)
def test_a_failed_dispatched_update_names_its_task_and_the_next_one_works(
    dispatched, monkeypatch, kl, reason
):
    step, shared = dispatched
    wanted, _ = run(step, shared, 1)
    monkeypatch.setattr(step._engine._dispatch, "timeout_s", 0.8)
    with pytest.raises(StepError, match=reason) as caught:
        run(step, shared, 1, BATCH._replace(kl_coef=np.float32(kl)))
    assert caught.value.device == 1 and str(caught.value.task) == "actor[0] B0 on device 1"
    again, _ = run(step, shared, 1)
    assert toy.bits(again.params) == toy.bits(wanted.params)


@pytest.mark.slow  # compiles twice
def test_schedules_that_are_searched_again_get_the_slots_they_need():
    shared = pipelines(schedule="fused", drift=0.0)
    step = PipelineStep(shared, BOTH)
    wanted, _ = run(step, shared)
    shared.planner._plans[(COUNT,)] = greedy(shared)
    shared.searched_again += 1
    state, metrics = run(step, shared)
    assert toy.bits(state.params) == toy.bits(wanted.params)
    assert [m["pipeline_recompiled"] for m in metrics] == [1.0, 0.0, 0.0]
    assert [m["pipeline_fused"] for m in metrics] == [1.0] * 3
    assert [m["pipeline_fallback"] for m in metrics] == [0.0] * 3


def test_drift_beyond_the_set_share_searches_again(step, shared, monkeypatch):
    other = pipelines(drift=0.25)
    other.planner = shared.planner
    measured = []
    monkeypatch.setattr(other, "_measured", lambda *_: measured.append(1) or shared.planner)
    plan = Plan(None, True, 10.0, 10.0, "")
    for seconds, again in ((0.02, 0), (0.022, 0), (0.03, 1), (0.03, 1), (0.02, 2)):
        for _ in range(WINDOW):
            other.note(plan, seconds)
        other.look_for_drift({}, BATCH)
        assert other.searched_again == len(measured) == again


@pytest.mark.slow  # compiles two meshes' programs
@pytest.mark.parametrize(
    ("transport", "data", "tensor"),
    [("mailbox", 2, 1), ("dispatch", 1, 2), ("ring", 2, 2)],
)
def test_tasks_are_measured_and_searched_again_on_meshes_of_more_axes(transport, data, tensor):
    """Any difference counts as drift; the numbers are those of a run that never looks."""
    hp = toy.hyper_parameters((2, 2), kv_heads=tensor, lr=1e-4)
    batch, told, states, updates = toy.minibatch(4, data=data), [], [], 0
    settings = {"hp": hp, "data": data, "tensor": tensor, "transport": transport}
    for drift in (1e-9, 0.0):
        shared = pipelines(**settings, timeout=60.0, drift=drift, say=told.append)
        step, state = PipelineStep(shared, BOTH), fresh(shared)
        if drift:  # a dispatched update is timed if the host sees its end
            while not shared.searched_again and updates < 20 * WINDOW:
                state, _ = step(state, batch)
                updates += 1
        else:
            for _ in range(updates):
                state, _ = step(state, batch)
        step.wait()
        states.append(toy.bits((state.params, state.opt_state)))
        assert shared.searched_again == (drift > 0)
        for model in BOTH:
            times = shared.planner.times[model]
            assert all(np.all(times[kind] > 0) and times[kind].shape == (1, 2) for kind in "FB")
    assert sum("measured and schedules searched again" in line for line in told) == 1
    assert states[0] == states[1]
