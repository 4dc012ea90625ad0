"""Whole sequences packed into rows of one fixed shape, for supervised and reward-model training.

Items are placed in order, each in the first row with room, until one has no room anywhere: the
batch is then a prefix of the stream, so a data cursor can stand right behind it. Each segment
starts at position 0, and attention is within a segment only (ids equal and not 0). A label never
crosses a boundary: the mask is 0 at every segment's first token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float32, Int32

from fuse_jax.data.cursor import Cursor, take
from fuse_jax.data.records import DataError, Demonstration, Preference


@dataclasses.dataclass(frozen=True, eq=False)
class PackedBatch:
    """Demonstrations in `rows` rows of T tokens.

    `segment_ids`: 0 = padding, 1, 2, … within a row. `loss_mask` is 1 at the response tokens to be
    predicted (from the token before them). `num_too_long` items of the stream were longer than a
    row and passed over; `num_consumed` counts both kinds.
    """

    tokens: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    loss_mask: Float32[np.ndarray, "B T"]
    num_items: int
    num_too_long: int

    @property
    def num_consumed(self) -> int:
        """How far the stream was read: the rest did not fit and belongs to the next batch."""
        return self.num_items + self.num_too_long


@dataclasses.dataclass(frozen=True, eq=False)
class PackedPairs:
    """Preference pairs; a pair's two sequences may lie in different rows.

    `chosen_end`, `rejected_end`: (row, column) of each sequence's last token, where the reward
    head is read. `valid` is 1 for the first `num_items` of the P pairs and 0 for the rest, whose
    ends are (0, 0). Other fields as in `PackedBatch`.
    """

    tokens: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    chosen_end: Int32[np.ndarray, "P 2"]
    rejected_end: Int32[np.ndarray, "P 2"]
    margin: Float32[np.ndarray, " P"]
    valid: Float32[np.ndarray, " P"]
    num_items: int
    num_too_long: int

    @property
    def num_consumed(self) -> int:
        """How far the stream was read: the rest did not fit and belongs to the next batch."""
        return self.num_items + self.num_too_long


class _Rows:
    """Rows being filled."""

    def __init__(self, rows: int, row_length: int, pad_token_id: int):
        if rows < 1 or row_length < 2:
            raise ValueError(f"need rows >= 1 and row_length >= 2, got {rows} and {row_length}")
        self.tokens = np.full((rows, row_length), pad_token_id, np.int32)
        self.segment_ids = np.zeros((rows, row_length), np.int32)
        self.positions = np.zeros((rows, row_length), np.int32)
        self.loss_mask = np.zeros((rows, row_length), np.float32)
        self._used = [0] * rows
        self._segments = [0] * rows
        self._arange = np.arange(row_length, dtype=np.int32)

    def room_for(self, lengths: Sequence[int]) -> list[int] | None:
        """The first row with room for each length in turn; None if one finds none."""
        used, chosen = list(self._used), []
        for length in lengths:
            free = self.tokens.shape[1] - length
            row = next((r for r, n in enumerate(used) if n <= free), None)
            if row is None:
                return None
            used[row] += length
            chosen.append(row)
        return chosen

    def place(self, row: int, prompt: np.ndarray, response: np.ndarray) -> tuple[int, int]:
        """Writes a segment at the end of a row; returns (row, column) of its last token."""
        start = self._used[row]
        middle, end = start + len(prompt), start + len(prompt) + len(response)
        self._segments[row] += 1
        self.tokens[row, start:middle] = prompt
        self.tokens[row, middle:end] = response
        self.segment_ids[row, start:end] = self._segments[row]
        self.positions[row, start:end] = self._arange[: end - start]
        self.loss_mask[row, middle:end] = 1.0
        self.loss_mask[row, start] = 0.0  # without a prompt nothing predicts the first token
        self._used[row] = end
        return row, end - 1


def pack_demonstrations(
    items: Iterable[Demonstration], rows: int, row_length: int, *, pad_token_id: int = 0
) -> PackedBatch:
    """As many demonstrations from the front of `items` as fit; arrays are [rows, row_length]."""
    packed, num_items, num_too_long = _Rows(rows, row_length, pad_token_id), 0, 0
    for item in items:
        length = len(item.prompt_tokens) + len(item.response_tokens)
        if length > row_length:
            num_too_long += 1
            continue
        room = packed.room_for([length])
        if room is None:
            break
        packed.place(room[0], item.prompt_tokens, item.response_tokens)
        num_items += 1
    return PackedBatch(
        packed.tokens,
        packed.segment_ids,
        packed.positions,
        packed.loss_mask,
        num_items,
        num_too_long,
    )


def pack_preferences(
    items: Iterable[Preference],
    rows: int,
    row_length: int,
    max_pairs: int,
    *,
    pad_token_id: int = 0,
) -> PackedPairs:
    """As many pairs from the front of `items` as fit, at most `max_pairs` (P)."""
    if max_pairs < 1:
        raise ValueError(f"need max_pairs >= 1, got {max_pairs}")
    packed, num_too_long = _Rows(rows, row_length, pad_token_id), 0
    ends: list[tuple[tuple[int, int], tuple[int, int]]] = []
    margins: list[float] = []
    for item in items:
        answers = (item.chosen_tokens, item.rejected_tokens)
        lengths = [len(item.prompt_tokens) + len(answer) for answer in answers]
        if max(lengths) > row_length or sum(lengths) > rows * row_length:
            num_too_long += 1
            continue
        room = packed.room_for(lengths) if len(ends) < max_pairs else None
        if room is None:
            break
        chosen, rejected = (
            packed.place(row, item.prompt_tokens, answer) for row, answer in zip(room, answers)
        )
        ends.append((chosen, rejected))
        margins.append(item.margin)
    both = np.zeros((max_pairs, 2, 2), np.int32)
    both[: len(ends)] = np.array(ends, np.int32).reshape(-1, 2, 2)
    margin = np.zeros(max_pairs, np.float32)
    margin[: len(ends)] = margins
    return PackedPairs(
        packed.tokens,
        packed.segment_ids,
        packed.positions,
        both[:, 0],
        both[:, 1],
        margin,
        (np.arange(max_pairs) < len(ends)).astype(np.float32),
        len(ends),
        num_too_long,
    )


Item = TypeVar("Item", Demonstration, Preference)
Packed = TypeVar("Packed", PackedBatch, PackedPairs)


def take_packed(
    items: Sequence[Item], cursor: Cursor, pack: Callable[[Iterable[Item]], Packed]
) -> tuple[Packed, Cursor]:
    """The next packed batch of the shuffled stream at `cursor`, and the cursor right behind it.

    `pack` is one of the above with its shape bound, e.g.
    `functools.partial(pack_demonstrations, rows=24, row_length=64)`.

    Raises:
      DataError: a whole epoch went by and no item fits.
    """
    one_epoch, _ = take(cursor, cursor.size)
    packed = pack(items[index] for index in one_epoch)
    if packed.num_items == 0:
        rows, row_length = packed.tokens.shape
        raise DataError(
            f"none of {cursor.size} items fits in {rows} rows of {row_length} tokens: raise "
            "row_length (or rows), or lower the length limits of the data"
        )
    if packed.num_consumed == cursor.size:
        # A whole epoch left room. Each further one adds an item, so the endless stream ends too.
        packed = pack(items[index] for index in _endless(cursor))
    return packed, take(cursor, packed.num_consumed)[1]


def _endless(cursor: Cursor) -> Iterator[int]:
    while True:
        indices, cursor = take(cursor, cursor.size)
        yield from indices.tolist()
