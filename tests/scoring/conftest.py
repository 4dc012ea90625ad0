"""Tiny models and samples that the scoring tests share."""

import drawn
import jax
import numpy as np
import pytest

from fuse_jax.models.architecture import Architecture
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model

ARCH = Architecture(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
VALID_VOCAB = 37  # the last three rows of the embedding are padding


@pytest.fixture(scope="session")
def models() -> dict[str, Model]:
    """One model a role, each with its own weights; scalar heads are not left at zero."""
    made = {}
    for i, role in enumerate(("actor", "reference", "critic", "reward_model")):
        params = drawn.parameters(ARCH, i, "lm" if i < 2 else "scalar")
        if i >= 2:
            kernel = jax.random.normal(jax.random.key(10 + i), (ARCH.hidden_size, 1))
            params["head"] = {"kernel": kernel, "bias": jax.numpy.full((1,), 0.25)}
        made[role] = Model(ARCH, params)
    return made


@pytest.fixture(scope="session")
def make_sample():
    """make_sample(seed, prompt length, response length): ids that can be sampled; id = seed."""

    def make(seed: int, prompt: int, response: int) -> Sample:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, VALID_VOCAB, prompt + response).astype(np.int32)
        log_probs = np.zeros(response, np.float32)
        return Sample(seed, tokens[:prompt], tokens[prompt:], log_probs, truncated=False)

    return make
