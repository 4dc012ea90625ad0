"""A tiny engine that all tests here share, so that it compiles once."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuse_jax.config import RolloutConfig
from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture
from fuse_jax.placement.mesh import single_device_mesh
from fuse_jax.rollout.engine import Engine

ARCH = Architecture(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    attention_bias=True,
)
VALID, STOPS = 37, (3, 11)
ROLLOUT = RolloutConfig(
    slots=8,
    max_prompt_length=20,
    max_new_tokens=50,
    chunk=4,
    prefill_rows=8,
    prompt_buckets=(8, 20),
    cache_block=16,
    temperature=0.8,
)


class Setup(NamedTuple):
    """An engine, random weights whose predictions depend on the context, and prompts."""

    engine: Engine
    params: dict
    seed_key: jax.Array
    prompts: list[np.ndarray]


def make_params(arch: Architecture) -> dict:
    """Weights far enough from the initial ones that attention and positions matter."""
    params = transformer.init(arch, jax.random.key(0))
    noise = iter(jax.random.split(jax.random.key(1), 64))

    def shake(path, leaf: jax.Array) -> jax.Array:
        scale = {"bias": 0.3, "scale": 0.1, "embedding": 0.5}.get(path[-1].key, 0.15)
        return leaf + scale * jax.random.normal(next(noise), leaf.shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(shake, params)


@pytest.fixture(scope="session")
def setup() -> Setup:
    """Eight slots, two prompt buckets, two stop tokens; log-probs with gaps."""
    rng = np.random.default_rng(0)
    # Both edges of both buckets are there.
    lengths = [1, 8, 9, 20, *rng.integers(1, 21, 22)]
    prompts = [rng.integers(0, VALID, n).astype(np.int32) for n in lengths]
    engine = Engine(ARCH, ROLLOUT, STOPS, VALID, gaps=True)
    return Setup(engine, make_params(ARCH), jax.random.key(5), prompts)


@pytest.fixture(scope="session")
def elsewhere(uncapped: Engine) -> Engine:
    """The engine without stop tokens on another device."""
    return dataclasses.replace(uncapped, mesh=single_device_mesh(jax.devices()[2]))


@pytest.fixture(scope="session")
def uncapped(setup: Setup) -> Engine:
    """The same engine without stop tokens: responses are as long as their caps."""
    return dataclasses.replace(setup.engine, stop_tokens=())


@pytest.fixture(scope="session")
def single_steps(uncapped: Engine) -> Engine:
    """One decode step a dispatch, as JetStream has it."""
    return dataclasses.replace(uncapped, rollout=dataclasses.replace(ROLLOUT, chunk=1))
