"""Sharded generation draws the tokens of one device, wherever a draw is not a near tie."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fuse_jax.config import MeshConfig
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.placement.sharding import parameter_specs, shard
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


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)], ids=str)
def test_tokens_equal_those_of_one_device(setup, sizes):
    rollout = dataclasses.replace(setup.engine.rollout, prefill_rows=8, prompt_buckets=(20,))
    single = dataclasses.replace(setup.engine, rollout=rollout)
    mesh = make_mesh(MeshConfig(*sizes))
    sharded = dataclasses.replace(single, mesh=mesh)
    specs = parameter_specs(setup.engine.arch, setup.params, mesh)
    params = shard(setup.params, specs)

    def generate(engine, params):
        made = generate_samples(engine, params, setup.prompts, seed_key=setup.seed_key)
        return {sample.sample_id: sample for sample in made}

    precompile(sharded, params, setup.seed_key)
    with count_compilations() as late:
        over_mesh = generate(sharded, params)
    assert late.count == 0
    state = sharded.init_decode_state()
    spec = state.keys.sharding.spec  # type: ignore[attr-defined]
    assert spec[2] == ("data", "fsdp") and (sizes[2] == 1 or spec[3] == "tensor")
    assert differing(generate(single, setup.params), over_mesh) == 0


def test_rows_that_shards_do_not_divide_are_refused(setup):
    mesh = make_mesh(MeshConfig(8, 1, 1))
    with pytest.raises(ValueError, match=r"rollout\.prefill_rows=4.*8 shards"):
        dataclasses.replace(setup.engine, mesh=mesh)
