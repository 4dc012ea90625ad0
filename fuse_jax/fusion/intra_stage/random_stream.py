"""A small random stream for the compiled searches: the same numbers on every machine and numba
version.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit


def new_stream(seed: int) -> np.ndarray:
    """State of a stream, uint64 [1], never 0 (xorshift64 would stay there)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64
    state = np.array([mixed or 1], np.uint64)
    for _ in range(20):
        _advance(state)
    return state


@njit(cache=True)
def _advance(state):
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return x


@njit(cache=True)
def uniform(state):
    """A float in [0, 1)."""
    return (_advance(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True)
def below(state, count):
    """A whole number in 0..count-1."""
    return int(uniform(state) * count)


@njit(cache=True)
def normal(state):
    """A standard normal number (Box and Muller)."""
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(state)))
    return radius * math.cos(2.0 * math.pi * uniform(state))
