"""Tiny models and samples that the scoring tests share."""

import jax
import numpy as np
import pytest

from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model

ARCH = Architecture(
    vocab_size=37,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def make_sample(rng: np.random.Generator, sample_id: int, prompt: int, response: int) -> Sample:
    """Random ids below 33: the last four rows of the vocabulary are padding."""
    return Sample(
        sample_id,
        rng.integers(0, 33, prompt).astype(np.int32),
        rng.integers(0, 33, response).astype(np.int32),
        np.zeros(response, np.float32),
        truncated=False,
    )


def make_models() -> dict[str, Model]:
    """One model a role, each with its own weights; scalar heads are not left at zero."""
    models = {}
    for i, role in enumerate(("actor", "reference", "critic", "reward_model")):
        head = "lm" if i < 2 else "scalar"
        params = transformer.init(ARCH, jax.random.key(i), head=head)
        if head == "scalar":
            kernel = jax.random.normal(jax.random.key(10 + i), (ARCH.hidden_size, 1))
            params["head"] = {"kernel": kernel, "bias": np.full((1,), 0.25, np.float32)}
        models[role] = Model(ARCH, params)
    return models


@pytest.fixture(scope="session")
def models() -> dict[str, Model]:
    return make_models()
