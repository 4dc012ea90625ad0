"""Reward model from preference pairs: one pure Bradley-Terry step on packed rows, and its judges.

A pair's two sequences may lie in different rows, and so in different groups of rows. With several
groups the gradient is taken in two passes (as in GradCache, arXiv 2101.06983): scores of all groups
first, nothing kept; the loss's gradient by the scores; then, group by group, that gradient through
the model. This gives the gradient of the whole batch at the memory of one group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.config import ComputeConfig
from fuse_jax.data.packing import PackedPairs
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.heads import scalars
from fuse_jax.models.transformer import Params, forward
from fuse_jax.placement.mesh import ROW_AXES, row_shards
from fuse_jax.placement.sharding import batch_sharding, replicated
from fuse_jax.rl.losses import bradley_terry_loss
from fuse_jax.training.minibatch import Leaf
from fuse_jax.training.optimizers import Optimizer
from fuse_jax.training.sft import group_rows
from fuse_jax.training.state import CompiledStep, TrainState, apply_gradients

Metrics = dict[str, Array]


class Rows(NamedTuple):
    """Packed rows in groups, int32 `[M, B, T]`; segment id 0 = padding."""

    tokens: Leaf
    segment_ids: Leaf
    positions: Leaf


class Pairs(NamedTuple):
    """Pairs over those rows. chosen_end, rejected_end: int32 `[P]`, index of each sequence's last
    token in the flattened `[M·B·T]` scores. margin, weights: float32 `[P]`; weights sum to 1."""

    chosen_end: Leaf
    rejected_end: Leaf
    margin: Leaf
    weights: Leaf


def cut_pairs(batch: PackedPairs, tokens: int, shards: int = 1) -> tuple[Rows, Pairs]:
    """The batch in groups of about `tokens` tokens, rows a multiple of `shards`; numpy arrays."""
    length = batch.tokens.shape[1]
    rows = Rows(
        *(group_rows(x, tokens, shards) for x in (batch.tokens, batch.segment_ids, batch.positions))
    )
    flat = np.array([length, 1], np.int32)
    weights = batch.valid / max(1.0, batch.valid.sum())
    ends = (batch.chosen_end @ flat, batch.rejected_end @ flat)
    return rows, Pairs(*ends, batch.margin, weights.astype(np.float32))


def token_scores(
    params: Params,
    rows: Rows,
    *,
    arch: Architecture,
    compute: ComputeConfig,
    sharding: Any = None,
) -> Array:
    """Score at every token of one group of rows, float32 `[B, T]`; read where sequences end."""
    hidden = forward(
        arch,
        params,
        rows.tokens,
        segment_ids=rows.segment_ids,
        positions=rows.positions,
        dtype=jnp.dtype(compute.dtype),
        remat=compute.remat,
        rows=sharding,
    )
    return scalars(params, hidden)


def pair_loss(scores: Array, pairs: Pairs, *, score_l2: float) -> tuple[Array, Metrics]:
    """Bradley-Terry loss of the batch from the scores of all its tokens, `[M, B, T]`.

    Metrics: loss, and those of `rl.losses.bradley_terry_loss` (accuracy, score_margin, ...).
    """
    flat = scores.reshape(-1)
    loss, metrics = bradley_terry_loss(
        flat[pairs.chosen_end],
        flat[pairs.rejected_end],
        jnp.asarray(pairs.weights),
        margin=jnp.asarray(pairs.margin),
        score_l2=score_l2,
    )
    return loss, {"loss": loss, **metrics}


def reward_gradient(
    params: Params,
    rows: Rows,
    pairs: Pairs,
    *,
    arch: Architecture,
    compute: ComputeConfig,
    score_l2: float,
    sharding: Any = None,
) -> tuple[Params, Metrics]:
    """Float32 gradient of the whole batch's loss, and its metrics."""
    score = partial(token_scores, arch=arch, compute=compute, sharding=sharding)
    loss = partial(pair_loss, pairs=pairs, score_l2=score_l2)
    if rows.tokens.shape[0] == 1:

        def whole(params: Params) -> tuple[Array, Metrics]:
            return loss(score(params, jax.tree.map(lambda x: x[0], rows))[None])

        return jax.grad(whole, has_aux=True)(params)

    scores = lax.map(lambda group: score(params, group), rows)
    by_score, metrics = jax.grad(loss, has_aux=True)(scores)

    def add(total: Params, group: tuple[Rows, Array]) -> tuple[Params, None]:
        _, pull = jax.vjp(lambda p: score(p, group[0]), params)
        return jax.tree.map(jnp.add, total, pull(group[1])[0]), None

    zero = jax.tree.map(jnp.zeros_like, params)
    return lax.scan(add, zero, (rows, by_score))[0], metrics


