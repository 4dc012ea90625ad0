"""A stage cut over the `tensor` axis by hand: one shard's sizes, its two sums, its leaves' axes.

Megatron's cut (arXiv 1909.08053), as in placement/sharding.py, but inside a manual region, where
nothing inserts the sums: the input of the kernels cut by columns is the same on all shards and its
gradient is a sum over them; the output of those cut by rows is a sum, and its gradient the same.
"""

from __future__ import annotations

import re
from dataclasses import replace

import jax
from jax import Array, lax

from fuse_jax.models.architecture import Architecture
from fuse_jax.models.transformer import Shards
from fuse_jax.placement.sharding import RULES

TENSOR = "tensor"


@jax.custom_vjp
def _enter(x: Array) -> Array:
    return x


_enter.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, TENSOR),))


@jax.custom_vjp
def _leave(x: Array) -> Array:
    return lax.psum(x, TENSOR)


_leave.defvjp(lambda x: (lax.psum(x, TENSOR), None), lambda _, g: (g,))

SHARDS = Shards(_enter, _leave)


def shard_architecture(arch: Architecture, shards: int) -> Architecture:
    """Sizes of one of `shards` equal shards of every block.

    Raises ValueError naming the size that `shards` does not divide. (Unlike under the compiler's
    partitioning, key/value heads are never replicated here.)
    """
    for key in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(arch, key) % shards:
            raise ValueError(
                f"{shards} tensor shards do not divide model.{key}={getattr(arch, key)}: the "
                "compiled pipeline cuts every block in equal shards; use a divisor"
            )
    return replace(
        arch,
        num_heads=arch.num_heads // shards,
        num_kv_heads=arch.num_kv_heads // shards,
        intermediate_size=arch.intermediate_size // shards,
    )


def tensor_axis(path: str) -> int | None:
    """Which axis of the stacked leaf `path` ('query/kernel') of the blocks is cut, if any."""
    for pattern, alternatives in RULES:
        if re.fullmatch(pattern, f"blocks/{path}"):
            axes = alternatives[0]
            return next((i for i, a in enumerate(axes) if a in (TENSOR, "kv")), None)
    raise KeyError(f"no sharding rule for blocks/{path}: add one to placement/sharding.py")
