"""How metrics of parts become metrics of the whole."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float


def combine_metrics(
    a: Mapping[str, Float[Array, ""]], b: Mapping[str, Float[Array, ""]]
) -> dict[str, Float[Array, ""]]:
    """Metrics of two parts of a mini-batch as metrics of both together.

    The losses return weighted sums, so they add; a name that ends in `_max` is a maximum and is
    combined by the larger of the two. Across devices: psum and pmax by the same rule.

    Raises:
      ValueError: the two do not have the same names.
    """
    if a.keys() != b.keys():
        raise ValueError(f"metrics of two parts differ in {sorted(a.keys() ^ b.keys())}")
    return {
        name: jnp.maximum(a[name], b[name]) if name.endswith("_max") else a[name] + b[name]
        for name in a
    }
