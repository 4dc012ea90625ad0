"""Which schedule and transport are taken, and what is refused at start. Nothing is compiled."""

import numpy as np
import pytest

from fuse_jax.config import Config, FusionConfig, IntraStageConfig, MeshConfig
from fuse_jax.config_read import ConfigError
from fuse_jax.fusion.intra_stage import mailbox
from fuse_jax.fusion.intra_stage.baselines import concatenated_1f1b
from fuse_jax.fusion.intra_stage.transport import make_transport
from fuse_jax.models.architecture import Architecture
from fuse_jax.training import pipeline_check
from fuse_jax.training.config_check import check_mesh
from fuse_jax.training.pipeline_plan import COSTS, Planner, choose, rounded

ALL = {"mailbox": "", "dispatch": "", "pair": "", "ring": ""}
PREFERENCE = ["mailbox", "dispatch", "pair", "ring"]  # no host at work, no process lost, few wait


def planner(stages=(4, 4), times=((10, 20), (6, 12)), cost_model="ideal", **settings):
    tables = {
        name: {kind: np.full((1, count), float(ms)) for kind, ms in zip("FB", of)}
        for name, count, of in zip(("actor", "critic"), stages, times)
    }
    return Planner(IntraStageConfig(**settings), 4, stages, tables, cost_model)


@pytest.fixture(autouse=True)
def plans_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSE_JAX_PLANS", str(tmp_path))


def test_fused_where_it_is_predicted_faster():
    plan = planner().plan([8])
    assert plan.fused and plan.predicted < 0.85 * plan.serial
    assert plan.predicted == plan.schedule.check().makespan()


def test_serial_where_fusion_would_not_gain():
    plan = planner(stages=(1, 1)).plan([8])  # a pipeline of one stage has no bubble
    assert not plan.fused and "would not gain" in plan.why
    assert plan.predicted == plan.serial == concatenated_1f1b(plan.schedule.problem).makespan()


def test_serial_where_it_is_asked_for():
    plan = planner(schedule="serial").plan([8])
    assert not plan.fused and "schedule=serial" in plan.why


def test_a_plan_is_made_once_for_each_count():
    one = planner()
    assert one.plan([8]) is one.plan([8]) is not one.plan([4])


def test_lengths_and_empty_micro_batches_reach_the_problem():
    times = {
        name: {"F": np.array([[1.0] * n, [4.0] * n]), "B": np.array([[2.0] * n, [8.0] * n])}
        for name, n in (("actor", 4), ("critic", 2))
    }
    problem = Planner(IntraStageConfig(), 4, (4, 2), times).problem([2, 3])
    assert problem.actor.lengths == ((0.25, 0.25, 1.0, 1.0, 1.0),)
    assert problem.critic.lengths == ((0.25, 1.0, 1.0), (0.25, 1.0, 0.0))
    assert problem.actor.forward == (4.0,) * 4 and problem.critic.backward == (8.0,) * 2
    assert (problem.actor.direction, problem.critic.direction) == ("up", "down")


def test_one_model_alone_takes_its_own_1f1b():
    plan = planner().serial(("critic",), [8])
    assert plan.schedule.problem.actor.micro_batches == 0
    assert plan.predicted == pytest.approx((8 + 3) * 18)


def test_auto_takes_the_best_predicted_and_the_mailbox_among_equals():
    choice = choose(planner(), [8], ALL)
    assert choice.transport == "mailbox"
    assert all(name in choice.why for name in ("dispatch", "pair", "ring"))
    without = choose(planner(), [8], ALL | {"mailbox": "no compiler"})
    assert without.transport == "dispatch" and "no compiler" in without.why
    ticked = planner()
    only = choose(ticked, [8], ALL | {"mailbox": "no", "dispatch": "no"})
    assert only.transport == "pair" and ticked.cost_model == "rendezvous"
    assert only.plan.predicted >= choice.plan.predicted


