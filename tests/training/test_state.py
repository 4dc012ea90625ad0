"""The optimiser step: clip per model, skip of non-finite gradients, no shared buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ppo_numpy as toy
import pytest

from fuse_jax.config import OptimizerConfig
from fuse_jax.placement.mesh import single_device_mesh
from fuse_jax.training.optimizers import Optimizer, make_optimizer
from fuse_jax.training.ppo_step import create_ppo_state
from fuse_jax.training.state import TrainState, apply_gradients


def state_of(params, optimizers):
    zero = {name: jnp.zeros((), jnp.int32) for name in params}
    opt_state = {name: optimizers[name].transform.init(p) for name, p in params.items()}
    return TrainState(params, opt_state, zero, dict(zero))


def sgd(rate=1.0, max_norm=0.0):
    return Optimizer(optax.sgd(rate), lambda count: jnp.float32(rate), max_norm)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_each_model_is_clipped_by_its_own_norm():
    params = {
        "actor": {"a": jnp.zeros(2), "b": jnp.zeros(1)},
        "critic": {"a": jnp.zeros(2)},
    }
    grads = {
        "actor": {"a": jnp.array([2.0, 4.0]), "b": jnp.array([4.0])},
        "critic": {"a": jnp.array([0.6, 0.8])},
    }
    optimizers = {"actor": sgd(max_norm=3.0), "critic": sgd(max_norm=3.0)}
    state, metrics = apply_gradients(state_of(params, optimizers), grads, optimizers)
    assert float(metrics["actor_grad_norm"]) == pytest.approx(6.0)  # before the clip
    assert float(metrics["critic_grad_norm"]) == pytest.approx(1.0)
    np.testing.assert_allclose(state.params["actor"]["a"], [-1.0, -2.0], rtol=1e-6)
    np.testing.assert_allclose(state.params["actor"]["b"], [-2.0], rtol=1e-6)
    np.testing.assert_allclose(state.params["critic"]["a"], [-0.6, -0.8], rtol=1e-6)
    free = {"actor": sgd(), "critic": sgd()}
    state, _ = apply_gradients(state_of(params, free), grads, free)
    np.testing.assert_array_equal(state.params["actor"]["a"], [-2.0, -4.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_leaves_its_model_alone_and_is_counted(bad):
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.1), 10)
    optimizers = {"actor": optimizer, "critic": optimizer}
    params = {n: {"kernel": jnp.arange(4.0)} for n in optimizers}
    good = {"kernel": jnp.ones(4)}
    state, _ = apply_gradients(
        state_of(params, optimizers), {"actor": good, "critic": good}, optimizers
    )
    broken = {"kernel": jnp.array([1.0, bad, 0.0, 0.0])}
    after, metrics = jax.jit(lambda s, g: apply_gradients(s, g, optimizers))(
        state, {"actor": good, "critic": broken}
    )
    assert bits(after.params["critic"]) == bits(state.params["critic"])
    assert bits(after.opt_state["critic"]) == bits(state.opt_state["critic"])
    assert bits(after.params["actor"]) != bits(state.params["actor"])
    assert {n: int(c) for n, c in after.skipped.items()} == {"actor": 0, "critic": 1}
    assert {n: int(c) for n, c in after.updates.items()} == {"actor": 2, "critic": 1}
    assert float(metrics["critic_skipped"]) == 1 and float(metrics["actor_skipped"]) == 0


def test_a_model_without_gradient_keeps_every_bit():
    optimizers = {"actor": sgd(), "critic": sgd()}
    state = state_of({n: {"kernel": jnp.arange(4.0)} for n in optimizers}, optimizers)
    after, metrics = apply_gradients(state, {"critic": {"kernel": jnp.ones(4)}}, optimizers)
    assert bits(after.params["actor"]) == bits(state.params["actor"])
    assert int(after.updates["actor"]) == 0 and int(after.updates["critic"]) == 1
    assert not any(name.startswith("actor") for name in metrics)


def test_a_learning_rate_of_zero_changes_no_bit_not_even_of_minus_zero():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.0, weight_decay=0.5), 10)
    params = {"actor": {"kernel": jnp.array([1.5, -0.0, 0.0, -2.0])}}
    grads = {"actor": {"kernel": jnp.array([1.0, -1.0, 1.0, 0.0])}}
    state = state_of(params, {"actor": optimizer})
    after, _ = apply_gradients(state, grads, {"actor": optimizer})
    assert bits(after.params) == bits(params)
    assert int(after.updates["actor"]) == 1


def test_the_state_shares_no_buffer_with_what_it_was_made_of():
    params = toy.toy_params()
    before = bits(params)
    state = create_ppo_state(params, toy.hyper_parameters(), single_device_mesh())
    ours = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)}
    theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    assert not ours & theirs
    jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)(state)
    assert bits(params) == before
