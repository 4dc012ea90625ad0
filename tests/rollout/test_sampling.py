"""The sampler against a numpy oracle, and as a distribution."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_numpy as oracle

from fuse_jax.rollout.sampling import Draw, Sampling, check_key, sample, sample_keys

VOCAB, VALID, ROWS, COUNT = 13, 11, 6, 6000
SEED = jax.random.key(3)
LOGITS = np.random.default_rng(0).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
LOGITS[:, VALID:] = 50.0  # the padding rows of the head are the likeliest of all
CASES = [
    Sampling(VALID),
    Sampling(VALID, 1.3, top_k=4),
    Sampling(VALID, 1.0, top_p=0.7),
    Sampling(VALID, 0.8, top_k=6, top_p=0.8),
]


@functools.partial(jax.jit, static_argnums=3)
def _draw(logits, sample_ids, positions, sampling):
    keys = sample_keys(SEED, sample_ids, positions)
    return sample(logits, keys, sampling, gaps=True)


def draw(logits, sample_ids, positions, sampling) -> Draw:
    """Draws of any number of rows, from one program a distribution."""
    rows = len(logits)
    fill = lambda x: np.pad(x, [(0, COUNT - rows)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
    drawn = _draw(fill(logits), fill(sample_ids), fill(positions), sampling)
    return Draw(*(np.asarray(x)[:rows] for x in drawn))


def expected(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    return oracle.distribution(
        row,
        valid_vocab=sampling.valid_vocab,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )


def noise_of(sample_id: int, position: int) -> np.ndarray:
    key = jax.random.fold_in(jax.random.fold_in(SEED, sample_id), position)
    return np.asarray(jax.random.gumbel(key, (VOCAB,), jnp.float32), np.float64)


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_token_and_log_prob_are_the_oracles(sampling):
    ids, positions = np.arange(10, 10 + ROWS), np.arange(ROWS) * 3
    tokens, log_probs, gaps = map(np.asarray, draw(LOGITS, ids, positions, sampling))
    assert log_probs.dtype == np.float32
    for row in range(ROWS):
        probabilities = expected(LOGITS[row], sampling)
        token, lead = oracle.gumbel_choice(probabilities, noise_of(ids[row], positions[row]))
        assert tokens[row] == token
        assert log_probs[row] == pytest.approx(np.log(probabilities[token]), abs=1e-5)
        assert 0 <= gaps[row] <= lead + 1e-4


@pytest.mark.parametrize("sampling", [CASES[0], CASES[3]], ids=str)
def test_frequencies_follow_the_distribution(sampling):
    count = COUNT
    logits = np.broadcast_to(LOGITS[0], (count, VOCAB))
    tokens = np.asarray(draw(logits, np.arange(count), np.zeros(count, np.int32), sampling).tokens)
    wanted = expected(LOGITS[0], sampling) * count
    seen = np.bincount(tokens, minlength=VOCAB)
    assert seen[wanted == 0].sum() == 0
    possible = wanted > 0
    chi_square = np.sum((seen[possible] - wanted[possible]) ** 2 / wanted[possible])
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 5


def test_positions_of_one_sample_draw_independently():
    count = 4000
    logits = np.zeros((count, VOCAB), np.float32)
    tokens = np.asarray(draw(logits, np.full(count, 7), np.arange(count), CASES[0]).tokens)
    seen = np.bincount(tokens, minlength=VOCAB)[:VALID]
    assert np.sum((seen - count / VALID) ** 2 / (count / VALID)) < 40


def test_a_negative_top_k_is_off():
    logits = np.zeros((64, VOCAB), np.float32)
    ids = np.arange(64)
    tokens = draw(logits, ids, ids, Sampling(VALID, top_k=-1)).tokens
    np.testing.assert_array_equal(tokens, draw(logits, ids, ids, CASES[0]).tokens)
    assert len(np.unique(tokens)) >= 2


def test_greedy_takes_the_best_real_token_with_probability_one():
    tokens, log_probs, gaps = draw(LOGITS, np.arange(ROWS), np.arange(ROWS), Sampling(VALID, 0.0))
    np.testing.assert_array_equal(tokens, LOGITS[:, :VALID].argmax(-1))
    np.testing.assert_array_equal(log_probs, 0.0)
    two = -np.sort(-LOGITS[:, :VALID], axis=-1)[:, :2]
    np.testing.assert_allclose(gaps, two[:, 0] - two[:, 1], rtol=1e-6)


def test_a_draw_depends_on_its_sample_and_position_only():
    ids, positions = np.array([5, 9, 5, 1, 0, 2]), np.array([0, 4, 1, 1, 0, 2])
    tokens, log_probs, gaps = draw(LOGITS, ids, positions, CASES[0])
    order = np.array([3, 0, 5, 1, 4, 2])
    moved = draw(LOGITS[order], ids[order], positions[order], CASES[0])
    for before, after in zip((tokens, log_probs, gaps), moved, strict=True):
        np.testing.assert_array_equal(np.asarray(before)[order], after)
    flat = np.zeros((400, VOCAB), np.float32)
    base = np.asarray(draw(flat, np.arange(400), np.zeros(400, np.int32), CASES[0]).tokens)
    other = np.asarray(draw(flat, np.zeros(400, np.int32), np.arange(400), CASES[0]).tokens)
    assert 0 < np.mean(base == other) < 0.3  # (id, 0) and (0, position) are not the same noise


def test_changes_below_half_the_gap_do_not_change_the_token():
    rng = np.random.default_rng(1)
    count = 300
    logits = rng.normal(0, 2, (count, VOCAB)).astype(np.float32)
    ids = np.arange(count)
    for sampling in (CASES[0], CASES[1], Sampling(VALID, 0.0)):
        tokens, log_probs, gaps = map(np.asarray, draw(logits, ids, ids, sampling))
        scale = sampling.temperature or 1.0
        shift = rng.uniform(-1, 1, logits.shape) * 0.49 * gaps[:, None] * scale
        shifted = draw((logits + shift).astype(np.float32), ids, ids, sampling)
        sure = gaps > 1e-5
        np.testing.assert_array_equal(tokens[sure], np.asarray(shifted.tokens)[sure])
        if sampling.top_k:  # nor the set that is kept: probabilities stay close
            close = sure & (gaps < 0.02)
            np.testing.assert_allclose(log_probs[close], shifted.log_probs[close], atol=0.05)


def test_the_gap_sees_the_cut():
    zero = np.zeros(2, np.int32)
    # Top-p 0.7: the first row's second token brings it to 0.70001, the second row's to 0.8.
    likely = np.array([[0.5, 0.20001], [0.5, 0.3]])
    rest = np.repeat((1 - likely.sum(1, keepdims=True)) / (VALID - 2), VOCAB - 2, axis=1)
    rows = np.log(np.concatenate([likely, rest], axis=1))
    near, far = draw(rows.astype(np.float32), zero, zero, Sampling(VALID, 1.0, top_p=0.7)).gaps
    assert near < 1e-4 < far
    # Top-k 4: the fourth and fifth are all but equal in the first row.
    rows = np.array([[9, 8, 7, 1, 1 - 1e-6], [9, 8, 7, 1, 0]])
    rows = np.concatenate([rows, np.full((2, VOCAB - 5), -1.0)], axis=1).astype(np.float32)
    near, far = draw(rows, zero, zero, Sampling(VALID, 1.3, top_k=4)).gaps
    assert near < 1e-4 < far


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e-6}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes, key):
    with pytest.raises(ValueError, match=rf"rollout\.{key}"):
        Sampling(VALID, **changes)


def test_wrong_dtypes_and_generators_are_refused():
    keys = sample_keys(SEED, jnp.arange(1), jnp.arange(1))
    with pytest.raises(TypeError, match="float32"):
        sample(jnp.zeros((1, VOCAB), jnp.bfloat16), keys, CASES[0], gaps=False)
    with pytest.raises(ValueError, match="threefry2x32"):
        check_key(jax.random.key(0, impl="rbg"))
