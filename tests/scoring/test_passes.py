"""The passes as arrays: alignment by hand, and memory."""

import jax
import jax.numpy as jnp
import numpy as np

from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture
from fuse_jax.samples import SequenceBatch
from fuse_jax.scoring import passes


def identity_model(vocab: int = 5) -> tuple[Architecture, dict]:
    """Zero blocks: the hidden state at a position is its token's one-hot, normed."""
    arch = Architecture(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
    )
    shapes = jax.eval_shape(lambda: transformer.init(arch, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    params["embed"]["embedding"] = jnp.eye(vocab)
    params["final_norm"]["scale"] = jnp.full((vocab,), vocab**-0.5)  # rms of a one-hot
    return arch, params


def test_alignment_by_hand():
    """Value = index of the token before: for prompt [2, 3] and response [1, 4] it is [3, 1]."""
    arch, params = identity_model()
    params["head"] = {"kernel": jnp.arange(5.0)[:, None], "bias": jnp.zeros(1)}
    batch = SequenceBatch(
        np.array([[2, 3, 1, 4, 0], [2, 0, 0, 0, 0]]), np.array([2, 1]), np.array([2, 0])
    )

    @jax.jit
    def run(params, batch):
        values = passes.value_pass(arch, params, batch, length=3)
        return *values, passes.reward_pass(arch, params, batch)

    values, last_values, scores = run(params, batch)
    np.testing.assert_allclose(values, [[3, 1, 0], [0, 0, 0]], rtol=1e-4)
    np.testing.assert_allclose(last_values, [4, 2], rtol=1e-4)
    np.testing.assert_allclose(scores, [4, 2], rtol=1e-4)


def test_log_probs_by_hand():
    """After token 3 the logits are [2, 0] over two valid ids; temperature 0.5 makes them [4, 0].

    The token beneath the mask is no valid id: its log-probability is -inf and must not leak.
    """
    arch, params = identity_model()
    uniform = {**params, "head": {"kernel": jnp.zeros((5, 5))}}
    params["head"] = {"kernel": jnp.zeros((5, 5)).at[3].set(jnp.array([2.0, 0, 9, 9, 9]))}
    batch = SequenceBatch(np.array([[1, 3, 0, 4, 4]]), np.array([2]), np.array([1]))

    @jax.jit
    def run(params, uniform, batch):
        shared = {"length": 2, "temperature": 0.5, "valid_vocab": 2}
        log_probs = passes.log_prob_pass(arch, params, batch, **shared)
        return log_probs, passes.full_kl_pass(arch, params, arch, uniform, batch, **shared)

    log_probs, divergence = run(params, uniform, batch)
    np.testing.assert_allclose(log_probs, [[-0.01815, 0]], atol=2e-5)
    p = 1 / (1 + np.exp(-4))
    wanted = np.log(2) + p * np.log(p) + (1 - p) * np.log(1 - p)
    np.testing.assert_allclose(divergence, [[wanted, 0]], rtol=1e-4)


def test_logits_of_a_chunk_only_are_kept():
    """Temporaries stay far below one [B, R, V] array of logits."""
    arch = Architecture(
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
    )
    shapes = jax.eval_shape(lambda: transformer.init(arch, jax.random.key(0)))
    rows, length = 8, 128
    batch = SequenceBatch(
        *(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((rows, length), (rows,), (rows,)))
    )
    logits = rows * length * arch.vocab_size * 4
    shared = {"length": length, "chunk": 4}

    def log_probs(params, batch):
        return passes.log_prob_pass(arch, params, batch, **shared)

    def divergence(params, batch):
        return passes.full_kl_pass(arch, params, arch, params, batch, **shared)

    for function in (log_probs, divergence):
        compiled = jax.jit(function).lower(shapes, batch).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        assert temporary < logits / 2, (function, temporary, logits)
