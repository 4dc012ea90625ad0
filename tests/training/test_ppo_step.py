"""The whole update: meshes, one executable, lr = 0, skips, and nothing that is aliased."""

import drawn
import jax
import numpy as np
import ppo_numpy as toy
import pytest
from program_text import compile_for_its_text

from fuse_jax.buckets import Bucket
from fuse_jax.config import ComputeConfig, MeshConfig, PPOConfig
from fuse_jax.models.architecture import Architecture
from fuse_jax.placement.mesh import make_mesh, row_shards, single_device_mesh
from fuse_jax.training.gradients import HyperParameters
from fuse_jax.training.minibatch import Experience, cut_minibatch
from fuse_jax.training.ppo_step import create_ppo_state, make_step

BUCKETS = (Bucket(16, 8),)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def cut(experience, mesh, buckets=BUCKETS):
    order = np.arange(len(experience.valid))
    return cut_minibatch(experience, order, buckets, shards=row_shards(mesh), kl_coef=0.3)


def on_policy(params, hp, experience):
    """`experience` with the log-probs its own actor gives, one unpadded sample at a time."""
    log_probs = experience.log_probs.copy()
    for i, (p, r) in enumerate(zip(experience.prompt_lengths, experience.response_lengths)):
        log_probs[i, :r] = toy.log_probs_and_entropy(
            params["actor"],
            experience.tokens[i],
            int(p),
            int(r),
            temperature=hp.temperature,
            valid_vocab=hp.valid_vocab,
        )[0]
    return experience._replace(log_probs=log_probs)


@pytest.fixture(scope="module")
def compiled():
    """One step with a learning rate, compiled once for all tests on one device."""
    hp, mesh = toy.hyper_parameters(), single_device_mesh()
    return hp, mesh, make_step(mesh, hp)


def test_a_learning_rate_of_zero_changes_no_bit_and_every_ratio_is_one():
    hp, mesh = toy.hyper_parameters(lr=0.0), single_device_mesh()
    params = toy.toy_params()
    experience = on_policy(params, hp, toy.toy_experience(8, lengths=((1, 3), (4, 12))))
    before = bits(params)
    state, step = create_ppo_state(params, hp, mesh), make_step(mesh, hp)
    for _ in range(2):
        state, metrics = step(state, cut(experience, mesh))
        assert float(metrics["log_ratio_abs_max"]) < 1e-5
        assert float(metrics["ratio_max"]) == pytest.approx(1, abs=1e-5)
        assert float(metrics["clip_fraction"]) == 0
        assert float(metrics["actor_grad_norm"]) > 0
    assert bits(state.params) == before
    assert {int(n) for n in state.updates.values()} == {2}


def test_one_executable_serves_every_minibatch(compiled):
    hp, mesh, step = compiled
    state = create_ppo_state(toy.toy_params(), hp, mesh)
    mixes = [((1, 3), (3, 12)), ((1, 1),), ((4, 12),), ((2, 6), (4, 2))]
    minibatches = [cut(toy.toy_experience(8, lengths=mix), mesh) for mix in mixes]
    state, _ = step(state, minibatches[0])
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compilations.append(event) if "backend_compile" in event else None
    )
    for minibatch in minibatches:
        state, metrics = step(state, minibatch)
    jax.block_until_ready(metrics)
    assert not compilations
    jax.jit(lambda x: x * 2.5)(np.float32(1))  # the listener does hear of one
    assert compilations


def test_training_goes_down_its_loss_and_counts_its_updates(compiled):
    hp, mesh, step = compiled
    params = toy.toy_params()
    experience = on_policy(params, hp, toy.toy_experience(8, lengths=((1, 3), (4, 12))))
    state, losses = create_ppo_state(params, hp, mesh), []
    for _ in range(8):
        state, metrics = step(state, cut(experience, mesh))
        losses.append((float(metrics["actor_loss"]), float(metrics["critic_loss"])))
    assert losses[-1][0] < losses[0][0] and losses[-1][1] < losses[0][1]
    assert {n: int(c) for n, c in state.updates.items()} == {"actor": 8, "critic": 8}
    assert {n: int(c) for n, c in state.skipped.items()} == {"actor": 0, "critic": 0}
    assert float(metrics["actor_learning_rate"]) == pytest.approx(1e-3)


