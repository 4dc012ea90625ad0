"""Supervised warm start: one pure step on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.config import ComputeConfig
from fuse_jax.data.packing import PackedBatch
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.heads import token_statistics
from fuse_jax.models.transformer import Params, forward
from fuse_jax.placement.mesh import ROW_AXES, row_shards
from fuse_jax.placement.sharding import batch_sharding
from fuse_jax.rl.losses import loss_weights, next_token_loss
from fuse_jax.training.gradients import accumulate
from fuse_jax.training.minibatch import BucketBatches, Leaf
from fuse_jax.training.optimizers import Optimizer
from fuse_jax.training.state import CompiledStep, TrainState, apply_gradients

Metrics = dict[str, Array]


class PackedRows(NamedTuple):
    """A packed batch cut into groups of rows: arrays `[M, B, T]`, or one group, `[B, T]`.

    tokens, segment_ids (0 = padding), positions: int32. weights: float32, of the loss at each
    token as a target; they sum to 1 over the whole batch.
    """

    tokens: Leaf
    segment_ids: Leaf
    positions: Leaf
    weights: Leaf


def cut_rows(batch: PackedBatch, tokens: int, shards: int = 1) -> PackedRows:
    """The batch in groups of about `tokens` tokens, rows a multiple of `shards`, as numpy arrays.

    Weights are 1 / answer tokens of the whole batch. Rows are filled up with empty ones.
    """
    weights = np.asarray(_token_mean(batch.loss_mask))
    arrays = PackedRows(batch.tokens, batch.segment_ids, batch.positions, weights)
    return PackedRows(*(group_rows(x, tokens, shards) for x in arrays))


_token_mean = jax.jit(partial(loss_weights, mode="token_mean"))


def group_rows(rows: np.ndarray, tokens: int, shards: int) -> np.ndarray:
    """`rows` `[N, T]` as `[M, B, T]` with B·T about `tokens` and B a multiple of `shards`."""
    count, length = rows.shape
    most = -(-count // shards) * shards
    each = min(most, max(1, tokens // length // shards) * shards)
    groups = -(-count // each)
    # Groups of even size: 24 rows by 10 at most are 3 x 8.
    each = -(-count // groups // shards) * shards
    filled = np.zeros((groups * each, length), rows.dtype)
    filled[:count] = rows
    return filled.reshape(groups, each, length)


def sft_loss(
    params: Params,
    rows: PackedRows,
    *,
    arch: Architecture,
    compute: ComputeConfig,
    valid_vocab: int | None = None,
    sharding: Any = None,
) -> tuple[Array, Metrics]:
    """Cross-entropy of the answers' tokens in one group of rows: its part of the batch's mean."""
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
    statistics = token_statistics(
        params,
        hidden[:, :-1],
        rows.tokens[:, 1:],
        valid_vocab=valid_vocab,
        chunk=compute.log_prob_chunk,
    )
    # A segment's first token is nobody's target, whatever the mask says.
    inside = rows.segment_ids[:, 1:] == rows.segment_ids[:, :-1]
    loss = next_token_loss(statistics.log_probs, jnp.where(inside, rows.weights[:, 1:], 0.0))
    return loss, {"loss": loss}


def sft_step(
    state: TrainState,
    rows: PackedRows,
    *,
    arch: Architecture,
    compute: ComputeConfig,
    optimizer: Optimizer,
    valid_vocab: int | None = None,
    sharding: Any = None,
) -> tuple[TrainState, Metrics]:
    """One update of `state.params['actor']`; gradients of the groups of rows are added.

    `sharding`: of activations over rows (see `forward`).
    Metrics: loss (mean over the batch's answer tokens, nats) and those of `apply_gradients`.
    """
    loss = partial(sft_loss, arch=arch, compute=compute, valid_vocab=valid_vocab, sharding=sharding)
    everything = BucketBatches(rows, rows.tokens.shape[0])
    gradient, metrics = accumulate(loss, state.params["actor"], (everything,))
    state, update_metrics = apply_gradients(state, {"actor": gradient}, {"actor": optimizer})
    return state, {**metrics, **update_metrics}


def make_sft_step(
    mesh: Mesh,
    arch: Architecture,
    compute: ComputeConfig,
    optimizer: Optimizer,
    *,
    valid_vocab: int | None = None,
) -> Callable[[TrainState, PackedBatch], tuple[TrainState, Metrics]]:
    """`sft_step` for `mesh`, jitted and donating the state; takes packed batches of the host."""
    bound = partial(
        sft_step,
        arch=arch,
        compute=compute,
        optimizer=optimizer,
        valid_vocab=valid_vocab,
        sharding=batch_sharding(mesh),
    )
    run = CompiledStep(bound, {"actor": arch}, mesh)
    shards = row_shards(mesh)

    def step(state: TrainState, batch: PackedBatch) -> tuple[TrainState, Metrics]:
        rows = cut_rows(batch, compute.micro_batch_tokens, shards)
        return run(state, jax.device_put(rows, NamedSharding(mesh, P(None, ROW_AXES))))

    return step
