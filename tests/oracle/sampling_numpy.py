"""Sampling as plain numpy loops over one row, written from the definitions."""

from __future__ import annotations

import numpy as np


def distribution(
    logits: np.ndarray,
    *,
    valid_vocab: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> np.ndarray:
    """Probabilities `[V]` (float64) of one row after temperature, top-k, top-p and the mask."""
    z = np.asarray(logits, np.float64).copy()
    z[valid_vocab:] = -np.inf
    if temperature == 0:
        return (np.arange(len(z)) == np.argmax(z)).astype(np.float64)
    z = z / temperature
    order = np.argsort(-z, kind="stable")
    kept = list(order[:top_k]) if top_k > 0 else list(order)
    kept = [i for i in kept if np.isfinite(z[i])]
    weights = np.exp(z[kept] - np.max(z))
    weights /= weights.sum()
    if top_p < 1.0:
        reached, count = 0.0, 0
        while reached < top_p and count < len(kept):
            reached += weights[count]
            count += 1
        kept, weights = kept[:count], weights[:count] / weights[:count].sum()
    out = np.zeros(len(z))
    out[kept] = weights
    return out


def gumbel_choice(probabilities: np.ndarray, noise: np.ndarray) -> tuple[int, float]:
    """Index of the largest log p + noise, and its lead over the next."""
    with np.errstate(divide="ignore"):
        perturbed = np.log(probabilities) + noise
    order = np.argsort(-perturbed)
    return int(order[0]), float(perturbed[order[0]] - perturbed[order[1]])
