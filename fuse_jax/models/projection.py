"""The product of activations and a kernel, with a backward pass laid out for XLA's CPU dots."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array, lax


@jax.custom_vjp
def project(x: Array, kernel: Array) -> Array:
    """`x` `[..., K]` times `kernel` `[K, N]`.

    JAX's own rule for the kernel's gradient ends in a dot whose right side XLA's CPU compiler first
    copies into its transpose, which costs as much as the dot. Here both sides are read as they lie,
    and the smaller of K and N is the left one (the other order runs at half the rate).
    """
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return project(x, kernel), (x, kernel)


def _backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = saved
    rows = tuple(range(x.ndim - 1))
    by_rows = ((rows, rows), ((), ()))
    by_x = lax.dot_general(g, kernel, (((g.ndim - 1,), (1,)), ((), ())))
    if x.shape[-1] <= g.shape[-1]:
        return by_x, lax.dot_general(x, g, by_rows)
    # The barrier keeps XLA from turning the transpose back into the slow order.
    return by_x, lax.optimization_barrier(lax.dot_general(g, x, by_rows)).T


project.defvjp(_forward, _backward)


def dense_dot(x: Array, kernel: Array, dims: Any, precision: Any = None, **kwargs: Any) -> Array:
    """`project` in the place of `nn.Dense`'s `dot_general`."""
    del dims, precision, kwargs
    return project(x, kernel)
