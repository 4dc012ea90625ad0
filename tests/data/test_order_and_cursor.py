"""Shuffled epochs, resume at every place, changed data, held-out splits, sample ids."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse_jax.data import cursor as cursors
from fuse_jax.data.order import epoch_order, fingerprint, permutation, sample_ids, split_held_out
from fuse_jax.data.records import DataError, Demonstration, Preference, Prompt, token_array


def prompts(n, offset=0):
    return [Prompt(i, token_array([i + offset, 1]), str(i)) for i in range(n)]


@given(size=st.integers(1, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**20))
def test_an_epoch_is_a_partition(size, seed, epoch):
    order = epoch_order(size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))
    assert np.array_equal(order, epoch_order(size, seed, epoch))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_shuffle_is_fixed_for_good():
    """Checkpoints rely on these orders across versions of numpy and of this package."""
    assert permutation(8, 0, 0).tolist() == GOLDEN[0]
    assert permutation(8, 7, 3).tolist() == GOLDEN[1]


GOLDEN = ([0, 3, 7, 5, 1, 2, 6, 4], [7, 1, 6, 0, 4, 2, 3, 5])


def test_shuffle_is_uniform_enough():
    first = np.bincount([epoch_order(5, 0, epoch)[0] for epoch in range(2000)], minlength=5)
    assert first.min() > 330 and first.max() < 470


@given(
    size=st.integers(1, 12),
    batches=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_every_item_once_per_epoch_whatever_the_batches(size, batches, seed):
    at, seen = cursors.start(prompts(size), seed), []
    for count in batches:
        indices, at = cursors.take(at, count)
        assert len(indices) == count
        seen += indices.tolist()
    for epoch in range(0, len(seen) // size):
        assert seen[epoch * size : (epoch + 1) * size] == epoch_order(size, seed, epoch).tolist()
    rest = seen[len(seen) // size * size :]
    assert rest == epoch_order(size, seed, len(seen) // size)[: len(rest)].tolist()
    assert at.items_seen == len(seen) and 0 <= at.position < size


@pytest.mark.parametrize("size, batch", [(9, 3), (10, 4), (6, 6), (3, 7)])
def test_resume_equals_uninterrupted_for_every_k(size, batch):
    items, steps = prompts(size), 12
    at, straight = cursors.start(items, 5), []
    for _ in range(steps):
        indices, at = cursors.take(at, batch)
        straight.append(indices.tolist())
    for k in range(steps + 1):
        at = cursors.start(items, 5)
        for _ in range(k):
            _, at = cursors.take(at, batch)
        saved = json.loads(json.dumps(at.to_dict()))
        at, after = cursors.resume(saved, prompts(size), 5), []
        for _ in range(steps - k):
            indices, at = cursors.take(at, batch)
            after.append(indices.tolist())
        assert after == straight[k:]


def test_batch_size_may_change_between_runs():
    at = cursors.start(prompts(10), 0)
    whole, _ = cursors.take(at, 25)
    _, at = cursors.take(at, 8)
    rest, _ = cursors.take(cursors.resume(at.to_dict(), prompts(10), 0), 17)
    assert np.array_equal(np.concatenate([whole[:8], rest]), whole)


@pytest.mark.parametrize(
    "items, seed, name",
    [(prompts(7), 0, "size"), (prompts(6, 1), 0, "fingerprint"), (prompts(6), 1, "seed")],
)
def test_changed_data_is_refused(items, seed, name):
    saved = cursors.take(cursors.start(prompts(6), 0), 4)[1].to_dict()
    with pytest.raises(cursors.DatasetChanged, match=rf"changed .*\({name} was .*new workdir"):
        cursors.resume(saved, items, seed)


def test_broken_cursors_and_empty_data():
    good = cursors.start(prompts(6), 0).to_dict()
    with pytest.raises(DataError, match="not a saved data cursor"):
        cursors.resume({"step": 3}, prompts(6), 0)
    for bad in ({"position": 6}, {"position": -1}, {"epoch": -1}):
        with pytest.raises(DataError, match="out of range"):
            cursors.resume(good | bad, prompts(6), 0)
    with pytest.raises(DataError, match="empty dataset"):
        cursors.start([], 0)
    with pytest.raises(DataError, match="seed must be >= 0"):
        cursors.start(prompts(3), -1)


def test_fingerprint_sees_ids_tokens_order_and_margins():
    a = [Prompt(0, token_array([1, 2]), ""), Prompt(1, token_array([3]), "")]
    moved = [Prompt(0, token_array([1]), ""), Prompt(1, token_array([2, 3]), "")]
    renamed = [Prompt(5, token_array([1, 2]), ""), Prompt(1, token_array([3]), "")]
    assert len({fingerprint(x) for x in (a, moved, renamed, a[::-1], a[:1])}) == 5
    copy = [Prompt(p.id, token_array(p.tokens), "text is not looked at") for p in a]
    assert fingerprint(a) == fingerprint(copy)
    pair = [Preference(a[0].tokens, a[1].tokens, a[0].tokens, margin) for margin in (0.0, 1.0)]
    assert fingerprint(pair[:1]) != fingerprint(pair[1:])
    two, one = token_array([1, 2]), token_array([3])
    whole = [Demonstration(two, one), Demonstration(two[:1], token_array([2, 3]))]
    assert fingerprint(whole[:1]) != fingerprint(whole[1:])  # where the answer begins matters


def test_sample_ids_are_unique_over_iterations():
    ids = np.concatenate([sample_ids(iteration, 6) for iteration in range(50)])
    assert ids.dtype == np.int32 and sorted(ids.tolist()) == list(range(300))
    assert sample_ids(2**27 - 1, 16)[-1] == 2**31 - 1
    with pytest.raises(OverflowError, match="start a new run with another seed"):
        sample_ids(2**27, 16)
    with pytest.raises(ValueError, match="iteration >= 0"):
        sample_ids(-1, 4)


@given(
    keys=st.lists(st.integers(0, 9), min_size=2, max_size=40),
    held_out=st.integers(0, 10),
    seed=st.integers(0, 9),
)
def test_split_keeps_a_prompts_items_together(keys, held_out, seed):
    items = [Prompt(i, token_array([key]), "") for i, key in enumerate(keys)]
    try:
        train, held = split_held_out(items, held_out, seed)
    except DataError:
        assert held_out > 0
        return
    assert sorted(p.id for p in train + held) == list(range(len(keys)))
    assert not {keys[p.id] for p in train} & {keys[p.id] for p in held}
    assert len(held) >= held_out and train
    assert [p.id for p in held] == sorted(p.id for p in held)


def test_split_size_and_errors():
    train, held = split_held_out(prompts(20), 5, seed=1)
    assert (len(train), len(held)) == (15, 5)
    assert [p.id for p in held] != [p.id for p in split_held_out(prompts(20), 5, seed=2)[1]]
    with pytest.raises(DataError, match="20 of 20 items held out leaves none to train on"):
        split_held_out(prompts(20), 20)
    with pytest.raises(DataError, match="held_out must be >= 0"):
        split_held_out(prompts(20), -1)
