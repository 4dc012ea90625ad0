"""The transformer, its rotary embedding and its heads, against themselves and numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuse_jax.models import heads, transformer
from fuse_jax.models.architecture import Architecture, RopeScaling, parameter_count
from fuse_jax.models.rotary import inverse_frequencies

ARCH = Architecture(
    "qwen2",
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    attention_bias=True,
)
ROWS, LENGTH = 3, 12


@pytest.fixture(scope="module")
def params():
    """Random biases and norms too, so that none can be forgotten."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        return 1 + 0.2 * noise if "scale" in name else 0.3 * noise

    shapes = jax.eval_shape(lambda: transformer.init(ARCH, jax.random.key(0)))
    return jax.device_put(jax.tree_util.tree_map_with_path(draw, shapes))


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.integers(0, ARCH.vocab_size, (ROWS, LENGTH)), jnp.int32)


@pytest.fixture(scope="module")
def hidden(params, tokens):
    return forward(params, tokens)


forward = jax.jit(lambda params, tokens, **kw: transformer.forward(ARCH, params, tokens, **kw))


def assert_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_rounding(a, b):
    """Equal but for the order in which XLA adds: it is free to compile a loop's body otherwise.

    Within 1e-5 of the largest of each array.
    """

    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * float(np.abs(y).max()))

    jax.tree.map(close, a, b)


# ---------------------------------------------------------------- numpy oracle


