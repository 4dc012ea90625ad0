"""Packed rows hold whole items, once, in order, with positions, masks and ends that fit them."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse_jax.data import cursor as cursors
from fuse_jax.data.packing import pack_demonstrations, pack_preferences, take_packed
from fuse_jax.data.records import DataError, Demonstration, Preference, token_array

PAD = 99


def tokens(n, start):
    return token_array(np.arange(start, start + n) % 90 + 1)


lengths = st.tuples(st.integers(0, 6), st.integers(1, 9))
demonstrations = st.lists(lengths, max_size=30).map(
    lambda x: [Demonstration(tokens(p, i), tokens(r, i + p)) for i, (p, r) in enumerate(x)]
)
preferences = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(1, 9))).map(
    lambda x: [
        Preference(tokens(p, i), tokens(c, i + p), tokens(r, i + p + 1), float(i))
        for i, (p, c, r) in enumerate(x)
    ]
)


def segments(packed):
    """{(row, segment id): columns}, each checked to be one run of columns with positions from 0."""
    found = {}
    for row, ids in enumerate(packed.segment_ids):
        for segment in range(1, ids.max() + 1):
            columns = np.flatnonzero(ids == segment)
            assert np.all(np.diff(columns) == 1) and len(columns)
            assert packed.positions[row, columns].tolist() == list(range(len(columns)))
            found[row, segment] = columns
        padding = ids == 0
        assert not np.any(np.diff(padding.astype(int)) < 0)  # padding only at the end
        assert np.all(packed.tokens[row, padding] == PAD)
        assert np.all(packed.positions[row, padding] == 0)
    return found


@given(items=demonstrations, rows=st.integers(1, 4), row_length=st.integers(4, 16))
def test_demonstrations(items, rows, row_length):
    packed = pack_demonstrations(items, rows, row_length, pad_token_id=PAD)
    assert packed.tokens.shape == packed.loss_mask.shape == (rows, row_length)
    fits = [len(i.prompt_tokens) + len(i.response_tokens) <= row_length for i in items]
    used = items[: packed.num_consumed]
    whole = [item for item, fit in zip(used, fits) if fit]
    assert packed.num_items == len(whole) and packed.num_too_long == len(used) - len(whole)
    expected = []
    for item in whole:
        mask = [0.0] * len(item.prompt_tokens) + [1.0] * len(item.response_tokens)
        mask[0] = 0.0  # what nothing stands before is not predicted
        expected.append(([*item.prompt_tokens, *item.response_tokens], mask))
    got = [
        (packed.tokens[row, c].tolist(), packed.loss_mask[row, c].tolist())
        for (row, _), c in segments(packed).items()
    ]
    assert sorted(got) == sorted(expected)
    assert np.all(packed.loss_mask[packed.segment_ids == 0] == 0)
    if packed.num_consumed < len(items):  # it stopped because the next one has room nowhere
        item = items[packed.num_consumed]
        free = (packed.segment_ids == 0).sum(1).max()
        assert len(item.prompt_tokens) + len(item.response_tokens) > free


@given(
    items=preferences,
    rows=st.integers(1, 4),
    row_length=st.integers(6, 14),
    max_pairs=st.integers(1, 6),
)
def test_preferences(items, rows, row_length, max_pairs):
    packed = pack_preferences(items, rows, row_length, max_pairs, pad_token_id=PAD)
    n = packed.num_items
    assert packed.valid.tolist() == [1.0] * n + [0.0] * (max_pairs - n)
    assert packed.chosen_end.shape == packed.rejected_end.shape == (max_pairs, 2)

    def sides(pair):
        return [
            np.concatenate([pair.prompt_tokens, x])
            for x in (pair.chosen_tokens, pair.rejected_tokens)
        ]

    def fits(pair):
        each = [len(side) for side in sides(pair)]
        return max(each) <= row_length and sum(each) <= rows * row_length

    whole = [pair for pair in items[: packed.num_consumed] if fits(pair)]
    assert len(whole) == n and packed.margin[:n].tolist() == [pair.margin for pair in whole]
    found = segments(packed)
    assert len(found) == 2 * n
    for index, pair in enumerate(whole):
        for (row, column), side in zip(
            (packed.chosen_end[index], packed.rejected_end[index]), sides(pair)
        ):
            columns = found[row, packed.segment_ids[row, column]]
            assert columns[-1] == column and packed.tokens[row, columns].tolist() == side.tolist()
    assert not packed.chosen_end[n:].any() and not packed.margin[n:].any()
    if n == 0:
        assert not packed.segment_ids.any()


def test_a_pair_without_room_leaves_nothing_behind():
    first = Preference(tokens(1, 0), tokens(4, 1), tokens(4, 2))
    half = Preference(tokens(1, 0), tokens(2, 1), tokens(5, 2))  # chosen has room, rejected none
    packed = pack_preferences([first, half], 2, 8, max_pairs=4)
    assert packed.num_items == packed.num_consumed == 1
    assert (packed.segment_ids > 0).sum() == 10


def test_pair_sides_may_lie_in_different_rows():
    packed = pack_preferences([Preference(tokens(2, 0), tokens(4, 1), tokens(3, 2))], 2, 6, 1)
    assert packed.chosen_end.tolist() == [[0, 5]] and packed.rejected_end.tolist() == [[1, 4]]


def demonstration(n):
    return Demonstration(tokens(1, n), tokens(n - 1, n))


def test_first_row_with_room_is_taken():
    packed = pack_demonstrations([demonstration(n) for n in (5, 4, 3, 2, 3)], 2, 8)
    assert packed.segment_ids.tolist() == [[1] * 5 + [2] * 3, [1] * 4 + [2] * 2 + [0] * 2]
    assert packed.num_items == 4


def test_stream_of_batches_sees_every_item_once_per_epoch():
    items = [demonstration(n) for n in (2, 3, 9, 4, 5, 6, 7, 3, 2, 5)]  # one is too long
    pack = functools.partial(pack_demonstrations, rows=2, row_length=8)
    at, seen, counted = cursors.start(items, 3), [], 0
    for _ in range(30):
        before = at
        batch, at = take_packed(items, at, pack)
        indices, _ = cursors.take(before, batch.num_consumed)
        seen += indices.tolist()
        counted += batch.num_items + batch.num_too_long
        resumed = cursors.resume(before.to_dict(), items, 3)
        again, _ = take_packed(items, resumed, pack)
        assert np.array_equal(again.tokens, batch.tokens)
    assert counted == len(seen) == at.items_seen
    for epoch in range(len(seen) // 10):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == list(range(10))


def test_a_batch_larger_than_the_dataset_takes_several_epochs():
    items = [demonstration(n) for n in (3, 5, 40)]
    batch, at = take_packed(
        items, cursors.start(items, 0), functools.partial(pack_demonstrations, rows=4, row_length=8)
    )
    assert batch.num_items == 8 and at.items_seen == batch.num_items + batch.num_too_long


def test_errors():
    items = [demonstration(9)]
    with pytest.raises(DataError, match="none of 1 items fits in 2 rows of 8 tokens: raise"):
        take_packed(items, cursors.start(items, 0), lambda x: pack_demonstrations(x, 2, 8))
    with pytest.raises(ValueError, match="rows >= 1 and row_length >= 2"):
        pack_demonstrations(items, 0, 8)
    with pytest.raises(ValueError, match="max_pairs >= 1"):
        pack_preferences([], 2, 8, 0)
