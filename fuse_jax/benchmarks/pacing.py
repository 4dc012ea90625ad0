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
from jaxtyping import Int, Shaped

from fuse_jax.fusion.intra_stage import native

SOURCE = Path(__file__).with_suffix(".cc")


@functools.cache
def _register() -> None:
    targets = {"fuse_jax_stamp": "Stamp", "fuse_jax_pace": "Pace"}
    native.register(native.load(SOURCE), targets)


def stamp(x: Shaped[Array, "..."]) -> Int[Array, "2"]:
    """The time at which `x` is there, for `pace`. Raises NativeError without a C++ compiler."""
    _register()
    out = jax.ShapeDtypeStruct((2,), jnp.int32)
    return jax.ffi.ffi_call("fuse_jax_stamp", out)(x)


def pace(
    x: Shaped[Array, "..."], ms: Any, since: Int[Array, "2"] | None = None
) -> Shaped[Array, "..."]:
    """`x`, not before `ms` milliseconds (may be traced) after `since` (default: `x` is there).

    Has no gradient. Raises NativeError without a C++ compiler.
    """
    since = stamp(x) if since is None else since
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # No side effect: its result is what is wanted late, and programs with effects take JAX's slow
    # way of dispatch, some milliseconds a call.
    return jax.ffi.ffi_call("fuse_jax_pace", out)(x, since, jnp.asarray(ms, jnp.float32))
