"""Stages by hand, one after the other, give the whole model's gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pipeline_toy as toy
import pytest
from program_text import MATRIX_PRODUCT, by_depth

from fuse_jax.fusion.intra_stage.control import choose, when
from fuse_jax.fusion.intra_stage.stages import Weights, join_params, make_stages, split_params
from fuse_jax.training.gradients import actor_head_loss, actor_loss


def by_stages(stages, params, batch, kl_coef, count, traced, split):
    """Gradient and metrics from `count` stages; what a stage must not read is NaN."""
    blocks, ends = split_params(params)
    flags = [{"first": s == 0, "last": s == count - 1} for s in range(count)]
    if traced:
        flags = jax.lax.optimization_barrier(jax.tree.map(jnp.asarray, flags))
    weights = [
        Weights(jax.tree.map(lambda x, s=s: x[s : s + 1], blocks), ends) for s in range(count)
    ]
    nothing = jnp.full((*batch.tokens.shape, stages.hidden_size), jnp.nan)
    inputs = [nothing]
    for own, flag in zip(weights, flags):
        inputs.append(stages.forward(own, inputs[-1], batch, **flag))
    sums, dy = [stages.zero_sums(own, batch, kl_coef) for own in weights], nothing
    for s in reversed(range(count)):
        of = (weights[s], inputs[s], dy, batch, kl_coef)
        if split:
            sums[s] = stages.backward_weights(*of, sums[s], **flags[s])
            dy = stages.backward_input(*of, **flags[s])
        else:
            sums[s], dy = stages.backward(*of, sums[s], **flags[s])
    grads = [s.grads for s in sums]
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *[g.blocks for g in grads])
    added = jax.tree.map(lambda *x: sum(x), *[g.ends for g in grads])
    metrics = jax.tree.map(lambda *x: sum(x), *[s.metrics for s in sums])
    return join_params(Weights(joined, added)), metrics


@pytest.mark.parametrize(
    ("traced", "split"), [(True, True), pytest.param(False, False, marks=pytest.mark.slow)]
)
def test_stages_give_the_whole_models_gradient(traced, split):
    hp = toy.hyper_parameters((2, 1), tied=True)
    params = toy.parameters(hp)["actor"]
    batch = jax.tree.map(lambda x: jnp.asarray(x[0]), toy.minibatch(1).buckets[0].micro_batches)
    kl_coef = jnp.float32(toy.KL)
    whole = jax.jit(jax.grad(partial(actor_loss, hp=hp, kl_coef=kl_coef), has_aux=True))
    expected, expected_metrics = whole(params, batch)
    stages = make_stages(hp.actor, partial(actor_head_loss, hp=hp))
    run = jax.jit(partial(by_stages, stages, count=2, traced=traced, split=split))
    grads, metrics = run(params, batch, kl_coef)
    assert toy.error({"actor": grads}, {"actor": expected}) < 3e-7
    for name, value in expected_metrics.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-6), name


def test_choose_and_when_are_decided_now_or_by_the_device():
    def double(x):
        return (2 * x,)

    for flag in (True, False):
        wanted = 6 if flag else 3
        assert when(flag, double, 3) == (wanted,)
        assert jax.jit(lambda f: when(f, double, 3))(np.bool_(flag))[0] == wanted
        assert choose(flag, lambda x: 2 * x, lambda x: x, 3) == wanted
        assert (
            jax.jit(lambda f: choose(f, lambda x: 2 * x, lambda x: x, 3))(np.bool_(flag)) == wanted
        )


def test_what_is_only_read_is_not_computed_before_it_is_known_to_be_wanted():
    """XLA moves what is the same in every turn out of a loop, of one that has no turn too."""

    def add_product(total, x):
        return (total + jnp.sum(x @ x),)

    run = jax.jit(lambda flag, x: when(flag, add_product, jnp.float32(0), given=(x,)))
    text = run.lower(np.bool_(True), np.ones((8, 8), np.float32)).compile().as_text()
    assert {depth for _, depth in by_depth(text, MATRIX_PRODUCT)} == {1}
