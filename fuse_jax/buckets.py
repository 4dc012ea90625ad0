"""Length buckets: the finite set of shapes that scoring and training compile for.

A sample's bucket follows from its own length alone, and the rows of a bucket from the bucket alone,
so no array shape depends on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Sequences of at most `length` tokens, `rows` at a time."""

    length: int
    rows: int


def automatic_lengths(longest: int, *, shortest: int = 16) -> tuple[int, ...]:
    """Powers of two from `shortest`, closed by `longest` (rounded up to a multiple of 8)."""
    lengths, length = [], shortest
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, -(-longest // 8) * 8)


def make_buckets(lengths: Iterable[int], tokens: int, row_multiple: int) -> tuple[Bucket, ...]:
    """Buckets of `tokens // length` rows each, rounded down to `row_multiple` (at least one)."""
    made = []
    for length in sorted(set(lengths)):
        rows = max(1, tokens // length // row_multiple) * row_multiple
        made.append(Bucket(length, rows))
    return tuple(made)


def bucket_of(length: int, buckets: tuple[Bucket, ...]) -> int:
    """Index of the smallest bucket that holds `length` tokens."""
    for index, bucket in enumerate(buckets):
        if length <= bucket.length:
            return index
    raise ValueError(
        f"a sequence of {length} tokens fits no bucket (longest {buckets[-1].length}): raise "
        "compute.sequence_buckets, or lower rollout.max_prompt_length or rollout.max_new_tokens"
    )
