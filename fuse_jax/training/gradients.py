"""Gradients of both models over a mini-batch, one micro-batch after another.

`gradients(params, minibatch) -> (grads, metrics)` is the contract of the PPO step; this serial path
defines the numbers that any other path (a fused pipeline) has to give.

Losses are sums whose weights were settled for the whole mini-batch, so gradients of micro-batches
just add, in float32, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fuse_jax.config import ComputeConfig, PPOConfig
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.heads import before_response, response_tokens, scalars, token_statistics
from fuse_jax.models.transformer import forward
from fuse_jax.rl.losses import entropy_bonus, kl_loss, policy_loss, value_loss
from fuse_jax.rl.metrics import combine_metrics
from fuse_jax.training.minibatch import BucketBatches, MicroBatch, Minibatch

Metrics = dict[str, Array]
LossFunction = Callable[[Any, Any], tuple[Array, Metrics]]
BOTH = ("actor", "critic")


@dataclass(frozen=True)
class HyperParameters:
    """What a PPO step is compiled for: hashable, so it can be a static argument.

    temperature: the sampler's. valid_vocab: ids from here on are vocabulary padding; None = none.
    rows: sharding of activations over rows (see `forward`), set by `make_step`; None = left to XLA.
    updates: planned optimiser updates of (actor, critic), the length of their schedules.
    """

    actor: Architecture
    critic: Architecture
    ppo: PPOConfig
    compute: ComputeConfig
    temperature: float = 1.0
    valid_vocab: int | None = None
    updates: tuple[int, int] = (1, 1)
    rows: Any = None


def serial_gradients(
    params: Mapping[str, Any],
    minibatch: Minibatch,
    *,
    hp: HyperParameters,
    train: tuple[str, ...] = BOTH,
) -> tuple[dict[str, Any], Metrics]:
    """Gradients of the models in `train` over the whole mini-batch, and its metrics.

    grads: `{'actor': ..., 'critic': ...}`, float32, of the parameters' shapes, not clipped. A model
    that is not in `train` costs nothing and has no entry. metrics: float32 scalars, weighted means
    over the mini-batch's tokens (`..._max`: maxima), see `actor_loss` and `critic_loss`, and
    `critic_explained_variance`, of the returns by the critic's values before this update.
    """
    losses: dict[str, LossFunction] = {
        "actor": partial(actor_loss, kl_coef=jnp.asarray(minibatch.kl_coef, jnp.float32), hp=hp),
        "critic": partial(critic_loss, hp=hp),
    }
    grads, metrics = {}, {}
    for name in train:
        grads[name], sums = accumulate(losses[name], params[name], minibatch.buckets)
        metrics |= sums
    return grads, finish_metrics(metrics)


def actor_loss(
    params: Any, micro_batch: MicroBatch, *, kl_coef: Array, hp: HyperParameters
) -> tuple[Array, Metrics]:
    """This micro-batch's part of the actor's loss, float32, and of its metrics.

        policy loss - entropy_coef · entropy [+ kl_coef · KL(actor, reference), placement 'loss']

    Metrics: those of `rl.losses.policy_loss`, and actor_loss, policy_loss, entropy [, kl_loss].
    """
    hidden = _hidden(hp.actor, params, micro_batch, hp)
    return actor_head_loss(params, hidden, micro_batch, kl_coef, hp=hp)


def actor_head_loss(
    params: Any, hidden: Array, micro_batch: MicroBatch, kl_coef: Array, *, hp: HyperParameters
) -> tuple[Array, Metrics]:
    """`actor_loss` from the hidden states `[B, T, D]` after the final norm.

    Of `params` only the head is read (the embedding, where the two are tied).
    """
    ppo, batch = hp.ppo, micro_batch
    length = batch.weights.shape[-1]
    statistics = token_statistics(
        params,
        before_response(hidden, batch.prompt_lengths, length),
        response_tokens(batch.tokens, batch.prompt_lengths, length),
        temperature=hp.temperature,
        valid_vocab=hp.valid_vocab,
        chunk=hp.compute.log_prob_chunk,
    )
    loss, metrics = policy_loss(
        statistics.log_probs,
        batch.log_probs,
        batch.advantages,
        batch.weights,
        clip_eps_low=ppo.clip_eps,
        clip_eps_high=ppo.clip_eps if ppo.clip_eps_high is None else ppo.clip_eps_high,
        dual_clip=ppo.dual_clip,
    )
    entropy = entropy_bonus(statistics.entropy, batch.weights)
    metrics = {**metrics, "policy_loss": loss, "entropy": entropy}
    if ppo.entropy_coef:
        loss = loss - ppo.entropy_coef * entropy
    if ppo.kl.placement == "loss":
        kind: Any = ppo.kl.estimator  # k2 or k3: kl_loss refuses the others
        kl = kl_loss(statistics.log_probs, batch.ref_log_probs, batch.weights, kind=kind)
        loss, metrics["kl_loss"] = loss + kl_coef * kl, kl
    return loss, {**metrics, "actor_loss": loss}


def critic_loss(
    params: Any, micro_batch: MicroBatch, *, hp: HyperParameters
) -> tuple[Array, Metrics]:
    """This micro-batch's part of the critic's loss, float32, and of its metrics.

    Metrics: those of `rl.losses.value_loss`, and critic_loss.
    """
    hidden = _hidden(hp.critic, params, micro_batch, hp)
    return critic_head_loss(params, hidden, micro_batch, hp=hp)


def critic_head_loss(
    params: Any, hidden: Array, micro_batch: MicroBatch, *, hp: HyperParameters
) -> tuple[Array, Metrics]:
    """`critic_loss` from the hidden states `[B, T, D]` after the final norm."""
    batch = micro_batch
    states = before_response(hidden, batch.prompt_lengths, batch.weights.shape[-1])
    loss, metrics = value_loss(
        scalars(params, states),
        batch.values,
        batch.returns,
        batch.weights,
        value_clip_eps=hp.ppo.value_clip_eps,
    )
    return loss, {**metrics, "critic_loss": loss}


def _hidden(arch: Architecture, params: Any, batch: MicroBatch, hp: HyperParameters) -> Array:
    dtype = jnp.dtype(hp.compute.dtype)
    return forward(arch, params, batch.tokens, dtype=dtype, remat=hp.compute.remat, rows=hp.rows)


def accumulate(
    loss: LossFunction, params: Any, buckets: tuple[BucketBatches, ...]
) -> tuple[Any, Metrics]:
    """Float32 gradient and metrics of `loss(params, micro_batch)`, added over the real ones.

    The loop runs `count` times a bucket and is never differentiated through: each turn takes its
    own gradient, so one micro-batch's activations exist at a time.
    """
    gradient = jax.grad(loss, has_aux=True)

    def part(micro_batches: Any, index: Array | int) -> tuple[Any, Metrics]:
        picked = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(jnp.asarray(x), index, keepdims=False), micro_batches
        )
        grads, metrics = gradient(params, picked)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), metrics

    shapes = jax.eval_shape(lambda batches: part(batches, 0), buckets[0].micro_batches)
    total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    for bucket in buckets:

        def turn(index: Array, total: Any, bucket: BucketBatches = bucket) -> Any:
            grads, metrics = part(bucket.micro_batches, index)
            return jax.tree.map(jnp.add, total[0], grads), combine_metrics(total[1], metrics)

        total = lax.fori_loop(0, bucket.count, turn, total)
    return total


def finish_metrics(sums: Metrics) -> Metrics:
    """Metrics of a whole mini-batch from the sums over it: explained variance in place of moments.

    critic_explained_variance = 1 - E[(return - value)^2] / Var[return]; 0 where returns are equal.
    """
    if "return_sq" not in sums:
        return sums
    kept = {n: value for n, value in sums.items() if n not in ("return_sq", "return_mean")}
    variance = sums["return_sq"] - jnp.square(sums["return_mean"])
    varies = variance > 1e-6 * sums["return_sq"]
    ratio = sums["value_error_sq"] / jnp.where(varies, variance, 1.0)
    return {**kept, "critic_explained_variance": jnp.where(varies, 1.0 - ratio, 0.0)}
