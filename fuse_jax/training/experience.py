"""From scored samples to experience: rewards, advantages and returns, in float32.

The order of a score's treatment is fixed: normalise, clip, replace where the stop token is missing,
(permute, in a control run), put on the last token, subtract the KL cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fuse_jax.config import PPOConfig, RewardConfig
from fuse_jax.rl.advantages import gae
from fuse_jax.rl.kl import kl_estimate
from fuse_jax.rl.masked import masked_mean, masked_sum, masked_whiten
from fuse_jax.rl.moments import Moments, normalise_scores
from fuse_jax.rl.rewards import clip_scores, missing_eos_penalty, shape_rewards
from fuse_jax.samples import Sample
from fuse_jax.training.minibatch import Experience


class ScoredBatch(NamedTuple):
    """Samples laid out `[N, R]` with what scoring said of them, on the host.

    scores `[N]` float32 raw; valid `[N]` bool (False: excluded); ref_log_probs, values, kl `[N, R]`
    float32, kl is None unless measured over the whole vocabulary; last_values `[N]` float32.
    """

    tokens: Any
    prompt_lengths: Any
    response_lengths: Any
    truncated: Any
    log_probs: Any
    ref_log_probs: Any
    values: Any
    last_values: Any
    scores: Any
    valid: Any
    kl: Any = None


class Shaped(NamedTuple):
    """What `shape` gives, float32: rewards, advantages, returns, kl `[N, R]`; scores `[N]`."""

    rewards: Array
    advantages: Array
    returns: Array
    kl: Array
    scores: Array


def lay_out(
    samples: Sequence[Sample], max_tokens: int, pad_token: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens `[N, max_tokens]` int32, right-padded, and the prompt and response lengths `[N]`."""
    tokens = np.full((len(samples), max_tokens), pad_token, np.int32)
    for row, sample in enumerate(samples):
        tokens[row, : sample.length] = np.concatenate(
            [sample.prompt_tokens, sample.response_tokens]
        )
    prompts = np.array([len(sample.prompt_tokens) for sample in samples], np.int32)
    responses = np.array([len(sample.response_tokens) for sample in samples], np.int32)
    return tokens, prompts, responses


def ragged(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Float32 `[N, width]`, each row on the left, 0 behind it."""
    out = np.zeros((len(rows), width), np.float32)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


def trained_tokens(batch: ScoredBatch, xp: Any = np) -> Any:
    """Bool `[N, R]`: response tokens of samples that were not excluded; `xp` is numpy or jnp."""
    inside = xp.arange(batch.log_probs.shape[1]) < batch.response_lengths[:, None]
    return inside & batch.valid[:, None]


def treat_scores(
    scores: Array, truncated: Array, moments: Moments | None, reward: RewardConfig
) -> Array:
    """Raw scores `[N]` normalised by `moments`, clipped, and replaced where truncated."""
    if moments is not None:
        scores = normalise_scores(scores, moments)
    if reward.clip > 0:
        scores = clip_scores(scores, reward.clip)
    if reward.missing_eos_penalty is not None:
        scores = missing_eos_penalty(scores, truncated, reward.missing_eos_penalty)
    return scores


@partial(jax.jit, static_argnames=("reward", "ppo"))
def shape(
    batch: ScoredBatch,
    moments: Moments | None,
    kl_coef: Array,
    permutation: Array,
    *,
    reward: RewardConfig,
    ppo: PPOConfig,
) -> Shaped:
    """Rewards, advantages (whitened over the batch if asked) and returns of `batch`.

    `permutation` `[N]` reorders the treated scores (the identity, but in a control run). With the
    KL in the loss, rewards carry no KL cost.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    mask = trained_tokens(batch, jnp).astype(jnp.float32)
    scores = treat_scores(batch.scores, batch.truncated, moments, reward)
    scores = jnp.where(batch.valid, scores, 0.0)[permutation]
    if ppo.kl.estimator == "full":
        assert batch.kl is not None
        kl = batch.kl
    else:
        kl = kl_estimate(batch.log_probs, batch.ref_log_probs, ppo.kl.estimator)
    kl = jnp.where(mask > 0, kl, 0.0)
    cost = kl_coef if ppo.kl.placement == "reward" else jnp.zeros_like(kl_coef)
    rewards = shape_rewards(scores, kl, mask, kl_coef=cost)
    last = jnp.where(batch.truncated, batch.last_values, 0.0) if ppo.bootstrap_truncated else None
    advantages, returns = gae(
        rewards,
        batch.values,
        mask,
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        bootstrap_values=last,
    )
    if ppo.whiten_advantages:
        advantages = masked_whiten(advantages, mask)
    return Shaped(rewards, advantages, returns, kl, scores)


def make_experience(batch: ScoredBatch, shaped: Shaped) -> Experience:
    """What the update reads, on the host."""
    return Experience(
        tokens=batch.tokens,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        response_mask=trained_tokens(batch).astype(np.float32),
        log_probs=batch.log_probs,
        ref_log_probs=batch.ref_log_probs,
        values=batch.values,
        advantages=np.asarray(shaped.advantages),
        returns=np.asarray(shaped.returns),
        valid=batch.valid,
    )


def experience_metrics(batch: ScoredBatch, shaped: Shaped) -> dict[str, float]:
    """Of one rollout: raw score, treated reward, KL a response (k1, nats), lengths, exclusions."""
    valid = batch.valid
    lengths = batch.response_lengths
    mask = trained_tokens(batch)
    k1 = np.where(mask, batch.log_probs - batch.ref_log_probs, 0.0)
    explained = _explained_variance(batch.values, np.asarray(shaped.returns), mask)
    return {
        "score": float(np.mean(batch.scores[valid])) if valid.any() else float("nan"),
        "reward": float(np.asarray(shaped.scores)[valid].mean()) if valid.any() else float("nan"),
        "kl": float(k1.sum() / max(1, valid.sum())),
        "kl_estimate": float(masked_sum(shaped.kl, jnp.asarray(mask)) / max(1, valid.sum())),
        "return_mean": float(masked_mean(shaped.returns, jnp.asarray(mask))),
        "explained_variance": explained,
        "length_mean": float(lengths.mean()),
        "length_p50": float(np.percentile(lengths, 50)),
        "length_p99": float(np.percentile(lengths, 99)),
        "length_max": float(lengths.max()),
        "truncated": float(batch.truncated.sum()),
        "excluded": float((~valid).sum()),
    }


def _explained_variance(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns) over response tokens."""
    spread = returns[mask].var() if mask.any() else 0.0
    if spread == 0:
        return float("nan")
    return float(1 - (returns[mask] - values[mask]).var() / spread)
