"""Gradients of the whole loss against an unbatched oracle, under any cut, padding and precision."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import ppo_numpy as toy
import pytest

from fuse_jax.buckets import Bucket
from fuse_jax.config import ComputeConfig
from fuse_jax.training.gradients import accumulate, actor_loss, finish_metrics, serial_gradients
from fuse_jax.training.minibatch import BucketBatches, cut_minibatch

BUCKETS = (Bucket(10, 4), Bucket(24, 4))
KL = 0.3
run = jax.jit(serial_gradients, static_argnames=("hp", "train"))


def cut(experience, buckets=BUCKETS, order=None, **kwargs):
    order = np.arange(len(experience.valid)) if order is None else order
    return cut_minibatch(experience, order, buckets, kl_coef=KL, **kwargs)


def largest_difference(a, b):
    """The larger of both models' |a - b| / |b|, norms over all of a model's gradient."""
    differences = []
    for name in a:
        pairs = zip(jax.tree.leaves(a[name]), jax.tree.leaves(b[name]), strict=True)
        norms = [(np.linalg.norm(np.asarray(x) - y), np.linalg.norm(y)) for x, y in pairs]
        difference, size = np.linalg.norm(norms, axis=0)
        differences.append(difference / size)
    return max(differences)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_gradients_and_metrics_of_the_real_micro_batches_are_added_as_they_are():
    def loss(params, x):
        value = jnp.sum(params * x)
        return value, {"loss": value, "x_max": jnp.max(x)}

    # Two buckets of three micro-batches, of which two and one are real.
    first = np.array([[1, 20], [300, 4000], [7, 7]], np.float32)
    second = np.array([[-50000, 0.5], [9e9, 9e9], [7, 7]], np.float32)
    buckets = (BucketBatches(first, np.int32(2)), BucketBatches(second, np.int32(1)))
    grads, metrics = accumulate(loss, jnp.array([1.0, 2.0]), buckets)
    np.testing.assert_array_equal(grads, [301 - 50000, 4020.5])
    assert float(metrics["loss"]) == 301 - 50000 + 2 * 4020.5
    assert float(metrics["x_max"]) == 4000


def test_the_actors_loss_is_policy_less_entropy_and_plus_kl():
    hp, params = toy.hyper_parameters(), toy.toy_params()
    bucket = cut(toy.toy_experience(4), (Bucket(16, 4),)).buckets[0]
    micro_batch = jax.tree.map(lambda x: x[0], bucket.micro_batches)
    loss, metrics = jax.jit(partial(actor_loss, hp=hp))(
        params["actor"], micro_batch, kl_coef=jnp.float32(KL)
    )
    terms = {name: float(metrics[name]) for name in ("policy_loss", "entropy", "kl_loss")}
    assert all(abs(term) > 1e-3 for term in terms.values())
    wanted = terms["policy_loss"] - 0.05 * terms["entropy"] + KL * terms["kl_loss"]
    assert float(loss) == float(metrics["actor_loss"]) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_loss_and_gradient_of_the_unbatched_oracle(aggregation):
    hp, params = toy.hyper_parameters(), toy.toy_params()
    experience = toy.toy_experience(8, lengths=((1, 5), (4, 10)))
    experience.valid[1] = False
    experience.response_lengths[4] = 0
    experience.response_mask[4] = 0
    grads, metrics = run(params, cut(experience, aggregation=aggregation), hp=hp)
    (actor, critic), expected = toy.losses(params, experience, hp, aggregation, KL)
    assert float(metrics["actor_loss"]) == pytest.approx(float(actor), rel=1e-5)
    assert float(metrics["critic_loss"]) == pytest.approx(float(critic), rel=1e-5)
    assert largest_difference(grads, expected) < 1e-6
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))


@pytest.fixture(scope="module")
def whole():
    """Gradients and metrics of 8 samples in one micro-batch of one bucket."""
    hp, params = toy.hyper_parameters(), toy.toy_params()
    return params, run(params, cut(toy.toy_experience(8), (Bucket(16, 8),)), hp=hp)


@pytest.mark.parametrize(
    ("buckets", "shards"),
    [
        pytest.param((Bucket(8, 2), Bucket(16, 3)), 1, marks=pytest.mark.slow),
        pytest.param((Bucket(16, 1),), 1, marks=pytest.mark.slow),
        (BUCKETS, 1),
        (BUCKETS, 2),
    ],
)
def test_any_cut_bucket_set_and_order_gives_the_same_gradient(whole, buckets, shards):
    params, (expected, expected_metrics) = whole
    hp = toy.hyper_parameters()
    orders = [None, np.random.default_rng(0).permutation(8)]
    for order in orders:
        grads, metrics = run(
            params, cut(toy.toy_experience(8), buckets, order, shards=shards), hp=hp
        )
        assert largest_difference(grads, expected) < 1e-6
        for name, value in metrics.items():
            assert float(value) == pytest.approx(
                float(expected_metrics[name]), rel=3e-6, abs=1e-7
            ), name


def test_what_lies_beneath_the_mask_changes_no_bit():
    hp, params, experience = toy.hyper_parameters(), toy.toy_params(), toy.toy_experience(8)
    experience.valid[3] = False
    expected = run(params, cut(experience), hp=hp)
    beneath = (experience.response_mask == 0) | ~experience.valid[:, None]
    for value, token in ((np.nan, 36), (np.inf, 0)):
        names = ("log_probs", "ref_log_probs", "values", "advantages", "returns")
        floats = {n: np.where(beneath, value, getattr(experience, n)) for n in names}
        lengths = experience.prompt_lengths + experience.response_lengths
        behind = np.arange(toy.LONGEST) >= lengths[:, None]
        dirty = experience._replace(
            tokens=np.where(behind, token, experience.tokens).astype(np.int32),
            **{n: x.astype(np.float32) for n, x in floats.items()},
        )
        assert bits(run(params, cut(dirty), hp=hp)) == bits(expected)


def test_what_lies_in_unused_rows_and_micro_batches_changes_no_bit():
    hp, params, minibatch = toy.hyper_parameters(), toy.toy_params(), cut(toy.toy_experience(8))
    expected = run(params, minibatch, hp=hp)
    assert any(b.count < len(b.micro_batches.tokens) for b in minibatch.buckets)
    second = minibatch.buckets[1]
    assert (second.micro_batches.weights[: second.count].sum(-1) == 0).any()

    def spoil(x, unused):
        if x.dtype == np.float32:
            return np.where(unused.reshape(unused.shape + (1,) * (x.ndim - 2)), np.nan, x)
        return x

    buckets = []
    for bucket in minibatch.buckets:
        arrays, unused = bucket.micro_batches, bucket.micro_batches.weights.sum(-1) == 0
        spoiled = jax.tree.map(partial(spoil, unused=unused), arrays)
        beyond = np.arange(len(unused)) >= bucket.count
        weights = np.where(beyond[:, None, None], np.nan, arrays.weights).astype(np.float32)
        buckets.append(bucket._replace(micro_batches=spoiled._replace(weights=weights)))
    dirty = minibatch._replace(buckets=tuple(buckets))
    assert bits(run(params, dirty, hp=hp)) == bits(expected)


def test_a_minibatch_without_weight_gives_zero_gradients():
    experience = toy.toy_experience(8)
    experience.valid[:] = False
    grads, metrics = run(toy.toy_params(), cut(experience), hp=toy.hyper_parameters())
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(grads))
    assert all(float(value) == 0 for value in metrics.values())


def test_remat_and_chunked_log_probs_give_the_same_gradient(whole):
    params, (expected, _) = whole
    minibatch = cut(toy.toy_experience(8), (Bucket(16, 8),))
    for compute in (ComputeConfig(remat="full", log_prob_chunk=5), ComputeConfig(remat="dots")):
        hp = toy.hyper_parameters(compute=compute)
        grads, _ = run({"actor": params["actor"]}, minibatch, hp=hp, train=("actor",))
        assert largest_difference(grads, expected) < 1e-6


def test_bfloat16_stays_close_and_accumulates_in_float32(whole):
    params, (expected, expected_metrics) = whole
    hp = toy.hyper_parameters(compute=ComputeConfig(dtype="bfloat16"))
    minibatch = cut(toy.toy_experience(8), (Bucket(16, 4),))
    grads, metrics = run({"actor": params["actor"]}, minibatch, hp=hp, train=("actor",))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
    assert 1e-5 < largest_difference(grads, expected) < 0.1
    assert float(metrics["actor_loss"]) == pytest.approx(
        float(expected_metrics["actor_loss"]), rel=0.05
    )


def test_a_model_that_does_not_train_costs_nothing_and_changes_nothing(whole):
    params, (expected, _) = whole
    hp, minibatch = toy.hyper_parameters(), cut(toy.toy_experience(8), (Bucket(16, 8),))
    grads, metrics = run({"critic": params["critic"]}, minibatch, hp=hp, train=("critic",))
    assert set(grads) == {"critic"} and "policy_loss" not in metrics
    assert bits(grads["critic"]) == bits(expected["critic"])


def test_the_actor_does_not_read_the_critics_numbers():
    hp, params, experience = toy.hyper_parameters(), toy.toy_params(), toy.toy_experience(8)
    expected, _ = run(params, cut(experience), hp=hp)
    other = experience._replace(values=experience.values + 1, returns=experience.returns - 1)
    grads, _ = run(params, cut(other), hp=hp)
    assert bits(grads["actor"]) == bits(expected["actor"])
    assert bits(grads["critic"]) != bits(expected["critic"])


def test_explained_variance_from_the_sums():
    """Returns 1 and 3 against the values 1 and 2: variance 1, mean squared error 0.5."""
    sums = {"return_sq": 5.0, "return_mean": 2.0, "value_error_sq": 0.5, "critic_loss": 0.25}
    found = finish_metrics({name: jnp.float32(value) for name, value in sums.items()})
    assert found.keys() == sums.keys() - {"return_sq", "return_mean"} | {
        "critic_explained_variance"
    }
    assert float(found["critic_explained_variance"]) == 0.5
    equal = finish_metrics({**found, "return_sq": 4.0, "return_mean": 2.0})
    assert float(equal["critic_explained_variance"]) == 0.0


def test_explained_variance():
    hp, params, experience = toy.hyper_parameters(), toy.toy_params(), toy.toy_experience(8)
    params["critic"]["head"] = jax.tree.map(jnp.zeros_like, params["critic"]["head"])
    _, metrics = run(params, cut(experience), hp=hp)
    returns = experience.returns[experience.response_mask > 0]
    expected = 1 - np.mean(returns**2) / np.var(returns)
    assert float(metrics["critic_explained_variance"]) == pytest.approx(expected, rel=1e-4)


def test_hyper_parameters_are_static():
    hp = toy.hyper_parameters()
    assert hash(hp) == hash(dataclasses.replace(hp)) and hp == dataclasses.replace(hp)
