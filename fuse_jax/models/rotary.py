"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split layout as in Hugging Face."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from fuse_jax.models.architecture import Architecture, RopeScaling


def inverse_frequencies(arch: Architecture) -> np.ndarray:
    """Frequency of each pair, `theta^(-2i/head_dim)`, after scaling; float32 `[head_dim/2]`."""
    half = np.arange(0, arch.head_dim, 2, dtype=np.float64) / arch.head_dim
    frequencies = arch.rope_theta**-half
    if arch.rope_scaling is not None:
        frequencies = _scale(frequencies, arch.rope_scaling)
    return frequencies.astype(np.float32)


def _scale(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelength = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_position / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_position / scaling.low_freq_factor
    blend = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = np.where(wavelength > shortest_stretched, frequencies / scaling.factor, between)
    return np.where(wavelength < longest_kept, frequencies, stretched)


def rotation(arch: Architecture, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine of every angle, float32 `[B, T, 1, head_dim/2]`, for `positions` `[B, T]`."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(arch)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs (x[i], x[i + head_dim/2]) of `x` `[B, T, H, head_dim]`; dtype is kept."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