def oracle_rotate(x, frequencies):
    """Complex rotation of the pairs (i, i + half): float64 [T, H, head_dim]."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * np.arange(len(x))[:, None, None] * frequencies
    )
    return np.concatenate([turned.real, turned.imag], -1)


def oracle_block(arch, w, x):
    """One block on one sequence, float64 [T, D]; loops over heads and positions."""

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + arch.norm_eps) * scale

    def project(name, x, heads):
        return (x @ w[name]["kernel"] + w[name]["bias"]).reshape(len(x), heads, arch.head_dim)

    frequencies = arch.rope_theta ** (-np.arange(0, arch.head_dim, 2) / arch.head_dim)
    h = norm(x, w["attention_norm"]["scale"])
    q = oracle_rotate(project("query", h, arch.num_heads), frequencies)
    k = oracle_rotate(project("key", h, arch.num_kv_heads), frequencies)
    v = project("value", h, arch.num_kv_heads)
    mixed = np.zeros_like(q)
    for head in range(arch.num_heads):
        kv = head // (arch.num_heads // arch.num_kv_heads)
        for t in range(len(x)):
            score = k[: t + 1, kv] @ q[t, head] / np.sqrt(arch.head_dim)
            weight = np.exp(score - score.max())
            mixed[t, head] = weight / weight.sum() @ v[: t + 1, kv]
    x = x + mixed.reshape(len(x), -1) @ w["attention_out"]["kernel"]
    h = norm(x, w["mlp_norm"]["scale"])
    gate = h @ w["gate"]["kernel"]
    return x + (gate / (1 + np.exp(-gate)) * (h @ w["up"]["kernel"])) @ w["down"]["kernel"]


def test_forward_is_the_numpy_oracle(params, tokens, hidden):
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = wide["embed"]["embedding"][np.asarray(tokens[0])]
    for layer in range(ARCH.num_layers):
        x = oracle_block(ARCH, jax.tree.map(lambda a, i=layer: a[i], wide["blocks"]), x)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + ARCH.norm_eps) * wide["final_norm"]["scale"]
    np.testing.assert_allclose(hidden[0], x, atol=1e-5)


def test_rope_scalings_by_hand():
    plain = Architecture(head_dim=8, rope_theta=10000.0)
    base = np.array([1.0, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(inverse_frequencies(plain), base, rtol=1e-6)
    linear = Architecture(head_dim=8, rope_scaling=RopeScaling("linear", 4.0))
    np.testing.assert_allclose(inverse_frequencies(linear), base / 4, rtol=1e-6)
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position=1000)
    llama3 = Architecture(head_dim=8, rope_scaling=scaling)
    # Wavelengths 6, 63, 628, 6283 against 1000/4 and 1000/1: kept, kept, blended, stretched.
    blend = (1000 / (2 * np.pi / 0.01) - 1) / 3
    third = (1 - blend) * 0.01 / 8 + blend * 0.01
    np.testing.assert_allclose(inverse_frequencies(llama3), [1.0, 0.1, third, 0.001 / 8], rtol=1e-6)


def test_parameter_count_is_what_init_makes(params):
    assert parameter_count(ARCH) == sum(x.size for x in jax.tree.leaves(params))
    scalar = jax.eval_shape(lambda: transformer.init(ARCH, jax.random.key(0), head="scalar"))
    assert scalar["head"]["kernel"].shape == (ARCH.hidden_size, 1)
    assert parameter_count(ARCH, scalar_head=True) == sum(x.size for x in jax.tree.leaves(scalar))


# ---------------------------------------------------------------- one model, many executions


def test_unrolled_is_the_loop(params, tokens, hidden, monkeypatch):
    # Shallow models are unrolled, deep ones run a loop: the same numbers.
    monkeypatch.setattr(transformer, "UNROLLED_LAYERS", 0)
    assert_rounding(jax.jit(lambda *a: transformer.forward(ARCH, *a))(params, tokens), hidden)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
def test_stages_are_slices_bit_for_bit(sizes, params, tokens, hidden):
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    @jax.jit
    def staged(params, tokens):
        x, first = transformer.embed(params, tokens), 0
        for size in sizes:
            span = slice(first, first + size)
            blocks = jax.tree.map(lambda w, span=span: w[span], params["blocks"])
            x, _, _ = transformer.apply_blocks(
                ARCH, blocks, x, positions, transformer.causal_attention
            )
            first += size
        return transformer.final_norm(ARCH, params, x)

    assert_bits(staged(params, tokens), hidden)


def test_rematerialised_is_the_same(params, tokens):
    def loss(params, remat):
        hidden = transformer.forward(ARCH, params, tokens, remat=remat)
        return jnp.sum(hidden * jnp.cos(jnp.arange(hidden.size).reshape(hidden.shape))), hidden

    step = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    grads, hidden = step(params, "none")
    for remat in ("full", "dots"):
        grads_r, hidden_r = step(params, remat)
        assert_rounding(hidden_r, hidden)
        assert_rounding(grads_r, grads)


def test_packed_segments_are_the_separate_sequences(params, tokens, hidden):
    lengths = [5, 4]
    packed = np.zeros((1, LENGTH), np.int32)
    segments, positions = np.zeros_like(packed), np.zeros_like(packed)
    start = 0
    for row, length in enumerate(lengths):
        span = slice(start, start + length)
        packed[0, span] = tokens[row, :length]
        segments[0, span], positions[0, span] = row + 1, np.arange(length)
        start += length
    got = forward(params, packed, segment_ids=segments, positions=positions)
    np.testing.assert_allclose(got[0, :5], hidden[0, :5], atol=1e-5)
    np.testing.assert_allclose(got[0, 5:9], hidden[1, :4], atol=1e-5)


def test_padding_and_neighbours_leave_no_bit_changed(params, tokens, hidden):
    lengths = np.array([LENGTH, 7, 3])
    real = np.arange(LENGTH) < lengths[:, None]
    other = forward(params, jnp.where(real, tokens, 5))
    np.testing.assert_array_equal(np.where(real[..., None], other - hidden, 0), 0)
    swapped = forward(params, tokens[::-1])
    assert_bits(swapped[::-1], hidden)


def test_gradients_under_padding_are_bit_equal(params, tokens):
    real = (np.arange(LENGTH - 1) < np.array([[LENGTH], [6], [2]])).astype(np.float32)

    @jax.jit
    def grads(params, tokens):
        def loss(params):
            hidden = transformer.forward(ARCH, params, tokens)[:, :-1]
            targets = jnp.where(real > 0, tokens[:, 1:], 0)
            stats = heads.token_statistics(params, hidden, targets, valid_vocab=30)
            return jnp.sum(jnp.where(real > 0, stats.log_probs + 0.1 * stats.entropy, 0.0))

        return jax.grad(loss)(params)

    tokens = jnp.minimum(tokens, 29)
    # The token after the last real target is padding, for the inputs too.
    inputs = np.pad(real, ((0, 0), (1, 0)), constant_values=1) > 0
    one, other = grads(params, tokens), grads(params, jnp.where(inputs, tokens, 17))
    assert_bits(one, other)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(one))


def test_the_gradient_of_a_frequent_token_is_summed_in_float32(params):
    tokens = jnp.zeros((1, 2000), jnp.int32)

    def total(embedding):
        return transformer.embed(
            {"embed": {"embedding": embedding}}, tokens, dtype=jnp.bfloat16
        ).sum()

    gradient = jax.jit(jax.grad(total))(params["embed"]["embedding"])
    np.testing.assert_array_equal(gradient[0], np.full(ARCH.hidden_size, 2000.0))


def test_bfloat16_compute_is_close(params, tokens, hidden):
    half = jax.jit(lambda *a: transformer.forward(ARCH, *a, dtype=jnp.bfloat16))(params, tokens)
    assert half.dtype == jnp.bfloat16
    assert np.abs(half.astype(np.float32) - hidden).mean() < 0.02


# ---------------------------------------------------------------- heads


def oracle_log_probs(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_token_statistics_are_log_softmax_at_a_temperature(params, tokens, hidden):
    logits = np.asarray(hidden, np.float64) @ np.asarray(params["head"]["kernel"], np.float64)
    for temperature in (1.0, 0.6):
        expected = oracle_log_probs(logits / temperature)
        stats = heads.token_statistics(params, hidden, tokens, temperature=temperature)
        chosen = np.take_along_axis(expected, np.asarray(tokens)[..., None], -1)[..., 0]
        np.testing.assert_allclose(stats.log_probs, chosen, atol=1e-5)
        entropy = -(np.exp(expected) * expected).sum(-1)
        np.testing.assert_allclose(stats.entropy, entropy, atol=1e-5)
        assert stats.log_probs.dtype == stats.entropy.dtype == jnp.float32


def test_temperature_by_hand():
    stats = heads.log_softmax_statistics(jnp.array([[2.0, 0.0]]) / 0.5, jnp.array([0]))
    np.testing.assert_allclose(stats.log_probs, [-0.01815], atol=1e-5)


def test_vocabulary_padding_has_no_mass(params, tokens, hidden):
    real = 30
    logits = heads.lm_logits(params, hidden, valid_vocab=real)
    assert np.isneginf(logits[..., real:]).all() and np.isfinite(logits[..., :real]).all()
    expected = oracle_log_probs(np.asarray(logits)[..., :real])
    targets = jnp.minimum(tokens, real - 1)
    stats = heads.token_statistics(params, hidden, targets, valid_vocab=real)
    chosen = np.take_along_axis(expected, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(stats.log_probs, chosen, atol=1e-5)
    np.testing.assert_allclose(stats.entropy, -(np.exp(expected) * expected).sum(-1), atol=1e-5)
    outside = heads.token_statistics(params, hidden, jnp.full_like(tokens, real), valid_vocab=real)
    assert np.isneginf(outside.log_probs).all()


def test_chunked_head_is_the_whole_head(params, tokens, hidden):
    def loss(params, hidden, chunk):
        stats = heads.token_statistics(params, hidden, tokens, temperature=0.7, chunk=chunk)
        return jnp.sum(jnp.sin(stats.log_probs) + stats.entropy), stats

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
    (_, whole), grads = step(params, hidden, 0)
    (_, cut), grads_cut = step(params, hidden, 5)  # 12 positions: 5, 5 and 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), cut, whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads_cut, grads)
    head_text = step.lower(params, hidden, 5).as_text()
    assert f"{ROWS}x5x{ARCH.vocab_size}xf32" in head_text
    assert f"{ROWS}x{LENGTH}x{ARCH.vocab_size}xf32" not in head_text


def test_gathers_refuse_other_lengths(params, tokens, hidden):
    with pytest.raises(ValueError, match=r"\(3, 12, 24\) and targets \(3, 11\)"):
        heads.token_statistics(params, hidden, tokens[:, 1:])


def test_tied_head_is_the_embedding(params, hidden):
    tied = {key: value for key, value in params.items() if key != "head"}
    untied = {**tied, "head": {"kernel": params["embed"]["embedding"].T}}
    assert_bits(heads.lm_logits(tied, hidden), heads.lm_logits(untied, hidden))


def test_scalar_heads_start_at_zero_and_are_float32():
    scalar = {"head": transformer.scalar_head(ARCH)}
    states = jnp.ones((2, 3, ARCH.hidden_size), jnp.bfloat16)
    assert_bits(heads.scalars(scalar, states), jnp.zeros((2, 3)))
    scalar["head"] = {"kernel": jnp.full((ARCH.hidden_size, 1), 0.5), "bias": jnp.array([2.0])}
    got = heads.scalars(scalar, states)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, ARCH.hidden_size * 0.5 + 2)


def test_alignment_of_responses_by_hand():
    tokens = jnp.array([[11, 12, 13, 21, 22, 0], [11, 31, 32, 33, 0, 0]])
    prompts = jnp.array([3, 1])
    states = tokens[..., None].astype(jnp.float32)
    got = heads.before_response(states, prompts, 3)[..., 0]
    assert_bits(got, jnp.array([[13.0, 21, 22], [11, 31, 32]]))
    got = heads.response_tokens(tokens, prompts, 3)
    assert_bits(got, jnp.array([[21, 22, 0], [31, 32, 33]]))
    assert_bits(heads.at_last_token(states, jnp.array([5, 4]))[:, 0], jnp.array([22.0, 33]))