def test_nan_returns_skip_the_critic_alone(compiled):
    hp, mesh, step = compiled
    experience = toy.toy_experience(8)
    experience.returns[3, 0] = np.nan
    state = create_ppo_state(toy.toy_params(), hp, mesh)
    before = {n: bits((state.params[n], state.opt_state[n])) for n in state.params}
    state, metrics = step(state, cut(experience, mesh))
    after = {n: bits((state.params[n], state.opt_state[n])) for n in state.params}
    assert after["critic"] == before["critic"] and after["actor"] != before["actor"]
    assert float(metrics["critic_skipped"]) == 1 and int(state.skipped["critic"]) == 1
    assert int(state.updates["critic"]) == 0 and int(state.updates["actor"]) == 1


def test_the_critic_alone_leaves_every_bit_of_the_actor(compiled):
    hp, mesh, both = compiled
    minibatch = cut(toy.toy_experience(8), mesh)
    alone = make_step(mesh, hp, train=("critic",))
    state = create_ppo_state(toy.toy_params(), hp, mesh)
    before = bits((state.params["actor"], state.opt_state["actor"]))
    state, metrics = alone(state, minibatch)
    assert bits((state.params["actor"], state.opt_state["actor"])) == before
    assert int(state.updates["actor"]) == 0
    assert "policy_loss" not in metrics and "actor_grad_norm" not in metrics
    other, _ = both(create_ppo_state(toy.toy_params(), hp, mesh), minibatch)
    assert bits(other.params["critic"]) == bits(state.params["critic"])


def test_the_reference_outlives_the_actors_updates(compiled):
    hp, mesh, step = compiled
    params = toy.toy_params()
    reference, before = params["actor"], bits(params["actor"])
    state = create_ppo_state(params, hp, mesh)
    for _ in range(2):
        old, (state, _) = state, step(state, cut(toy.toy_experience(8), mesh))
    assert bits(reference) == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))  # donated


@pytest.mark.parametrize("sizes", [pytest.param((8, 1, 1), marks=pytest.mark.slow), (2, 2, 2)])
def test_meshes_give_the_gradients_of_one_device(compiled, sizes):
    hp, single, step = compiled
    experience = toy.toy_experience(8)
    mesh = make_mesh(MeshConfig(*sizes))
    results = []
    for on, run in ((single, step), (mesh, make_step(mesh, hp))):
        state = create_ppo_state(toy.toy_params(), hp, on)
        state, metrics = run(state, cut(experience, on))
        # After one update the first moment is 0.1 x the clipped gradient.
        moments = {n: state.opt_state[n][0].mu for n in ("actor", "critic")}
        results.append(
            jax.tree.map(np.asarray, (moments, state.params, metrics)),
        )
    (expected, params, values), (got, got_params, got_values) = results
    for name, value in values.items():
        assert got_values[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name in expected:
        top = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[name]))
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(expected[name])):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * top)
    for a, b in zip(jax.tree.leaves(got_params), jax.tree.leaves(params)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    kernel = state.params["actor"]["blocks"]["up"]["kernel"]
    assert kernel.sharding.is_fully_replicated == (sizes == (8, 1, 1))


def test_fsdp_leaves_each_device_its_own_rows(monkeypatch):
    """Cut embeddings must not make XLA repeat every row's attention on every device."""
    arch = Architecture(
        vocab_size=64, hidden_size=64, intermediate_size=72, num_heads=8, num_kv_heads=8, head_dim=8
    )
    mesh = make_mesh(MeshConfig(1, 8, 1))
    hp = HyperParameters(arch, arch, PPOConfig(), ComputeConfig())
    params = {
        "actor": drawn.parameters(arch, 0),
        "critic": drawn.parameters(arch, 1, "scalar"),
    }
    rows, length, response = 8, 24, 12
    zeros = np.zeros((rows, response), np.float32)
    experience = Experience(
        tokens=np.ones((rows, length), np.int32),
        prompt_lengths=np.full(rows, 8, np.int32),
        response_lengths=np.full(rows, response, np.int32),
        response_mask=zeros + 1,
        log_probs=zeros,
        ref_log_probs=zeros,
        values=zeros,
        advantages=zeros + 1,
        returns=zeros,
        valid=np.ones(rows, bool),
    )
    minibatch = cut_minibatch(experience, np.arange(rows), (Bucket(length, rows),), shards=8)
    step = make_step(mesh, hp)
    compile_for_its_text(monkeypatch)
    step.precompile(create_ppo_state(params, hp, mesh), minibatch)
    program = step.text()
    assert f"f32[1,8,{length},{length}]" in program
    assert f"f32[{rows},8,{length},{length}]" not in program
