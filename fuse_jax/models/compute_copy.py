"""Parameters in the dtype that forward passes compute in, for models that are only read."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from fuse_jax.models.transformer import Params


def compute_copy(params: Params, dtype: Any) -> Params:
    """`params` with every leaf in `dtype` that a forward pass would cast to it anyway.

    Results keep every bit; memory and reads halve under bfloat16. Norm scales and a scalar head,
    which enter in float32, stay as they are. A leaf that has its dtype already is shared.
    """
    scalar_head = "bias" in params.get("head", {})

    def cast(path: Any, leaf: Array) -> Array:
        wide = path[-1].key == "scale" or (scalar_head and path[0].key == "head")
        return leaf if wide or leaf.dtype == dtype else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
