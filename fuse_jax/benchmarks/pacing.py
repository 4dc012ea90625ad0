"""Sleep that stands for device time, inside a compiled program on CPU.

With as many virtual devices as wanted on few cores, real compute measures the cores; a sleeping
task costs none, so what is measured is the pipeline around it. A host callback would not do: it
needs the interpreter's lock, and a program that holds one is dispatched synchronously.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Shaped

from fuse_jax.fusion.intra_stage import native

SOURCE = Path(__file__).with_suffix(".cc")


@functools.cache
def _register() -> None:
    native.register(native.load(SOURCE), {"fuse_jax_pace": "Pace"})


def pace(x: Shaped[Array, "..."], ms: Any) -> Shaped[Array, "..."]:
    """`x`, after `ms` milliseconds (float32, may be traced) of sleep once `x` is there.

    Has no gradient. Raises NativeError where there is no C++ compiler.
    """
    _register()
    call = jax.ffi.ffi_call(
        "fuse_jax_pace", jax.ShapeDtypeStruct(x.shape, x.dtype), has_side_effect=True
    )
    return call(x, jnp.asarray(ms, jnp.float32))
