"""Instances of two devices each, cut over tensor: hand-off and migration keep every bit."""

import dataclasses

import jax
import pytest

from fuse_jax.config import MeshConfig
from fuse_jax.fusion.inter_stage import runtime
from fuse_jax.fusion.inter_stage.instances import cut_mesh
from fuse_jax.fusion.inter_stage.measure import warm_up
from fuse_jax.fusion.inter_stage.policy import Plan
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.placement.sharding import parameter_specs
from fuse_jax.rollout.warmup import count_compilations
from fuse_jax.scoring.columns import Model
from fuse_jax.scoring.scorer import Scorer


@pytest.mark.slow
def test_instances_may_be_tensor_parallel_inside(world, same):
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    instances = []
    for one, part in zip(world.instances, cut_mesh(mesh, 2), strict=False):
        scorer = Scorer(
            part,
            one.scorer.buckets,
            one.scorer.columns,
            max_response=32,
            options=one.scorer.options,
        )
        engine = dataclasses.replace(one.engine, mesh=part)
        instances.append(dataclasses.replace(one, engine=engine, scorer=scorer, _shardings={}))
    models = {}
    for role, model in world.models.items():
        specs = parameter_specs(model.arch, model.params, mesh)
        models[role] = Model(model.arch, jax.device_put(model.params, specs))
    tensor = world._replace(mesh=mesh, instances=instances, models=models)
    assert warm_up(instances, models, world.seed_key, ways=("kv",)) > 0
    requests = tensor.requests(8)
    plan = Plan("fixed", threshold=4, keep=1, way="kv")
    moved = 0
    for _ in range(8):
        with count_compilations() as late:
            outcome = runtime.run(instances, tensor.job(requests, plan))
        assert late.count == 0
        same(outcome.samples, outcome.scored, tensor.expected(requests))
        moved += outcome.counts.migrated
    assert moved > 0
