"""A mini-batch as one pytree of fixed shape, so that one executable serves all of them.

A sample goes to the bucket of its own length; each bucket holds its micro-batches on axis 0, with
room for the case that every sample of the mini-batch falls into it, and a count of those in use.
The step loops over the used ones: shapes stay, cost follows the real lengths.

Axes: N samples of the experience, M micro-batches, B rows, T tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.buckets import Bucket, bucket_of, make_buckets
from fuse_jax.placement.mesh import ROW_AXES
from fuse_jax.rl.losses import loss_weights

Leaf = Any  # numpy on the host, a jax array inside a step


class Experience(NamedTuple):
    """What one rollout gave: N samples, right-padded to the longest shape of the run, on the host.

    tokens: `[N, T]` int32, prompt then response. prompt_lengths, response_lengths: `[N]` int32.
    response_mask: `[N, R]` float32. log_probs: `[N, R]` float32, of the policy that sampled.
    ref_log_probs, values, advantages, returns: `[N, R]` float32; values as recorded with the
    rollout, advantages as the policy loss takes them (whitened if at all).
    valid: `[N]` bool, False = excluded (its score was NaN, late or failed): no weight anywhere.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    response_mask: np.ndarray
    log_probs: np.ndarray
    ref_log_probs: np.ndarray
    values: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray
    valid: np.ndarray


class MicroBatch(NamedTuple):
    """One micro-batch `[B, ...]`, or all of a bucket's, `[M, B, ...]`. Weight 0 marks padding.

    tokens `[B, T]` and prompt_lengths `[B]` int32; the rest `[B, R]` float32.
    """

    tokens: Leaf
    prompt_lengths: Leaf
    log_probs: Leaf
    ref_log_probs: Leaf
    values: Leaf
    advantages: Leaf
    returns: Leaf
    weights: Leaf


class BucketBatches(NamedTuple):
    """The micro-batches of one bucket, arrays `[M, B, ...]`; the first `count` (int32) are real."""

    micro_batches: Any
    count: Leaf


class Minibatch(NamedTuple):
    """All buckets, shortest first, and the KL coefficient (float32) of a KL term in the loss."""

    buckets: tuple[BucketBatches, ...]
    kl_coef: Leaf


def training_buckets(
    lengths: Sequence[int], tokens: int, minibatch_size: int, shards: int = 1
) -> tuple[Bucket, ...]:
    """Buckets of about `tokens` tokens a micro-batch, none with more rows than a mini-batch has.

    Rows are a multiple of `shards`, the number of shards a batch's rows are cut over.
    """
    enough = -(-minibatch_size // shards) * shards
    return tuple(
        Bucket(bucket.length, min(bucket.rows, enough))
        for bucket in make_buckets(lengths, tokens, shards)
    )


_loss_weights = jax.jit(loss_weights, static_argnames="mode")


def cut_minibatch(
    experience: Experience,
    indices: np.ndarray,
    buckets: tuple[Bucket, ...],
    *,
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean",
    shards: int = 1,
    kl_coef: float = 0.0,
) -> Minibatch:
    """The samples `indices` as a Minibatch of numpy arrays.

    Loss weights come from all of them before the cut. Shapes depend on `buckets`, `len(indices)`
    and R alone. Rows are dealt by length over the `shards` row shards of a device mesh (block s of
    the rows is shard s), so that each gets its share of long samples. Excluded samples and empty
    responses, which have no weight, take no row.

    Raises:
      ValueError: a sample fits no bucket, or a bucket's rows are not a multiple of `shards`.
    """
    indices = np.asarray(indices)
    valid = experience.valid[indices]
    weights = np.asarray(
        _loss_weights(experience.response_mask[indices], mode=aggregation, sample_valid=valid)
    )
    lengths = experience.prompt_lengths[indices] + experience.response_lengths[indices]
    used = np.flatnonzero(valid & (experience.response_lengths[indices] > 0))
    owner = np.array([bucket_of(int(lengths[i]), buckets) for i in used], np.int64)
    cut = []
    for number, bucket in enumerate(buckets):
        members = used[owner == number]
        longest_first = members[np.argsort(-lengths[members], kind="stable")]
        cut.append(_lay_out(experience, indices, weights, longest_first, bucket, shards))
    return Minibatch(tuple(cut), np.float32(kl_coef))


def _lay_out(
    experience: Experience,
    indices: np.ndarray,
    weights: np.ndarray,
    members: np.ndarray,
    bucket: Bucket,
    shards: int,
) -> BucketBatches:
    """Samples `indices[members]` in the micro-batches of `bucket`."""
    if bucket.rows % shards:
        raise ValueError(f"{bucket.rows} rows do not divide over {shards} shards: see {bucket}")
    room = -(-len(indices) // bucket.rows)
    response = min(bucket.length - 1, experience.response_mask.shape[1])
    at, row = np.divmod(np.arange(len(members)), bucket.rows)
    row = deal(row, bucket.rows, shards)
    source = indices[members]

    def place(values: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
        out = np.full((room, bucket.rows, width), fill, values.dtype)
        width = min(width, values.shape[1])
        out[at, row, :width] = values[:, :width]
        return out

    def aligned(values: np.ndarray) -> np.ndarray:
        return place(values, response)

    micro_batches = MicroBatch(
        tokens=place(experience.tokens[source], bucket.length),
        # A padding row is a prompt of one token: every position it reads exists.
        prompt_lengths=place(experience.prompt_lengths[source][:, None], 1, fill=1)[..., 0],
        log_probs=aligned(experience.log_probs[source]),
        ref_log_probs=aligned(experience.ref_log_probs[source]),
        values=aligned(experience.values[source]),
        advantages=aligned(experience.advantages[source]),
        returns=aligned(experience.returns[source]),
        weights=aligned(weights[members]),
    )
    return BucketBatches(micro_batches, np.int32(-(-len(members) // bucket.rows)))


def deal(rank: np.ndarray, rows: int, shards: int) -> np.ndarray:
    """Row of the sample with `rank` (0 = longest) in a micro-batch whose rows lie over `shards`.

    Back and forth like cards (0 1 2 3, 3 2 1 0, ...): the totals of the shards stay close.
    """
    turn, place = np.divmod(rank, shards)
    shard = np.where(turn % 2 == 0, place, shards - 1 - place)
    return shard * (rows // shards) + turn


def minibatch_shardings(minibatch: Minibatch, mesh: Mesh) -> Minibatch:
    """Rows cut over (data, fsdp), micro-batches and positions whole, scalars everywhere."""
    rows, everywhere = NamedSharding(mesh, P(None, ROW_AXES)), NamedSharding(mesh, P())
    return jax.tree.map(lambda x: rows if np.ndim(x) else everywhere, minibatch)
