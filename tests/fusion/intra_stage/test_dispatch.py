"""Tasks dispatched by the host: the compiled pipeline's numbers, and steps that end badly."""

import dataclasses

import faulty_stages
import jax
import numpy as np
import pipeline_toy as toy
import pytest

from fuse_jax.fusion.intra_stage import native
from fuse_jax.fusion.intra_stage.baselines import fused_baselines
from fuse_jax.fusion.intra_stage.flight import StepError
from fuse_jax.fusion.intra_stage.stages import split_params
from fuse_jax.fusion.intra_stage.tables import Plan
from fuse_jax.fusion.intra_stage.walk import Code, in_order

HP = toy.hyper_parameters((2, 2))
PARAMS = toy.parameters(HP)


BATCH = toy.minibatch(3)


@pytest.fixture(scope="module")
def wanted():
    return toy.serial(PARAMS, BATCH, hp=HP)[0]


@pytest.fixture(scope="module")
def case():
    """The critic has two replicas of one stage. Compiled once: most of the time goes there."""
    if native.compiler() is None:
        return toy.Dispatched((2, 1), BATCH, HP)
    made = toy.Dispatched((2, 1), BATCH, HP, wrap=faulty_stages.wrap)
    made(PARAMS)
    made.dispatch.timeout_s = 0.8
    return made


def test_two_schedules_give_the_same_bits_close_to_the_serial_path(case, wanted):
    fused, serial = (case(PARAMS, schedule) for schedule in ("fused", "serial"))
    assert toy.bits(fused) == toy.bits(serial)
    assert toy.error(fused[0], wanted) < 1e-6


def test_the_host_hands_over_what_a_task_reads_and_sends_several_results_at_once(monkeypatch):
    """It is the host's time that grows with arguments and calls; no task is compiled here."""
    case = toy.Dispatched((4, 4), toy.minibatch(4), toy.hyper_parameters((4, 4)))
    params, taken, sent = toy.parameters(case.hp), {}, []

    def program(code, device, sums):
        def task(*arguments):
            of_kind = taken.setdefault(code, set())
            of_kind.add(len(jax.tree.leaves(arguments)))
            return arguments[0], arguments[1], arguments[1]

        return task

    def put(x, where):
        if isinstance(x, list):
            sent.append(len(x))
        return real_put(x, where)

    real_put = jax.device_put
    monkeypatch.setattr(case.dispatch, "program", program)
    monkeypatch.setattr(jax, "device_put", put)
    sums, flight = case.start(params, "fused", case.batch)
    flight.wait()
    for model in toy.MODELS:
        blocks = len(jax.tree.leaves(params[model]["blocks"]))
        # Its turn and x; its turn, x, dy and the gradients.
        assert taken[Code(model, "F", False, False)] == {blocks + 2}
        assert taken[Code(model, "B", False, False)] == {2 * blocks + 3}
    messages = 2 * 2 * 3 * 4  # models, kinds, hops, micro-batches
    assert sum(sent) == messages
    assert len(sent) <= messages / 2
    # What no task has touched comes back as well.
    assert jax.tree.structure(sums["actor"].grads.ends) == jax.tree.structure(
        split_params(params["actor"]).ends
    )


@pytest.mark.slow  # some 30 s of compilation each
@pytest.mark.parametrize(("split", "data"), [(True, 1), (False, 2)])
def test_a_split_backward_and_rows_cut_over_data(split, data):
    batch = toy.minibatch(3, data=data)
    case = toy.Dispatched((2, 2), batch, HP, split=split, data=data)
    fused, serial = (case(PARAMS, schedule) for schedule in ("fused", "serial"))
    assert toy.bits(fused) == toy.bits(serial)
    assert toy.error(fused[0], toy.serial(PARAMS, batch, hp=HP)[0]) < 1e-6


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("kl", "reason"), [(faulty_stages.FAIL, "injected fault"), (faulty_stages.HANG, "no end")]
)
def test_a_step_that_fails_names_its_task_and_the_next_one_works(case, wanted, kl, reason):
    with pytest.raises(StepError, match=reason) as caught:
        _, flight = case.start(PARAMS, "fused", BATCH._replace(kl_coef=np.float32(kl)))
        flight.wait()
    # The actor runs up: its last stage is device 1's, its first backward fails.
    assert caught.value.device == 1
    assert str(caught.value.task) == "actor[0] B0 on device 1"
    assert toy.error(case(PARAMS)[0], wanted) < 1e-6


@pytest.mark.parametrize("stages", [(4, 4), (4, 2), (1, 2)])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("forward", [5.0, 0.0])  # tasks of no time start all at once
def test_dispatch_keeps_every_order_and_comes_after_what_it_needs(stages, split, forward):
    problem = toy.problem(stages, toy.minibatch(5), split=split)
    down = dataclasses.replace(problem.critic, forward=forward)
    problem = dataclasses.replace(problem, critic=down)
    dealt = {
        name: np.zeros((replicas, pipeline.micro_batches, 2), int)
        for name, pipeline, replicas in zip(toy.MODELS, problem.pipelines, problem.replicas)
    }
    for schedule in fused_baselines(problem):
        plan = Plan(schedule, dealt, ticked=False)
        place = {task: i for i, task in enumerate(in_order(schedule, plan))}
        assert len(place) == schedule.order.size
        for row in plan.orders:
            assert [place[task] for task in row] == sorted(place[task] for task in row)
        for task in place:
            before = int(schedule.graph.pred[task, 0])
            assert before < 0 or place[before] < place[task]
