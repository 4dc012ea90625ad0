"""Cutting a mini-batch: fixed shapes, nothing lost, weights of the whole."""

import jax
import numpy as np
import ppo_numpy as toy
import pytest

from fuse_jax.buckets import Bucket
from fuse_jax.training.minibatch import cut_minibatch, deal, training_buckets

BUCKETS = (Bucket(8, 4), Bucket(16, 2))


def placed(minibatch):
    """(bucket, micro-batch, row) -> row's fields, for every row with a weight."""
    found = {}
    for b, bucket in enumerate(minibatch.buckets):
        for m, r in zip(*np.nonzero(bucket.micro_batches.weights.sum(-1))):
            found[b, int(m), int(r)] = jax.tree.map(lambda x, at=(m, r): x[at], bucket[0])
    return found


@pytest.mark.parametrize("samples", [8, 7])  # all micro-batches full, or the last not
def test_every_sample_has_one_row_in_the_bucket_of_its_own_length(samples):
    experience = toy.toy_experience(samples)
    minibatch = cut_minibatch(experience, np.arange(samples), BUCKETS)
    rows = placed(minibatch)
    assert len(rows) == samples
    seen = []
    for (bucket, micro_batch, _), row in rows.items():
        assert micro_batch < minibatch.buckets[bucket].count
        index = next(
            i
            for i in range(samples)
            if np.array_equal(row.tokens, experience.tokens[i, : len(row.tokens)])
        )
        seen.append(index)
        length = experience.prompt_lengths[index] + experience.response_lengths[index]
        assert bucket == (0 if length <= 8 else 1)
        assert row.prompt_lengths == experience.prompt_lengths[index]
        width = len(row.weights)
        for name in ("log_probs", "ref_log_probs", "values", "advantages", "returns"):
            wanted = getattr(experience, name)[index, :width]
            np.testing.assert_array_equal(getattr(row, name), wanted)
        np.testing.assert_array_equal(row.weights > 0, experience.response_mask[index, :width] > 0)
    assert sorted(seen) == list(range(samples))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_are_of_the_whole_minibatch(aggregation):
    experience = toy.toy_experience(8)
    minibatch = cut_minibatch(experience, np.arange(8), BUCKETS, aggregation=aggregation)
    rows = placed(minibatch).values()
    total = experience.response_lengths.sum()
    assert sum(row.weights.sum() for row in rows) == pytest.approx(1, rel=1e-6)
    for row in rows:
        own = (row.weights > 0).sum()
        wanted = 1 / total if aggregation == "token_mean" else 1 / (8 * own)
        np.testing.assert_allclose(row.weights[row.weights > 0], wanted, rtol=1e-6)


def test_shapes_do_not_depend_on_the_samples():
    def shapes(lengths):
        minibatch = cut_minibatch(toy.toy_experience(8, lengths=lengths), np.arange(8), BUCKETS)
        return jax.tree.map(np.shape, minibatch), [int(b.count) for b in minibatch.buckets]

    short, long = shapes(((1, 1),)), shapes(((4, 12),))
    assert short[0] == long[0]
    assert short[1] == [2, 0] and long[1] == [0, 4]
    tokens = short[0].buckets[0].micro_batches.tokens, short[0].buckets[1].micro_batches.tokens
    assert tokens == ((2, 4, 8), (4, 2, 16))
    assert short[0].buckets[0].micro_batches.weights == (2, 4, 7)  # one token is the prompt's
    assert short[0].buckets[1].micro_batches.weights == (4, 2, toy.RESPONSE)


def test_excluded_and_empty_samples_take_no_row_and_no_share():
    experience = toy.toy_experience(8)
    experience.valid[2] = False
    experience.response_lengths[5] = 0
    experience.response_mask[5] = 0
    minibatch = cut_minibatch(experience, np.arange(8), BUCKETS)
    rows = placed(minibatch)
    assert len(rows) == 6
    counted = experience.response_lengths.sum() - experience.response_lengths[2]
    largest = max(row.weights.max() for row in rows.values())
    assert largest == pytest.approx(1 / counted, rel=1e-6)


def test_nothing_to_train_on_has_no_weight_and_no_micro_batch():
    experience = toy.toy_experience(4)
    experience.valid[:] = False
    minibatch = cut_minibatch(experience, np.arange(4), BUCKETS)
    assert not placed(minibatch) and all(b.count == 0 for b in minibatch.buckets)


def test_a_sample_longer_than_every_bucket_is_refused():
    with pytest.raises(ValueError, match=r"16 tokens fits no bucket.*sequence_buckets"):
        cut_minibatch(toy.toy_experience(4), np.arange(4), (Bucket(8, 4),))


def test_rows_that_do_not_divide_over_shards_are_refused():
    with pytest.raises(ValueError, match="do not divide over 4 shards"):
        cut_minibatch(toy.toy_experience(4), np.arange(4), (Bucket(16, 6),), shards=4)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_dealing_uses_each_row_once_and_balances_lengths(shards):
    rows = 8
    row = deal(np.arange(rows), rows, shards)
    assert sorted(row) == list(range(rows))
    lengths = np.arange(rows, 0, -1)
    totals = [lengths[row // (rows // shards) == s].sum() for s in range(shards)]
    assert max(totals) == min(totals)
    few = deal(np.arange(3), rows, shards) // (rows // shards)
    assert len(set(few)) == min(3, shards)


def test_training_buckets_hold_a_token_budget_but_never_more_than_a_minibatch():
    assert training_buckets((16, 64), 256, 100) == (Bucket(16, 16), Bucket(64, 4))
    assert training_buckets((16, 64), 1024, 10) == (Bucket(16, 10), Bucket(64, 10))
    assert training_buckets((16, 64), 1024, 10, 4) == (Bucket(16, 12), Bucket(64, 12))
    assert training_buckets((64,), 16, 10, 4) == (Bucket(64, 4),)
