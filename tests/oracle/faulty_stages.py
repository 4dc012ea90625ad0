"""Stage functions that fail or hang in the last stage's backward of the actor, by `kl_coef`."""

import dataclasses

import faults
import jax.numpy as jnp

from fuse_jax.benchmarks.pacing import pace

FAIL, HANG = -1.0, -2.0
HANG_MS = 2500.0


def wrap(name, stages):
    """As `Pipelines(wrap=)` takes it."""
    if name != "actor":
        return stages

    def backward(weights, x, dy, batch, kl_coef, sums, *, first, last):
        sums, dx = stages.backward(weights, x, dy, batch, kl_coef, sums, first=first, last=last)
        dx = faults.fault(dx, (kl_coef == FAIL) & jnp.asarray(last))
        ms = jnp.where((kl_coef == HANG) & jnp.asarray(last), HANG_MS, 0.0)
        return sums, pace(dx, ms)

    return dataclasses.replace(stages, backward=backward)
