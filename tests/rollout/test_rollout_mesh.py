"""Sharded generation draws the tokens of one device, wherever a draw is not a near tie."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fuse_jax.config import MeshConfig
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.rollout.batcher import generate_samples
from fuse_jax.rollout.warmup import count_compilations, precompile

MARGIN = 1e-4


def differing(left, right) -> int:
    """Samples that differ; each must do so first at a draw that was a near tie."""
    count = 0
    for i, one in left.items():
        other = right[i]
        length = min(len(one.response_tokens), len(other.response_tokens))
        same = one.response_tokens[:length] == other.response_tokens[:length]
        agreed = length if same.all() else int(np.argmin(same))
        np.testing.assert_allclose(one.log_probs[:agreed], other.log_probs[:agreed], atol=1e-5)
        if agreed < max(len(one.response_tokens), len(other.response_tokens)):
            assert one.gaps[agreed] < MARGIN
            count += 1
    return count


@pytest.mark.parametrize(
    "sizes", [pytest.param((8, 1, 1), marks=pytest.mark.slow), (2, 2, 2)], ids=str
)
def test_tokens_equal_those_of_one_device(setup, sizes):
    # One bucket for all prompts, to compile less: it moves only the last bits.
    rollout = dataclasses.replace(setup.engine.rollout, prompt_buckets=(20,))
    mesh = make_mesh(MeshConfig(*sizes))
    sharded = dataclasses.replace(setup.engine, rollout=rollout, mesh=mesh)

    def generate(engine):
        made = generate_samples(engine, setup.params, setup.prompts, seed_key=setup.seed_key)
        return {sample.sample_id: sample for sample in made}

    precompile(sharded, setup.params, setup.seed_key)
    with count_compilations() as late:
        over_mesh = generate(sharded)
    assert late.count == 0
    # Slots over data x fsdp, key/value heads over tensor: nothing holds the whole cache.
    shard = sharded.init_decode_state().keys.addressable_shards[0].data
    assert shard.shape[2:4] == (8 // (sizes[0] * sizes[1]), 2 // sizes[2])
    query = sharded.place_params(setup.params)["blocks"]["query"]["kernel"]
    assert query.addressable_shards[0].data.shape == (2, 32 // sizes[1], 32 // sizes[2])
    assert differing(generate(setup.engine), over_mesh) == 0


def test_rows_that_shards_do_not_divide_are_refused(setup):
    mesh = make_mesh(MeshConfig(8, 1, 1))
    with pytest.raises(ValueError, match=r"rollout\.prefill_rows=4.*8 shards"):
        rollout = dataclasses.replace(setup.engine.rollout, prefill_rows=4)
        dataclasses.replace(setup.engine, rollout=rollout, mesh=mesh)
