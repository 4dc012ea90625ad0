"""The compiled pipeline against the serial gradients, which define the numbers."""

import dataclasses

import jax
import numpy as np
import pipeline_toy as toy
import pytest
from program_text import COLLECTIVE, MATRIX_PRODUCT, by_depth

from fuse_jax.fusion.intra_stage import mailbox
from fuse_jax.fusion.intra_stage.baselines import concatenated_1f1b
from fuse_jax.fusion.intra_stage.executor import spread
from fuse_jax.fusion.intra_stage.tensor import shard_architecture, tensor_axis

TOLERANCE = 1e-6  # of the largest gradient of a model
BEST = "mailbox" if mailbox.available() else "pair"


def check(case, params, schedule="fused", batch=None, cut_otherwise=None):
    """Gradients and metrics of a case are the serial ones; returns their bits.

    cut_otherwise: the same samples for the serial path, in one bucket to compile less.
    """
    batch = case.batch if batch is None else batch
    reference = batch if cut_otherwise is None else cut_otherwise
    expected, expected_metrics = toy.serial(params, reference, hp=case.hp, train=case.train)
    grads, metrics = case(params, schedule, batch)
    assert toy.error(grads, expected) < TOLERANCE
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        wanted = pytest.approx(float(value), rel=1e-5, abs=1e-6)
        assert float(metrics[name]) == wanted, name
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(grads))
    return toy.bits((grads, metrics))


def test_any_schedule_and_count_through_one_executable():
    """Two shapes, two replicas of the critic of which one has an empty micro-batch, tied."""
    hp = toy.hyper_parameters((4, 2), tied=True)
    params = toy.parameters(hp)
    case = toy.Case((4, 2), toy.minibatch(8, toy.TWO), hp, transport=BEST)
    assert [int(bucket.count) for bucket in case.batch.buckets] == [6, 3]
    fused = check(case, params, cut_otherwise=toy.minibatch(8, toy.ONE))
    assert toy.bits(case(params, "serial")) == fused
    fewer = toy.minibatch(2, toy.TWO, room=8, seed=3)
    schedule = concatenated_1f1b(toy.problem((4, 2), fewer))
    check(case, params, schedule, fewer, toy.minibatch(2, toy.ONE, room=8, seed=3))
    assert case.function._cache_size() == 1


@pytest.fixture(scope="module")
def three_axes():
    """The actor alone over (pipe, data, tensor) = (2, 2, 2), exchanging in ticks."""
    hp = toy.hyper_parameters((2, 2), kv_heads=2)
    sizes = {"transport": "ring", "data": 2, "tensor": 2, "train": ("actor",)}
    return toy.Case((2, 2), toy.minibatch(4, data=2), hp, **sizes)


def test_data_and_tensor_inside_a_stage_of_one_model(three_axes):
    check(three_axes, toy.parameters(three_axes.hp), "serial")


@pytest.fixture(scope="module")
def program(three_axes):
    """Its text."""
    shapes = jax.eval_shape(lambda: toy.parameters(three_axes.hp))
    return three_axes.function.lower(shapes, three_axes.planned("serial")).compile().as_text()


def test_nothing_in_a_task_waits_for_devices_in_other_tasks(program):
    found = by_depth(program, COLLECTIVE)
    # One permute each way a step, and none deeper: a task that entered one alone would hang.
    assert found["collective-permute", 1] == 2
    assert not any(name == "collective-permute" and depth > 1 for name, depth in found)
    assert found["all-reduce", 2] > 0  # tensor's sums, inside tasks
    inside = {name for name, depth in found if depth > 1}
    assert inside == {"all-reduce"}


def test_a_device_computes_nothing_that_is_not_its_own(program, three_axes):
    """XLA moves what no turn changes out of loops, of those too that have no turn."""
    found = by_depth(program, MATRIX_PRODUCT)
    assert min(depth for _, depth in found) == 2  # steps, tasks
    words = str(three_axes.hp.actor.vocab_size)
    of_head = {depth for sizes, depth in found if words in sizes.split(",")}
    assert of_head == {3}  # and the last stage


def test_the_programs_size_does_not_depend_on_micro_batches_or_devices():
    lines = {}
    for devices, count in ((2, 4), (2, 16), (4, 4)):
        hp = toy.hyper_parameters((devices, devices))
        case = toy.Case((devices, devices), toy.minibatch(count), hp, transport="pair")
        shapes = jax.eval_shape(lambda hp=hp: toy.parameters(hp))
        lines[devices, count] = case.function.lower(shapes, case.planned()).as_text().count("\n")
    assert lines[2, 16] == lines[2, 4]
    assert abs(lines[4, 4] - lines[2, 4]) < 0.05 * lines[2, 4]


def test_what_a_pipeline_cannot_do_is_refused_by_name():
    hp = toy.hyper_parameters((4, 2))
    case = toy.Case((4, 2), toy.minibatch(4), hp, transport="pair", train=("critic",))
    assert case.layout.models == ("critic",)
    params = jax.eval_shape(lambda: toy.parameters(hp))
    with pytest.raises(ValueError, match=r"compiled for \('critic',\)"):
        case.pipeline(params, case.planned("serial"), hp=hp)
    uneven = jax.tree.map(lambda x: np.zeros((3, *x.shape[1:])), params["critic"])
    with pytest.raises(ValueError, match=r"2 stages do not divide model\.num_layers=3"):
        spread(uneven["blocks"], dict(case.layout.pipelines)["critic"])
    with pytest.raises(ValueError, match=r"2 tensor shards do not divide model\.num_kv_heads=1"):
        shard_architecture(hp.actor, 2)
    with pytest.raises(KeyError, match="no sharding rule for blocks/router"):
        tensor_axis("router/kernel")


@pytest.mark.slow
def test_both_models_over_three_axes():
    hp = toy.hyper_parameters((2, 2), kv_heads=2)
    for transport in ("pair", BEST):
        batch = toy.minibatch(4, toy.TWO, data=2)
        case = toy.Case((2, 2), batch, hp, transport=transport, data=2, tensor=2)
        assert check(case, toy.parameters(hp)) == check(case, toy.parameters(hp), "serial")


@pytest.mark.slow
def test_the_critic_alone_is_a_serial_pipeline():
    hp = toy.hyper_parameters((4, 2))
    case = toy.Case((4, 2), toy.minibatch(5, toy.TWO), hp, transport=BEST, train=("critic",))
    check(case, toy.parameters(hp), "serial")


@pytest.mark.slow
def test_bfloat16_and_rematerialisation():
    compute = dataclasses.replace(toy.hyper_parameters((4, 4)).compute, remat="dots")
    hp = toy.hyper_parameters((4, 4), compute=compute)
    check(toy.Case((4, 4), toy.minibatch(4), hp, transport=BEST), toy.parameters(hp))
    low = dataclasses.replace(hp, compute=dataclasses.replace(compute, dtype="bfloat16"))
    params = toy.parameters(hp)
    case = toy.Case((4, 4), toy.minibatch(4), low, transport=BEST)
    expected, _ = toy.serial(params, case.batch, hp=low)
    assert toy.error(case(params)[0], expected) < 0.05