def test_equals_are_taken_in_the_order_of_preference_and_said_to_be_equal():
    """Stages of one device send nothing, so every transport takes as long."""
    left = dict(reversed(ALL.items()))  # whose order says nothing
    for name, *others in (PREFERENCE[i:] for i in range(len(PREFERENCE))):
        choice = choose(planner(stages=(1, 1)), [8], left)
        assert choice.transport == name
        ms = f"{choice.plan.predicted:.1f} ms"
        assert all(f"{other} {ms} (equal: less preferred)" in choice.why for other in others)
        left[name] = "gone"
    slower = choose(planner(), [8], ALL | {"dispatch": "no"})
    assert "equal" not in slower.why


def test_a_named_transport_is_taken():
    one = planner(transport="ring")
    assert choose(one, [8], ALL).transport == "ring" and one.cost_model == "lockstep"


def test_transports_that_move_in_ticks_are_planned_in_ticks():
    for name in ("mailbox", "pair", "ring"):
        if name != "mailbox" or mailbox.available():
            assert make_transport(name, 4).ticked == (COSTS[name] != "ideal")


def test_a_mailbox_is_not_used_where_stages_meet_in_collectives():
    why = pipeline_check.transports(4, tensor=2)
    assert "mesh.tensor" in why["mailbox"] and not why["pair"]


def test_times_are_searched_with_to_two_digits():
    assert [rounded(x) for x in (0.0, 0.123, 1.26, 1994.0)] == [0.0, 0.12, 1.3, 2000.0]


def config(mesh=(4, 1, 1, 4), layers=4, **settings):
    return Config(
        model=Architecture(num_layers=layers),
        mesh=MeshConfig(*mesh),
        fusion=FusionConfig(intra_stage=IntraStageConfig(**settings)),
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (config(mesh=(4, 1, 1, 3)), ("mesh.pipe=3", "mesh.data=4", "divisor")),
        (config(mesh=(4, 1, 1, 0)), ("mesh.pipe=0",)),
        (config(mesh=(2, 2, 1, 2)), ("mesh.fsdp=2", "must be 1")),
        (config(actor_stages=3), ("fusion.intra_stage.actor_stages=3", "mesh.pipe=4")),
        (config(critic_stages=-1), ("fusion.intra_stage.critic_stages=-1",)),
        (config(timeout=0.0), ("fusion.intra_stage.timeout=0.0", "above 0")),
        (config(timeout=float("inf")), ("fusion.intra_stage.timeout=inf", "at most 1e+06")),
        (config(timeout=float("nan")), ("fusion.intra_stage.timeout=nan", "above 0")),
        (config(drift=-1.0), ("fusion.intra_stage.drift=-1.0", "at least 0")),
        (config(search_evaluations=0), ("fusion.intra_stage.search_evaluations=0",)),
    ],
)
def test_what_cannot_run_is_refused_with_key_value_and_fix(made, words):
    with pytest.raises(ConfigError) as caught:
        check_mesh(made, 4)
    assert all(word in str(caught.value) for word in words)


def test_several_processes_are_refused(monkeypatch):
    """Each would measure its own times, and search another schedule than the others."""
    monkeypatch.setattr(pipeline_check.jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"mesh.pipe=4.*one process.*2: use 1"):
        pipeline_check.check_pipeline(config())
    pipeline_check.check_pipeline(config(mesh=(4, 1, 1, 1)))


def test_pipelines_that_fit_are_not_refused():
    check_mesh(config(), 4)
    check_mesh(config(mesh=(4, 1, 2, 2)), 8)


def test_a_transport_that_this_machine_lacks_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"transport='mailbox': .*C\+\+.*'auto'"):
        check_mesh(config(transport="mailbox"), 4)
    with pytest.raises(ConfigError, match=r"transport='pair': .*odd"):
        check_mesh(config(mesh=(3, 1, 1, 3), transport="pair"), 3)


def test_layers_that_no_stage_divides_are_refused():
    archs = {"actor": Architecture(num_layers=6), "critic": Architecture(num_layers=4)}
    with pytest.raises(ConfigError, match=r"actor_stages=4: .*6 layers.*one of 1, 2 \("):
        pipeline_check.check_layers(config(), archs)
    pipeline_check.check_layers(config(actor_stages=2), archs)
    pipeline_check.check_layers(config(mesh=(4, 1, 1, 1)), archs)
