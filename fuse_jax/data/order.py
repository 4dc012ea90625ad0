"""Which item comes when: shuffled epochs, held-out splits, sample ids, dataset fingerprints.

All of it is a function of the arguments alone. Permutations sort raw Philox words, whose stream
numpy keeps fixed for good (NEP 19); `Generator.permutation` may change with numpy's version, and
a run resumed after an upgrade would then see other data.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Int32, Int64

from fuse_jax.data.records import DataError, Demonstration, Preference, Prompt

Item = TypeVar("Item", Prompt, Preference, Demonstration)


def permutation(size: int, *entropy: int) -> Int64[np.ndarray, " N"]:
    """A permutation of range(size) that depends on `size` and `entropy` (ints >= 0) only."""
    words = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(size)
    return np.argsort(np.asarray(words), kind="stable").astype(np.int64)


@functools.lru_cache(maxsize=8)  # a batch asks for the same one or two epochs as the one before
def epoch_order(size: int, seed: int, epoch: int) -> Int64[np.ndarray, " N"]:
    """The order of a dataset's items in an epoch: each index once; a function of the arguments.

    Read-only, because it is shared.
    """
    order = permutation(size, seed, epoch)
    order.flags.writeable = False
    return order


def sample_ids(iteration: int, count: int) -> Int32[np.ndarray, " N"]:
    """Ids of the `count` samples of an iteration: iteration * count + index, never used twice.

    They seed the samples' random keys, so `count` must stay the same over a run.

    Raises:
      OverflowError: past 2**31 samples; start a new run (with another seed) from the checkpoint.
    """
    last = (iteration + 1) * count - 1
    if iteration < 0 or count < 1:
        raise ValueError(f"need iteration >= 0 and count >= 1, got {iteration} and {count}")
    if last > np.iinfo(np.int32).max:
        raise OverflowError(
            f"sample ids are int32 and iteration {iteration} x {count} samples passes 2**31: "
            "start a new run with another seed from the last checkpoint"
        )
    return np.arange(iteration * count, last + 1, dtype=np.int32)


def fingerprint(items: Sequence[Prompt | Preference | Demonstration]) -> str:
    """16 hex digits over every id, token and margin, in order: equal only for the same dataset."""
    digest = hashlib.sha256()
    for item in items:
        for part in _parts(item):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()[:16]


def _parts(item: Prompt | Preference | Demonstration) -> list[bytes]:
    if isinstance(item, Prompt):
        return [b"prompt", item.id.to_bytes(8, "little"), _bytes(item.tokens)]
    if isinstance(item, Preference):
        arrays = [item.prompt_tokens, item.chosen_tokens, item.rejected_tokens]
        return [b"preference", *map(_bytes, arrays), _bytes(np.float64(item.margin))]
    return [b"demonstration", _bytes(item.prompt_tokens), _bytes(item.response_tokens)]


def _bytes(array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def split_held_out(
    items: Sequence[Item], held_out: int, seed: int = 0
) -> tuple[list[Item], list[Item]]:
    """(train, held-out) in source order. Items of one prompt stay on one side, whole.

    Public sets repeat prompts; a split by rows would then test on what was trained. So the
    held-out side has at least `held_out` items, and may have a few more.

    Raises:
      DataError: nothing would be left to train on.
    """
    if held_out < 0:
        raise DataError(f"held_out must be >= 0, got {held_out}")
    groups: dict[bytes, list[int]] = {}
    for index, item in enumerate(items):
        tokens = item.tokens if isinstance(item, Prompt) else item.prompt_tokens
        groups.setdefault(_bytes(tokens), []).append(index)
    chosen: set[int] = set()
    members = list(groups.values())
    for group in permutation(len(members), seed):
        if len(chosen) >= held_out:
            break
        chosen.update(members[group])
    if len(chosen) >= len(items):
        raise DataError(
            f"{held_out} of {len(items)} items held out leaves none to train on: lower held_out"
        )
    train = [item for index, item in enumerate(items) if index not in chosen]
    return train, [items[index] for index in sorted(chosen)]
