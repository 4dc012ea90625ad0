"""Gradients of both models over a mini-batch by the compiled pipeline: the serial path's numbers.

`gradients(params, planned) -> (grads, metrics)` is the contract of `gradients.py`. What a schedule
is made of, the counts of real micro-batches, is known on the host when a mini-batch is cut; so the
tables are made there (`prepare`), and travel with the mini-batch as one pytree of fixed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.fusion.intra_stage.executor import collect, make_pipeline, spread
from fuse_jax.fusion.intra_stage.layout import Layout, deal_micro_batches
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.intra_stage.stages import (
    StageFunctions,
    join_params,
    make_stages,
    split_params,
)
from fuse_jax.fusion.intra_stage.tables import build_tables
from fuse_jax.fusion.intra_stage.tensor import SHARDS, shard_architecture
from fuse_jax.fusion.intra_stage.transport import Transport
from fuse_jax.training.gradients import (
    BOTH,
    HyperParameters,
    Metrics,
    actor_head_loss,
    critic_head_loss,
    finish_metrics,
)
from fuse_jax.training.minibatch import Minibatch


class PlannedMinibatch(NamedTuple):
    """A mini-batch and the tables of its schedule: int32 `[P, rows, columns]` and a count."""

    minibatch: Minibatch
    rows: Any
    steps: Any


def model_stages(hp: HyperParameters, tensor: int = 1) -> dict[str, StageFunctions]:
    """Stage functions of actor and critic with the losses of the PPO step."""

    def critic_loss(ends: Any, hidden: Array, batch: Any, kl_coef: Array) -> tuple[Array, Metrics]:
        del kl_coef
        return critic_head_loss(ends, hidden, batch, hp=hp)

    losses: dict[str, Any] = {"actor": partial(actor_head_loss, hp=hp), "critic": critic_loss}
    archs = {"actor": hp.actor, "critic": hp.critic}
    return {
        name: make_stages(
            archs[name] if tensor == 1 else shard_architecture(archs[name], tensor),
            losses[name],
            dtype=jnp.dtype(hp.compute.dtype),
            remat=hp.compute.remat,
            shards=None if tensor == 1 else SHARDS,
        )
        for name in BOTH
    }


class PipelineGradients:
    """The gradients function of one compiled pipeline. Make one for each executable.

    layout: what the program is compiled for; it trains the models that `layout.models` names.
    stages: as `model_stages` gives them (the default), or wrapped.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        hp: HyperParameters,
        transport: Transport,
        stages: Mapping[str, StageFunctions] | None = None,
    ) -> None:
        self.layout, self.mesh, self.transport = layout, mesh, transport
        stages = model_stages(hp, mesh.shape["tensor"]) if stages is None else stages
        self._run = make_pipeline(layout, mesh, stages, transport)

    def dealt(self, minibatch: Minibatch) -> dict[str, np.ndarray]:
        """By model, which micro-batch of a mini-batch (on the host) is which of the schedule's."""
        counts = [int(bucket.count) for bucket in minibatch.buckets]
        return {n: deal_micro_batches(counts, p.replicas) for n, p in self.layout.pipelines}

    def prepare(self, minibatch: Minibatch, schedule: Schedule) -> PlannedMinibatch:
        """A mini-batch and the tables of `schedule`, numpy, on the host.

        Raises ScheduleError if the schedule is not one of this program and these counts, or needs
        more than the program was compiled for.
        """
        ticked = self.transport.ticked
        tables = build_tables(schedule, self.dealt(minibatch), self.layout, ticked=ticked)
        return PlannedMinibatch(minibatch, tables.rows, np.int32(tables.steps))

    def shardings(self, planned: PlannedMinibatch) -> PlannedMinibatch:
        """Where each array lies: a batch's rows over data, tables over pipe, scalars everywhere."""

        def named(*axes: str | None) -> NamedSharding:
            return NamedSharding(self.mesh, P(*axes))

        minibatch = jax.tree.map(
            lambda x: named(None, "data") if np.ndim(x) else named(), planned.minibatch
        )
        return PlannedMinibatch(minibatch, named("pipe"), named())

    def place(self, planned: PlannedMinibatch) -> PlannedMinibatch:
        """On the mesh, without waiting for it."""
        return jax.device_put(planned, self.shardings(planned))

    def __call__(
        self,
        params: Mapping[str, Any],
        planned: PlannedMinibatch,
        *,
        hp: HyperParameters,
        train: tuple[str, ...] = BOTH,
    ) -> tuple[dict[str, Any], Metrics]:
        """`serial_gradients`, with the same sums in another order. To be called under jit.

        Raises ValueError if `train` are not the models that the program trains.
        """
        del hp  # bound in the stage functions
        if set(train) != set(self.layout.models):
            raise ValueError(
                f"train={train}, but this pipeline was compiled for {self.layout.models}: build "
                "one for each set of models that is trained"
            )
        pipelines = dict(self.layout.pipelines)
        weights = {}
        for name, pipeline in pipelines.items():
            whole = split_params(params[name])
            weights[name] = whole._replace(blocks=spread(whole.blocks, pipeline, self.mesh))
        batches = [bucket.micro_batches for bucket in planned.minibatch.buckets]
        kl_coef = jnp.asarray(planned.minibatch.kl_coef, jnp.float32)
        sums = self._run(weights, batches, kl_coef, planned.rows, planned.steps)
        grads, metrics = {}, {}
        for name, pipeline in pipelines.items():
            whole = collect(sums[name], pipeline)
            grads[name] = join_params(whole.grads)
            metrics |= whole.metrics
        return grads, finish_metrics(metrics)