def reward_step(
    state: TrainState,
    batch: tuple[Rows, Pairs],
    *,
    arch: Architecture,
    compute: ComputeConfig,
    optimizer: Optimizer,
    score_l2: float = 0.01,
    sharding: Any = None,
) -> tuple[TrainState, Metrics]:
    """One update of `state.params['reward_model']` on a batch of pairs.

    loss = mean over pairs of -log sigmoid(chosen - rejected - margin) + score_l2 · mean square.
    `sharding`: of activations over rows (see `forward`).
    Metrics: those of `pair_loss` and of `apply_gradients`.
    """
    gradient, metrics = reward_gradient(
        state.params["reward_model"],
        *batch,
        arch=arch,
        compute=compute,
        score_l2=score_l2,
        sharding=sharding,
    )
    state, update_metrics = apply_gradients(
        state, {"reward_model": gradient}, {"reward_model": optimizer}
    )
    return state, {**metrics, **update_metrics}


def make_reward_step(
    mesh: Mesh,
    arch: Architecture,
    compute: ComputeConfig,
    optimizer: Optimizer,
    *,
    score_l2: float = 0.01,
) -> Callable[[TrainState, PackedPairs], tuple[TrainState, Metrics]]:
    """`reward_step` for `mesh`, jitted and donating the state; takes packed pairs of the host."""
    bound = partial(
        reward_step,
        arch=arch,
        compute=compute,
        optimizer=optimizer,
        score_l2=score_l2,
        sharding=batch_sharding(mesh),
    )
    run = CompiledStep(bound, {"reward_model": arch}, mesh)
    shards = row_shards(mesh)
    by_rows, everywhere = NamedSharding(mesh, P(None, ROW_AXES)), replicated(mesh)

    def step(state: TrainState, batch: PackedPairs) -> tuple[TrainState, Metrics]:
        rows, pairs = cut_pairs(batch, compute.micro_batch_tokens, shards)
        return run(state, (jax.device_put(rows, by_rows), jax.device_put(pairs, everywhere)))

    return step


def pair_accuracy(chosen: np.ndarray, rejected: np.ndarray) -> float:
    """Share of pairs whose chosen score is the higher, a tie counting one half; NaN without pairs.

    A NaN score is a pair lost.
    """
    chosen, rejected = np.asarray(chosen), np.asarray(rejected)
    if not chosen.size:
        return float("nan")
    return float(np.mean((chosen > rejected) + 0.5 * (chosen == rejected)))


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that a right answer scores above a wrong one, ties one half; NaN if one kind lacks.

    The Mann-Whitney statistic from mean ranks. `scores` `[N]`, `labels` `[N]` bool. Raises
    ValueError for a NaN score, which has no rank.
    """
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels, bool)
    if np.isnan(scores).any():
        raise ValueError(f"{int(np.isnan(scores).sum())} scores are NaN: leave those samples out")
    right, wrong = int(labels.sum()), int((~labels).sum())
    if not right or not wrong:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    return float((mean_rank[inverse][labels].sum() - right * (right + 1) / 2) / (right * wrong))
