"""A place in the endless shuffled stream of a dataset; saved in checkpoints, exact on resume.

The stream is epoch 0 in its order, then epoch 1 in its own, and so on. A batch that reaches the
end of an epoch is completed from the next one, so nothing is dropped and every item comes exactly
once per epoch. The cursor counts items, not loop turns: batch sizes may change between runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from fuse_jax.data.order import epoch_order, fingerprint
from fuse_jax.data.records import DataError, Demonstration, Preference, Prompt


class DatasetChanged(DataError):
    """A saved cursor belongs to another dataset, size or seed than the one given now."""


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The next item is number `position` (0 <= position < size) of `epoch`'s order."""

    size: int
    seed: int
    fingerprint: str
    epoch: int = 0
    position: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain ints and one string, for a JSON checkpoint item."""
        return dataclasses.asdict(self)

    @property
    def items_seen(self) -> int:
        """Items handed out since the start of epoch 0."""
        return self.epoch * self.size + self.position


def start(items: Sequence[Prompt | Preference | Demonstration], seed: int) -> Cursor:
    """The cursor before the first item of epoch 0."""
    if not items:
        raise DataError("an empty dataset has no order: check the data path and the filters")
    if seed < 0:
        raise DataError(f"seed must be >= 0, got {seed}")
    return Cursor(len(items), seed, fingerprint(items))


def take(cursor: Cursor, count: int) -> tuple[Int64[np.ndarray, " N"], Cursor]:
    """Indices of the next `count` items and the cursor after them."""
    if count < 0:
        raise ValueError(f"count must be >= 0, got {count}")
    parts, epoch, position = [], cursor.epoch, cursor.position
    while count > 0:
        part = epoch_order(cursor.size, cursor.seed, epoch)[position : position + count]
        parts.append(part)
        count -= len(part)
        position += len(part)
        if position == cursor.size:
            epoch, position = epoch + 1, 0
    indices = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return indices, dataclasses.replace(cursor, epoch=epoch, position=position)


def resume(
    saved: dict[str, Any], items: Sequence[Prompt | Preference | Demonstration], seed: int
) -> Cursor:
    """The saved cursor, after a check that it belongs to these items and this seed.

    Raises:
      DatasetChanged: it does not; going on would skip or repeat items without a word.
    """
    fresh = start(items, seed)
    try:
        cursor = Cursor(**saved)
    except TypeError as error:
        raise DataError(f"not a saved data cursor: {saved}") from error
    for name in ("size", "fingerprint", "seed"):
        was, now = getattr(cursor, name), getattr(fresh, name)
        if was != now:
            raise DatasetChanged(
                f"the data changed since the checkpoint ({name} was {was!r}, is {now!r}): give the "
                "old data paths, limits, tokenizer and seed back, or start a new workdir from the "
                "exported models to train on the new data from its beginning"
            )
    if not (0 <= cursor.position < cursor.size and cursor.epoch >= 0):
        raise DataError(f"the saved data cursor is out of range: {saved}")
    return cursor
