"""One stage of one model's pipeline, as pure functions of its weights and its input.

A stage is a slice of the stacked blocks. The first stage has the embedding before it; the last has
the final norm, the head and the loss behind it. What lies at those two ends is kept apart from the
blocks (`Weights`), and tied embeddings are one leaf there: the first and the last stage both add to
its gradient, and the sum over the stages counts each part once.

A stage keeps nothing but its input `x`: the backward recomputes the rest, for what a stage would
have to keep is some 65 times as large. So the last stage's forward has nothing to do (its backward
needs the recomputed output only), and is skipped.

`first` and `last` are Python bools (a program of one stage) or traced ones (one program for every
stage): traced ones are decided by the device, which computes nothing that is not its own.

Axes: B rows, T tokens, D hidden, L layers of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fuse_jax.fusion.intra_stage.control import Flag, choose, when
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.attention import causal_attention
from fuse_jax.models.transformer import Remat, Shards, apply_blocks, embed, final_norm
from fuse_jax.rl.metrics import combine_metrics

Metrics = dict[str, Array]
# loss(ends, hidden [B, T, D], batch, kl_coef) -> (float32 scalar, metrics); of `ends` it reads the
# head (the embedding where the two are tied).
Loss = Callable[[Any, Array, Any, Array], tuple[Array, Metrics]]


class Weights(NamedTuple):
    """Parameters of a stage: `blocks`, each leaf `[L, ...]`, and `ends`, the rest of the model.

    `ends` may be left empty on a stage that is neither first nor last, when the flags are bools.
    """

    blocks: Any
    ends: Any


class Sums(NamedTuple):
    """What a stage adds up over its micro-batches: float32 gradients, and the loss's metrics."""

    grads: Weights
    metrics: Metrics


@dataclass(frozen=True)
class StageFunctions:
    """The work of any stage of one model. Wrap a callable with `dataclasses.replace`.

    forward(weights, x, batch, *, first, last) -> y
    backward(weights, x, dy, batch, kl_coef, sums, *, first, last) -> (sums, dx)
    backward_input(weights, x, dy, batch, kl_coef, *, first, last) -> dx
    backward_weights(weights, x, dy, batch, kl_coef, sums, *, first, last) -> sums
    zero_sums(weights, batch, kl_coef) -> sums

    x, y, dx, dy: `[B, T, D]` in `dtype`. `x` is not read on the first stage nor `dy` on the last;
    `y` of the last stage and `dx` of the first mean nothing. `batch`: one micro-batch, of which the
    stage reads `tokens` `[B, T]`, and the loss the rest. `backward` does both halves of a split
    backward; `backward_weights` recomputes what `backward_input` did, so a split one costs more.
    """

    forward: Callable[..., Array]
    backward: Callable[..., tuple[Sums, Array]]
    backward_input: Callable[..., Array]
    backward_weights: Callable[..., Sums]
    zero_sums: Callable[..., Sums]
    hidden_size: int
    dtype: Any


