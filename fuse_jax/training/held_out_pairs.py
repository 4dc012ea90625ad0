"""How well a reward model ranks preference pairs it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fuse_jax.buckets import automatic_lengths, make_buckets
from fuse_jax.data.records import Preference
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.transformer import Params
from fuse_jax.placement.mesh import row_shards
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model, PassOptions
from fuse_jax.scoring.scorer import Scorer
from fuse_jax.training.context import Run
from fuse_jax.training.reward_model import auc, pair_accuracy


def rank_held_out(run: Run, reward_model: Params) -> dict[str, float]:
    """`reward_model_accuracy` (pairs ranked rightly) and `reward_model_auc` (chosen over rejected
    across all pairs) on the evaluation preferences."""
    pairs = run.task.eval_preferences
    scores = score_pairs(
        run.mesh,
        run.archs["reward_model"],
        reward_model,
        pairs,
        tokens=run.config.compute.scoring_tokens,
        pad_token=run.task.vocabulary.pad_token_id,
        dtype=run.dtype,
    )
    labels = np.tile([True, False], len(pairs))
    return {
        "reward_model_accuracy": pair_accuracy(scores[:, 0], scores[:, 1]),
        "reward_model_auc": auc(scores.reshape(-1), labels),
    }


def score_pairs(
    mesh: Mesh,
    arch: Architecture,
    reward_model: Params,
    pairs: Sequence[Preference],
    *,
    tokens: int,
    pad_token: int = 0,
    dtype: Any = jnp.float32,
) -> np.ndarray:
    """Scores of (chosen, rejected), float64 `[N, 2]`, in buckets of about `tokens` tokens."""
    samples = [
        _sample(index, pair.prompt_tokens, answer)
        for index, pair in enumerate(pairs)
        for answer in (pair.chosen_tokens, pair.rejected_tokens)
    ]
    longest = max(sample.length for sample in samples)
    scorer = Scorer(
        mesh,
        make_buckets(automatic_lengths(longest), tokens, row_shards(mesh)),
        ["scores"],
        max_response=max(len(sample.response_tokens) for sample in samples),
        pad_token=pad_token,
        options=PassOptions(dtype=dtype),
    )
    scored = scorer.score(samples, {"reward_model": Model(arch, reward_model)})
    return np.array([one.score for one in scored], np.float64).reshape(-1, 2)


def _sample(index: int, prompt: np.ndarray, response: np.ndarray) -> Sample:
    return Sample(index, prompt, response, np.zeros(len(response), np.float32), truncated=False)
