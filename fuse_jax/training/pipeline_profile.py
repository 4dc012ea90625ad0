"""How long the tasks of a pipeline take on this run's devices: what a schedule is searched with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.fusion.intra_stage.executor import block_specs
from fuse_jax.fusion.intra_stage.layout import PipelineLayout
from fuse_jax.fusion.intra_stage.stages import StageFunctions, Weights, split_params

WARM, MEASURED = 2, 5  # calls before the clock, and those of which the median counts
# times[model][kind] float64 [buckets, stages]: ms of a micro-batch of each bucket on each stage.
TaskTimes = dict[str, dict[str, np.ndarray]]


def measure_tasks(
    stages: Mapping[str, StageFunctions],
    pipelines: Sequence[tuple[str, PipelineLayout]],
    params: Mapping[str, Any],
    buckets: Sequence[Any],
    mesh: Mesh,
) -> TaskTimes:
    """Median times of warm tasks on the first group of data x tensor devices of a pipeline mesh.

    stages: of whole models. buckets: micro-batches on the host, leaves `[M, B, ...]`. One program
    serves all stages of a model (their place is an argument), so little is compiled.
    """
    group = Mesh(mesh.devices[0], ("data", "tensor"), axis_types=mesh.axis_types[1:])
    rows = NamedSharding(group, P("data"))
    times: TaskTimes = {}
    for name, pipeline in pipelines:
        weights = _first_stage(params[name], pipeline.stages)
        weights = jax.device_put(weights, _shardings(weights, group))
        kinds = {kind: np.zeros((len(buckets), pipeline.stages)) for kind in pipeline.kinds}
        for number, bucket in enumerate(buckets):
            batch = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf[0]), rows), bucket)
            tasks = _tasks(stages[name], weights, batch)
            for kind, run in tasks.items():
                by_place: dict[tuple[bool, bool], float] = {}
                for stage in range(pipeline.stages):
                    place = (stage == 0, stage == pipeline.stages - 1)
                    if place not in by_place:
                        by_place[place] = _median_ms(run, *place)
                    kinds[kind][number, stage] = by_place[place]
        times[name] = kinds
    return times


def _first_stage(params: Any, stages: int) -> Weights:
    blocks, ends = split_params(params)
    return Weights(jax.tree.map(lambda leaf: leaf[: leaf.shape[0] // stages], blocks), ends)


def _shardings(weights: Weights, group: Mesh) -> Weights:
    """Blocks cut over tensor as in the pipeline, the ends whole."""
    specs = block_specs(jax.tree.map(lambda leaf: leaf[None], weights.blocks))
    blocks = jax.tree.map(
        lambda spec: NamedSharding(group, P(*spec[1:])), specs, is_leaf=lambda s: isinstance(s, P)
    )
    return Weights(blocks, jax.tree.map(lambda _: NamedSharding(group, P()), weights.ends))


def _tasks(
    functions: StageFunctions, weights: Weights, batch: Any
) -> dict[str, Callable[..., Any]]:
    """By kind: run a task as the stage that (first, last) says."""
    shape = (*batch.tokens.shape, functions.hidden_size)
    x = jnp.zeros(shape, functions.dtype)
    kl_coef = jnp.zeros((), jnp.float32)
    sums = jax.jit(functions.zero_sums)(weights, batch, kl_coef)
    of = (weights, x, x, batch, kl_coef)

    forward, backward = jax.jit(functions.forward), jax.jit(functions.backward)
    return {
        "F": lambda **place: forward(weights, x, batch, **place),
        "B": lambda **place: backward(*of, sums, **place),
    }


def _median_ms(run: Callable[..., Any], first: bool, last: bool) -> float:
    flags = {"first": jnp.asarray(first), "last": jnp.asarray(last)}
    taken = []
    for _ in range(WARM + MEASURED):
        started = time.perf_counter()
        jax.block_until_ready(run(**flags))
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken[WARM:])