def make_stages(
    arch: Architecture,
    loss: Loss,
    *,
    dtype: Any = jnp.float32,
    remat: Remat = "none",
    shards: Shards | None = None,
) -> StageFunctions:
    """The stage functions of a model.

    remat: what the backward of one stage keeps while it runs (jax.checkpoint's policies, as in
    `models.transformer`). shards: see `Block`; `arch` has the sizes of one shard then.
    """

    def run(blocks: Any, x: Array) -> Array:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        x, _, _ = apply_blocks(
            arch, blocks, x, positions, causal_attention, dtype=dtype, remat=remat, shards=shards
        )
        return x

    def entry(weights: Weights, x: Array, batch: Any, first: Flag) -> Array:
        return choose(first, lambda x: embed(weights.ends, batch.tokens, dtype=dtype), _same, x)

    def total(ends: Any, y: Array, batch: Any, kl_coef: Array) -> tuple[Array, Metrics]:
        return loss(ends, final_norm(arch, ends, y, dtype=dtype), batch, kl_coef)

    def forward(weights: Weights, x: Array, batch: Any, *, first: Flag, last: Flag) -> Array:
        def run_on(x: Array) -> Array:
            return run(weights.blocks, entry(weights, x, batch, first))

        return choose(last, _same, run_on, x)

    def backward(
        weights: Weights,
        x: Array,
        dy: Array,
        batch: Any,
        kl_coef: Array,
        sums: Sums,
        *,
        first: Flag,
        last: Flag,
    ) -> tuple[Sums, Array]:
        y, pull = jax.vjp(run, weights.blocks, entry(weights, x, batch, first))
        (blocks, ends), metrics = sums

        def loss_part(
            ends: Any, metrics: Metrics, dy: Array, y: Array
        ) -> tuple[Any, Metrics, Array]:
            head = head_of(weights.ends)
            gradient = jax.grad(total, argnums=(0, 1), has_aux=True)
            (by_head, dy), parts = gradient(head, y, batch, kl_coef)
            added = _add({name: ends[name] for name in by_head}, by_head)
            return {**ends, **added}, combine_metrics(metrics, parts), dy

        ends, metrics, dy = when(last, loss_part, ends, metrics, dy, given=(y,))
        by_blocks, dx = pull(dy)

        def embedding_part(ends: Any) -> tuple[Any]:
            table = ends["embed"]["embedding"]
            table = table.at[batch.tokens].add(dx.astype(table.dtype))
            return ({**ends, "embed": {"embedding": table}},)

        (ends,) = when(first, embedding_part, ends)
        return Sums(Weights(_add(blocks, by_blocks), ends), metrics), dx

    def backward_input(
        weights: Weights,
        x: Array,
        dy: Array,
        batch: Any,
        kl_coef: Array,
        *,
        first: Flag,
        last: Flag,
    ) -> Array:
        def by_input(dy: Array) -> Array:
            y, pull = jax.vjp(lambda x: run(weights.blocks, x), x)

            def from_loss(dy: Array) -> Array:
                of_output = jax.grad(lambda y: total(weights.ends, y, batch, kl_coef)[0])
                return of_output(y)

            (dx,) = pull(choose(last, from_loss, _same, dy))
            return dx

        # There is nothing before the first stage: its whole backward is the weights' half.
        return choose(first, _same, by_input, dy)

    def backward_weights(*arguments: Any, first: Flag, last: Flag) -> Sums:
        return backward(*arguments, first=first, last=last)[0]

    def zero_sums(weights: Weights, batch: Any, kl_coef: Array) -> Sums:
        # Shapes only, of one row of the hidden states: nothing runs.
        y = jax.ShapeDtypeStruct((*batch.tokens.shape, arch.hidden_size), dtype)
        _, metrics = jax.eval_shape(total, head_of(weights.ends), y, batch, kl_coef)
        grads = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        return Sums(grads, jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), metrics))

    return StageFunctions(
        forward, backward, backward_input, backward_weights, zero_sums, arch.hidden_size, dtype
    )


def split_params(params: Mapping[str, Any]) -> Weights:
    """A model's parameters as its stacked blocks and the rest; `join_params` is the inverse."""
    return Weights(params["blocks"], {n: leaf for n, leaf in params.items() if n != "blocks"})


def join_params(weights: Weights) -> dict[str, Any]:
    """The parameter (or gradient) tree of a model from its two parts."""
    return {**weights.ends, "blocks": weights.blocks}


def head_of(ends: Mapping[str, Any]) -> dict[str, Any]:
    """What the last stage reads of `ends`: final norm and head, or norm and tied embedding."""
    return {name: ends[name] for name in ("final_norm", "head" if "head" in ends else "embed")}


def _same(x: Array) -> Array:
    return x


def _add(sums: Any, parts: Any) -> Any:
    return jax.tree.map(lambda s, p: s + p.astype(s.dtype), sums, parts)
