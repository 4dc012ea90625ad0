"""Which axis of which parameter is cut over which mesh axis, by rules on its path.

Tensor parallelism as in Megatron (arXiv 1909.08053): query, key, value, gate and up are cut by
columns, attention_out and down by rows, so a block needs two reductions. `fsdp` cuts the other
axis of the same kernels (ZeRO-3, arXiv 1910.02054). The stacked layer axis is never cut: a scan
step or a pipeline stage then finds its layer on every device.

A rule matches the end of a path, so a tree that holds parameter trees (an optimiser's moments)
is served by the same rules.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import jax
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.config import MeshConfig
from fuse_jax.models.architecture import Architecture
from fuse_jax.placement.mesh import ROW_AXES

Axes = tuple[str | None, ...]

# Path (its end, '/'-joined) -> axes, or alternatives of which the first that `tensor` divides is
# taken. 'kv' is 'tensor' where key/value heads are cut and None where they are replicated.
RULES: tuple[tuple[str, tuple[Axes, ...]], ...] = (
    (r"embed/embedding", (("tensor", "fsdp"), ("fsdp", "tensor"))),
    (r"blocks/(query|gate|up)/kernel", ((None, "fsdp", "tensor"),)),
    (r"blocks/query/bias", ((None, "tensor"),)),
    (r"blocks/(key|value)/kernel", ((None, "fsdp", "kv"),)),
    (r"blocks/(key|value)/bias", ((None, "kv"),)),
    (r"blocks/(attention_out|down)/kernel", ((None, "tensor", "fsdp"),)),
    (r"blocks/(attention|mlp)_norm/scale", ((None, None),)),
    (r"final_norm/scale", ((None,),)),
    (r"head/kernel", (("fsdp", "tensor"), ("tensor", "fsdp"))),
    (r"head/bias", ((None,),)),
)


def check_divisible(arch: Architecture, config: MeshConfig) -> None:
    """Refuse a `mesh.tensor` that cannot cut `arch`. Raises ValueError with the keys and the fix.

    Query heads and the MLP must be divided by `tensor`; key/value heads too, or `tensor` must be a
    multiple of their number, and they are replicated. (`fsdp` and vocabularies never refuse: what
    they do not divide stays whole, and is counted in the log.)
    """
    _check_tensor(arch, config.tensor)


def _check_tensor(arch: Architecture, tensor: int) -> None:
    if tensor < 1:  # what is left after data and fsdp: checked once the mesh exists
        return
    for key in ("num_heads", "intermediate_size"):
        size = getattr(arch, key)
        if size % tensor:
            raise ValueError(
                f"mesh.tensor={tensor} does not divide model.{key}={size}: choose a divisor of "
                f"both model.num_heads={arch.num_heads} and "
                f"model.intermediate_size={arch.intermediate_size}"
            )
    kv = arch.num_kv_heads
    if kv % tensor and tensor % kv:
        raise ValueError(
            f"mesh.tensor={tensor} and model.num_kv_heads={kv}: one must divide the other (heads "
            "are cut where tensor divides them, replicated where they divide tensor)"
        )


def kv_heads_axis(arch: Architecture, mesh: Mesh) -> Literal["tensor"] | None:
    """Mesh axis over which key/value heads are cut, in weights and in caches; None = replicated."""
    return "tensor" if arch.num_kv_heads % mesh.shape["tensor"] == 0 else None


def parameter_specs(arch: Architecture, tree: Any, mesh: Mesh) -> Any:
    """Tree of NamedSharding for `tree`: parameters, their shapes (`jax.eval_shape`), or moments.

    Scalars (step counters) are replicated. An axis that its mesh axis does not divide stays whole;
    how many parameters and bytes that concerns is logged. Raises ValueError for a mesh that cannot
    cut `arch` (`check_divisible`) and KeyError for an array no rule knows.
    """
    _check_tensor(arch, mesh.shape["tensor"])
    kv = kv_heads_axis(arch, mesh)
    whole: list[str] = []

    def spec(path: Any, leaf: Any) -> NamedSharding:
        if not leaf.shape:
            return replicated(mesh)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = tuple(kv if a == "kv" else a for a in _wanted_axes(name, leaf.shape, mesh))
        kept = tuple(
            a if a is not None and size % mesh.shape[a] == 0 else None
            for a, size in zip(axes, leaf.shape, strict=True)
        )
        # Size 1 is the column of a scalar head: nothing there to cut.
        if any(a != k and size > 1 for a, k, size in zip(axes, kept, leaf.shape, strict=True)):
            whole.append(f"{name}{list(leaf.shape)}")
        return NamedSharding(mesh, P(*kept))

    specs = jax.tree_util.tree_map_with_path(spec, tree)
    if whole:
        logging.warning(
            "%d of %d parameters keep an axis whole that the mesh %s does not divide: %s",
            len(whole),
            len(jax.tree.leaves(specs)),
            dict(mesh.shape),
            ", ".join(whole),
        )
    return specs


def _wanted_axes(name: str, shape: tuple[int, ...], mesh: Mesh) -> Axes:
    for pattern, alternatives in RULES:
        if re.search(rf"(^|/){pattern}$", name):
            for axes in alternatives:
                if len(axes) != len(shape):
                    raise ValueError(f"parameter {name} {shape} should have {len(axes)} axes")
                fits = all(
                    a != "tensor" or n == 1 or n % mesh.shape[a] == 0
                    for a, n in zip(axes, shape, strict=True)
                )
                if fits:
                    return axes
            return alternatives[0]
    raise KeyError(
        f"no sharding rule for parameter {name} {shape}: add one to placement/sharding.py"
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows (axis 0) cut over data and fsdp, everything else whole."""
    return NamedSharding(mesh, P(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same whole array on every device."""
    return NamedSharding(mesh, P())


def shard(tree: Any, shardings: Any) -> Any:
    """Put `tree` where `shardings` (one for all, or a tree of the same shape) says."""
    return jax.device_put(tree, shardings)
