"""A sample on the host, and a batch of them as the arrays that models read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fuse_jax.buckets import Bucket


@dataclass
class Sample:
    """One prompt and the response the actor gave to it. It is the unit of inter-stage fusion.

    `log_probs[t]` (float32) is of the distribution response token t was really drawn from.
    `gaps[t]` is how close that draw was to another token (see rollout/sampling.py), or None.
    `truncated`: the length cap came before a stop token.
    """

    sample_id: int
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    log_probs: np.ndarray
    truncated: bool
    gaps: np.ndarray | None = None
    meta: dict = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Prompt and response together, in tokens."""
        return len(self.prompt_tokens) + len(self.response_tokens)


class SequenceBatch(NamedTuple):
    """Right-padded rows: `tokens` int32 `[B, T]`, `prompt_lengths`, `response_lengths` int32 `[B]`.

    A padding row is one prompt token and an empty response.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray


def sequence_batch(samples: Sequence[Sample], bucket: Bucket, pad_token: int) -> SequenceBatch:
    """Lay `samples` (at most `bucket.rows`) out in the fixed shape of `bucket`."""
    if len(samples) > bucket.rows:
        raise ValueError(f"{len(samples)} samples do not fit the {bucket.rows} rows of {bucket}")
    tokens = np.full((bucket.rows, bucket.length), pad_token, np.int32)
    prompt_lengths = np.ones(bucket.rows, np.int32)
    response_lengths = np.zeros(bucket.rows, np.int32)
    for row, sample in enumerate(samples):
        prompt, response = len(sample.prompt_tokens), len(sample.response_tokens)
        tokens[row, :prompt] = sample.prompt_tokens
        tokens[row, prompt : prompt + response] = sample.response_tokens
        prompt_lengths[row], response_lengths[row] = prompt, response
    return SequenceBatch(tokens, prompt_lengths, response_lengths)
