"""What is measured before a first plan."""

import dataclasses

import pytest

from fuse_jax.fusion.inter_stage import measure


@pytest.mark.parametrize("stops", [(), tuple(range(16))], ids=["no stop tokens", "many"])
def test_decode_steps_are_those_of_whole_chunks(world, stops):
    """A chunk that ends with its last live slot would count a dispatch as few steps."""
    instance = world.instances[0]
    engine = dataclasses.replace(instance.engine, stop_tokens=stops)
    actor = engine.place_params(instance.on_mesh("actor", world.models["actor"]).params)
    times, _ = measure._decode_times(engine, actor, world.seed_key)
    rollout = engine.rollout
    assert {time.live for time in times} == {1, rollout.slots // 2, rollout.slots}
    assert len(times) == 9 and {time.steps for time in times} == {rollout.chunk}
