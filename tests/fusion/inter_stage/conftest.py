"""Four tiny instances that all live tests here share, so that they compile once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.benchmarks import paced
from fuse_jax.buckets import Bucket
from fuse_jax.config import MeshConfig, RolloutConfig
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable
from fuse_jax.fusion.inter_stage.instances import Instance, cut_mesh, instance_rollout
from fuse_jax.fusion.inter_stage.job import Job
from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.rollout.batcher import Request, generate_samples
from fuse_jax.rollout.engine import Engine
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model, PassOptions, Scored
from fuse_jax.scoring.scorer import Scorer

INSTANCES = 4
VALID, STOPS = 37, (3, 11, 20)
ARCH = Architecture(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
ROLLOUT = RolloutConfig(  # of all instances together
    slots=16,
    max_prompt_length=12,
    max_new_tokens=32,
    chunk=4,
    prefill_rows=8,
    prompt_buckets=(12,),
    cache_block=16,
)
BUCKETS = (Bucket(16, 4), Bucket(44, 2))
COLUMNS = ("ref_log_probs", "values", "scores")
COSTS = Costs(
    DecodeTable((1,), (16,), ((1.0,),)),
    {12: 1.0, 16: 1.0, 32: 1.0, 44: 1.0},
    dict.fromkeys(COLUMNS, (2.0, 2.0)),
    move_ms=1.0,
)


def random_params(arch: Architecture, seed: int, head: str) -> Any:
    """Weights far enough from the usual initial ones that attention and positions matter.

    Drawn without JAX, whose compiling would cost more than all the rest of a test.
    """
    rng = np.random.default_rng(seed)
    make = functools.partial(transformer.init, arch, head=head)  # type: ignore[arg-type]
    shapes = jax.eval_shape(make, jax.random.key(0))

    def draw(path: Any, leaf: Any) -> np.ndarray:
        scale, middle = (0.1, 1.0) if path[-1].key == "scale" else (0.4, 0.0)
        return (middle + scale * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


class World(NamedTuple):
    """Four instances, a model a role on the mesh of all of them, and requests."""

    mesh: Any
    instances: list[Instance]
    models: dict[str, Model]
    seed_key: Any

    def requests(self, count: int, caps: Sequence[int] | int = 32, seed: int = 0) -> list[Request]:
        """Prompts of 1 to 12 tokens, both ends among them."""
        rng = np.random.default_rng(seed)
        lengths = [*(1, 12)[: min(count, 2)], *rng.integers(1, 13, max(count - 2, 0))]
        caps = [caps] * count if isinstance(caps, int) else list(caps)
        prompts = [rng.integers(0, VALID, n).astype(np.int32) for n in lengths]
        ids = 1000 * seed + np.arange(count)
        return [Request(int(i), p, c) for i, p, c in zip(ids, prompts, caps, strict=True)]

    def job(self, requests: list[Request], plan: Any, **changes: Any) -> Job:
        job = Job(requests, self.models, self.seed_key, plan, COSTS)  # type: ignore[arg-type]
        return dataclasses.replace(job, **changes)

    def paced(self, pace: paced.Pace, lengths: tuple[int, ...]) -> World:
        """Instances that generate at `pace`; sample i ends after `lengths[i]` tokens."""
        slow = []
        for one in self.instances:
            fields = {f.name: getattr(one.engine, f.name) for f in dataclasses.fields(Engine)}
            clock = paced.Clock(one.engine.mesh.devices.flat[0])
            engine = paced.PacedEngine(**fields, pace=pace, lengths=lengths, clock=clock)
            slow.append(dataclasses.replace(one, engine=engine))
        return self._replace(instances=slow)

    def expected(self, requests: list[Request]) -> tuple[list[Sample], list[Scored]]:
        """The serial path on one instance alone: generate everything, then score everything."""
        first = self.instances[0]
        actor = first.on_mesh("actor", self.models["actor"]).params
        samples = generate_samples(
            first.engine,
            actor,
            [request.prompt_tokens for request in requests],
            seed_key=self.seed_key,
            sample_ids=[request.sample_id for request in requests],
            max_new_tokens=[request.max_new_tokens for request in requests],
        )
        by_id = {sample.sample_id: sample for sample in samples}
        ordered = [by_id[request.sample_id] for request in requests]
        models = {role: first.on_mesh(role, model) for role, model in self.models.items()}
        return ordered, first.scorer.score(ordered, models)


@pytest.fixture(scope="session")
def world() -> World:
    mesh = make_mesh(MeshConfig(data=INSTANCES), jax.devices()[:INSTANCES])
    rollout = instance_rollout(ROLLOUT, INSTANCES)
    options = PassOptions(valid_vocab=VALID)
    instances = []
    for index, part in enumerate(cut_mesh(mesh, INSTANCES)):
        engine = Engine(ARCH, rollout, STOPS, VALID, gaps=True, mesh=part)
        scorer = Scorer(part, BUCKETS, COLUMNS, max_response=32, options=options)
        instances.append(Instance(index, engine, scorer))
    everywhere = NamedSharding(mesh, P())  # as a run holds its parameters
    models = {}
    for seed, role in enumerate(("actor", "reference", "critic", "reward_model")):
        params = random_params(ARCH, seed, "lm" if seed < 2 else "scalar")
        models[role] = Model(ARCH, jax.device_put(params, everywhere))
    return World(mesh, instances, models, jax.random.key(5))


@pytest.fixture(scope="session")
def draw_params() -> Callable[..., Any]:
    """`random_params`, for the tests."""
    return random_params


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    """Asserts that samples and what scoring said of them are equal, bit by bit."""

    def check(samples: Sequence[Sample], scored: Sequence[Scored], expected: tuple) -> None:
        for mine, other in zip(samples, expected[0], strict=True):
            assert mine.sample_id == other.sample_id
            np.testing.assert_array_equal(mine.response_tokens, other.response_tokens)
            np.testing.assert_array_equal(mine.log_probs, other.log_probs)
            assert mine.truncated == other.truncated
        for mine, other in zip(scored, expected[1], strict=True):
            for name in ("ref_log_probs", "values", "last_value", "score"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))

    return check
