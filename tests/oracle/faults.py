"""An operation that fails on demand inside a compiled program."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from fuse_jax.fusion.intra_stage import native


@functools.cache
def _register():
    library = native.load(Path(__file__).with_suffix(".cc"))
    native.register(library, {"fuse_jax_test_fault": "Fault"})


def fault(x, on):
    """`x`, or an error of the running program where `on`."""
    _register()
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("fuse_jax_test_fault", out, has_side_effect=True)(
        x, jnp.asarray(on, jnp.int32)
    )
