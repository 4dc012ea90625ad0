"""Entry checks shared by the functions of this package; they cost nothing once compiled."""

from typing import Any

import jax.numpy as jnp


def require_float32(**arrays: Any) -> None:
    """Raise TypeError naming the first argument that is not a float32 array.

    Half precision would lose the log-ratio long before the optimiser sees it, and integer scores
    would turn the whole reward tensor into integers without a word.
    """
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype != jnp.float32:
            got = type(array).__name__ if dtype is None else dtype
            raise TypeError(
                f"{name} must be a float32 array, got {got}: cast it with "
                f"jnp.asarray({name}, jnp.float32) where it is made"
            )


def require_same_shape(**arrays: Any) -> None:
    """Raise ValueError listing the arguments if their shapes differ: nothing is broadcast."""
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"these must have one shape: {listed}")


def require_rows(rows: int, **arrays: Any) -> None:
    """Raise ValueError naming the first argument that is not one value a row, `[rows]`."""
    for name, array in arrays.items():
        if jnp.shape(array) != (rows,):
            raise ValueError(f"{name} must have shape ({rows},), one a row, got {jnp.shape(array)}")
