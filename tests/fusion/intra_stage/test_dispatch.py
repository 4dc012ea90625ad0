"""Tasks dispatched by the host: the compiled pipeline's numbers, and steps that end badly."""

import dataclasses
from functools import partial

import faulty_stages
import jax
import numpy as np
import pipeline_toy as toy
import pytest

from fuse_jax.fusion.intra_stage import native
from fuse_jax.fusion.intra_stage.baselines import fused_baselines
from fuse_jax.fusion.intra_stage.dispatch import Dispatch, in_order
from fuse_jax.fusion.intra_stage.executor import collect, pipeline_mesh
from fuse_jax.fusion.intra_stage.flight import StepError
from fuse_jax.fusion.intra_stage.layout import deal_micro_batches, trained_pipelines
from fuse_jax.fusion.intra_stage.stages import join_params, split_params
from fuse_jax.fusion.intra_stage.tables import Plan
from fuse_jax.training.pipeline_gradients import model_stages
from fuse_jax.training.pipeline_step import place_rows

HP = toy.hyper_parameters((2, 2))
PARAMS = toy.parameters(HP)


class Case:
    """A dispatched pipeline of a toy mini-batch."""

    def __init__(self, stages, *, split=False, wrap=None, data=1, timeout_s=60.0):
        self.batch = toy.minibatch(3, data=data)
        self.problem = toy.problem(stages, self.batch, split=split)
        pipelines = trained_pipelines(self.problem)
        functions = model_stages(HP)
        if wrap is not None:
            functions = {name: wrap(name, one) for name, one in functions.items()}
        self.mesh = pipeline_mesh(self.problem.devices, data)
        self.dispatch = Dispatch(pipelines, self.mesh, functions, timeout_s)
        self.dealt = {n: deal_micro_batches([3], p.replicas) for n, p in pipelines}
        self.collect = {n: jax.jit(partial(collect, pipeline=p)) for n, p in pipelines}
        self.schedules = [toy.chimera_like(self.problem), toy.concatenated_1f1b(self.problem)]

    def start(self, schedule, kl=toy.KL):
        batch = place_rows(self.batch._replace(kl_coef=np.float32(kl)), self.mesh)
        weights = {name: split_params(PARAMS[name]) for name in PARAMS}
        micro_batches = [bucket.micro_batches for bucket in batch.buckets]
        walk = self.dispatch.prepare(schedule, self.dealt)
        return self.dispatch.run(walk, weights, micro_batches, batch.kl_coef)

    def __call__(self, schedule):
        sums, flight = self.start(schedule)
        flight.wait()
        return {n: join_params(self.collect[n](part).grads) for n, part in sums.items()}


@pytest.fixture(scope="module")
def wanted():
    return toy.serial(PARAMS, toy.minibatch(3), hp=HP)[0]


@pytest.fixture(scope="module")
def case():
    """The critic has two replicas of one stage. Compiled once: most of the time goes there."""
    if native.compiler() is None:
        return Case((2, 1))
    made = Case((2, 1), wrap=faulty_stages.wrap)
    made(made.schedules[0])
    made.dispatch.timeout_s = 0.8
    return made


def test_two_schedules_give_the_same_bits_close_to_the_serial_path(case, wanted):
    fused, serial = (case(schedule) for schedule in case.schedules)
    assert toy.bits(fused) == toy.bits(serial)
    assert toy.error(fused, wanted) < 1e-6


@pytest.mark.slow  # some 30 s of compilation each
@pytest.mark.parametrize(("split", "data"), [(True, 1), (False, 2)])
def test_a_split_backward_and_rows_cut_over_data(split, data):
    case = Case((2, 2), split=split, data=data)
    fused, serial = (case(schedule) for schedule in case.schedules)
    assert toy.bits(fused) == toy.bits(serial)
    assert toy.error(fused, toy.serial(PARAMS, case.batch, hp=HP)[0]) < 1e-6


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("kl", "reason"), [(faulty_stages.FAIL, "injected fault"), (faulty_stages.HANG, "no end")]
)
def test_a_step_that_fails_names_its_task_and_the_next_one_works(case, wanted, kl, reason):
    fused = case.schedules[0]
    with pytest.raises(StepError, match=reason) as caught:
        _, flight = case.start(fused, kl)
        flight.wait()
    # The actor runs up: its last stage is device 1's, its first backward fails.
    assert caught.value.device == 1
    assert str(caught.value.task) == "actor[0] B0 on device 1"
    assert toy.error(case(fused), wanted) < 1e-6


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
