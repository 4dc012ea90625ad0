"""Arrays on their way from devices to the host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def start_copies(tree: Any) -> None:
    """Have the arrays of `tree` sent to the host as soon as they are there. Does not wait."""
    for array in jax.tree.leaves(tree):
        array.copy_to_host_async()


def to_host(tree: Any) -> Any:
    """`tree` as numpy arrays; waits for those that are not there yet."""
    return jax.tree.map(np.asarray, tree)
