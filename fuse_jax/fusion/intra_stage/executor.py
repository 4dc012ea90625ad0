"""Actor and critic trained in one compiled pipeline: a loop over steps, each device its own task.

One `shard_map` over the mesh (pipe, data, tensor), all axes manual. Each turn of the loop a device
reads its row of the tables, and does what it says: receive, compute, send. The code of a task
stands there once for each model, kind and shape of micro-batch, whatever the schedule, the number
of micro-batches and of devices; another schedule is another table.

Micro-batches of different shapes have a branch each, on flat buffers: a stage works on the real
shape, so that cost follows length, and only what ticks exchange is padded to the largest. A
micro-batch that is empty is not in the tables. The loop ends with the last step in use.

Gradients are added up in the loop's carry, on each device for its own stage, in the order of the
micro-batches: every schedule gives the same bits.

Axes: P devices of the pipe, N stages, K replicas, L layers, M micro-batches, B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.fusion.intra_stage.control import when
from fuse_jax.fusion.intra_stage.layout import Branch, Layout, PipelineLayout
from fuse_jax.fusion.intra_stage.stages import StageFunctions, Sums, Weights
from fuse_jax.fusion.intra_stage.tables import Row
from fuse_jax.fusion.intra_stage.tensor import tensor_axis
from fuse_jax.fusion.intra_stage.transport import AXES, Transport

Batches = Sequence[Any]  # a bucket's micro-batches each, leaves [M, B, ...]
Pipeline = Callable[..., dict[str, Sums]]


class _State(NamedTuple):
    """The loop's carry: slots `[S + 1, elements]` and sums by model, and the transport's `run`."""

    pools: dict[str, Array]
    sums: dict[str, Sums]
    run: Array


def pipeline_mesh(pipe: int, data: int = 1, tensor: int = 1, devices: Any = None) -> Mesh:
    """The mesh (pipe, data, tensor) over the first devices."""
    devices = list(jax.devices() if devices is None else devices)
    if pipe * data * tensor > len(devices):
        raise ValueError(
            f"a {pipe}x{data}x{tensor} pipeline needs more than {len(devices)} devices"
        )
    used = np.array(devices[: pipe * data * tensor]).reshape(pipe, data, tensor)
    # Not jax.make_mesh, which may order devices anew: the run's mesh has them in this order too.
    return Mesh(used, AXES, axis_types=(AxisType.Auto,) * 3)


def make_pipeline(
    layout: Layout, mesh: Mesh, stages: Mapping[str, StageFunctions], transport: Transport
) -> Pipeline:
    """The compiled pipeline's function, to be called under jit on global arrays.

        run(weights, batches, kl_coef, rows, steps) -> {model: Sums}

    weights: by model, `blocks` as `spread` gives them, `ends` whole. batches: for each bucket its
    micro-batches, leaves `[M, B, ...]`. rows, steps: `Tables`. The Sums are those of each device,
    leaves `[P, ...]`, added over data shards: `collect` makes a model's gradients of them.
    """
    if mesh.axis_names != AXES or mesh.shape["pipe"] != layout.devices:
        raise ValueError(
            f"the mesh is {dict(mesh.shape)}: it must have the axes {AXES} and the "
            f"{layout.devices} pipeline devices of the schedule"
        )

    def run(
        weights: dict[str, Weights], batches: Batches, kl_coef: Array, rows: Array, steps: Array
    ) -> dict[str, Sums]:
        specs = {n: Weights(block_specs(w.blocks), P()) for n, w in weights.items()}
        own: Any = P("pipe")
        out = {n: Sums(Weights(s.blocks, own), own) for n, s in specs.items()}

        def local(*arguments: Any) -> dict[str, Sums]:
            return _Device(layout, mesh, stages, transport).run(*arguments)

        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, P(None, "data"), P(), P("pipe"), P()),
            out_specs=out,
            check_vma=False,
        )
        return mapped(weights, tuple(batches), kl_coef, rows, steps)

    return run


class _Device:
    """One device's part, inside the manual region. Its arrays are traced: nothing is kept."""

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        stages: Mapping[str, StageFunctions],
        transport: Transport,
    ) -> None:
        self.layout, self.mesh, self.stages, self.transport = layout, mesh, stages, transport

    def run(
        self,
        weights: dict[str, Weights],
        batches: Batches,
        kl_coef: Array,
        rows: Array,
        steps: Array,
    ) -> dict[str, Sums]:
        # Leading axis: this device's one entry of the pipe axis.
        self.weights = {n: Weights(_first(w.blocks), w.ends) for n, w in weights.items()}
        self.batches, self.kl_coef = batches, kl_coef
        self.flags = {name: self._ends(pipeline) for name, pipeline in self.layout.pipelines}
        self.room = max(self._elements(n, b) for n in self.layout.models for b in self.batches)
        rows = rows[0]

        def step(at: Array, state: _State) -> _State:
            entries = lax.dynamic_index_in_dim(rows, at, keepdims=False)
            row = Row(*(entries[i] for i in range(len(Row._fields))))
            sent = self.transport.nothing(self.room, self._dtype)
            for number, branch in enumerate(self.layout.branches, start=1):
                task = partial(self._task, branch)
                state, sent = when(row.branch == number, task, state, sent, given=(row,))
            return self._deliver(state, row, self.transport.exchange(row, sent))

        state = lax.fori_loop(0, steps, step, self._start())
        sums = self._reduced(state)
        return jax.tree.map(lambda leaf: leaf[None], sums)

    def _ends(self, pipeline: PipelineLayout) -> dict[str, Array]:
        """Whether this device's stage of a model is its first and its last."""
        position = lax.axis_index("pipe") % pipeline.stages
        low, high = position == 0, position == pipeline.stages - 1
        first, last = (low, high) if pipeline.direction == "up" else (high, low)
        return {"first": first, "last": last}

    def _shape(self, model: str, micro_batches: Any) -> tuple[int, ...]:
        """`[B, T, D]` of a model's activations for a bucket."""
        return (*micro_batches.tokens.shape[1:], self.stages[model].hidden_size)

    def _elements(self, model: str, micro_batches: Any) -> int:
        return int(np.prod(self._shape(model, micro_batches)))

    def _start(self) -> _State:
        pools, sums = {}, {}
        for model, slots in zip(self.layout.models, self.layout.slots):
            functions = self.stages[model]
            width = max(self._elements(model, batches) for batches in self.batches)
            # NaN: a task that read a slot nothing was received into would show it.
            pools[model] = jnp.full((slots + 1, width), jnp.nan, functions.dtype)
            example = jax.tree.map(lambda x: x[0], self.batches[0])
            sums[model] = functions.zero_sums(self.weights[model], example, self.kl_coef)
        return _State(pools, sums, self.transport.begin())

    @property
    def _dtype(self) -> Any:
        return self.stages[self.layout.models[0]].dtype

    def _task(self, branch: Branch, state: _State, sent: Any, row: Row) -> tuple[_State, Any]:
        """One task of one kind on one shape of micro-batch: receive, compute, send."""
        del sent  # of the task that this device does not have in this step
        name, kind, bucket = branch
        functions, weights, ends = self.stages[name], self.weights[name], self.flags[name]
        shape = self._shape(name, self.batches[bucket])
        size = int(np.prod(shape))
        pool, sums = state.pools[name], state.sums[name]
        run, message = self.transport.receive(
            state.run, row, 1 if kind == "W" else size, pool.dtype
        )
        if message is not None and kind != "W":
            into = row.x_slot if kind == "F" else row.g_slot
            pool = lax.dynamic_update_slice(pool, message[None], (into, 0))

        def slot(number: Any) -> Array:
            return lax.dynamic_slice(pool, (number, 0), (1, size)).reshape(shape)

        batch = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, row.index, keepdims=False), self.batches[bucket]
        )
        x, result = slot(row.x_slot), jnp.zeros((1,), pool.dtype)
        if kind == "F":
            result = functions.forward(weights, x, batch, **ends)
        else:
            of = (weights, x, slot(row.g_slot), batch, self.kl_coef)
            if kind == "W":
                sums = functions.backward_weights(*of, sums, **ends)
            elif dict(self.layout.pipelines)[name].split:
                result = functions.backward_input(*of, **ends)
            else:
                sums, result = functions.backward(*of, sums, **ends)
        # The end of a task is noted when its sums are there too: a W has nothing else, and a device
        # that hangs in them is in the task. Only a message inside a task need not wait for them.
        noted = kind == "W" or (kind == "B" and self.transport.ticked)
        after = jax.tree.leaves(sums) if noted else []
        run, sent = self.transport.send(run, row, result.reshape(-1), self.room, after)
        pools, all_sums = {**state.pools, name: pool}, {**state.sums, name: sums}
        return _State(pools, all_sums, run), sent

    def _deliver(self, state: _State, row: Row, arrivals: Any) -> _State:
        """What came at the end of a tick, into the slots that the row names."""
        if arrivals is None:
            return state
        pools = dict(state.pools)
        for side in ("below", "above"):
            came = getattr(arrivals, side)
            for model in pools:
                entry = came[None, : pools[model].shape[1]]
                into = getattr(row, f"{side}_{model}")
                pools[model] = lax.dynamic_update_slice(pools[model], entry, (into, 0))
        return state._replace(pools=pools)

    def _reduced(self, state: _State) -> dict[str, Sums]:
        """Sums of this device's stages over the data shards."""
        zero = self.transport.finish(state.run)
        sums = state.sums
        if zero is not None:
            sums = jax.tree.map(lambda leaf: leaf + zero, sums)
        if self.mesh.shape["data"] == 1:
            return sums
        return {
            model: Sums(
                lax.psum(grads, "data"),
                {n: (lax.pmax if is_max(n) else lax.psum)(m, "data") for n, m in metrics.items()},
            )
            for model, (grads, metrics) in sums.items()
        }


def is_max(metric: str) -> bool:
    """Whether parts of a metric are combined by their maximum (`rl.metrics`)."""
    return metric.endswith("_max")


def block_specs(blocks: Any) -> Any:
    """PartitionSpec of each leaf `[P, L / N, ...]` of spread blocks: over pipe, and over tensor."""

    def spec(path: Any, leaf: Any) -> P:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes: list[str | None] = ["pipe", *[None] * (leaf.ndim - 1)]
        cut = tensor_axis(name)
        if cut is not None:
            axes[cut + 1] = "tensor"
        return P(*axes)

    return jax.tree_util.tree_map_with_path(spec, blocks)


def spread(blocks: Any, pipeline: PipelineLayout, mesh: Mesh | None = None) -> Any:
    """Stacked blocks `[L, ...]` as each device's stage, `[P, L / N, ...]`, on `mesh` if given.

    Raises ValueError if the stages do not divide the layers.
    """
    stages, replicas = pipeline.stages, pipeline.replicas

    def one(leaf: Array) -> Array:
        if leaf.shape[0] % stages:
            raise ValueError(
                f"{stages} stages do not divide model.num_layers={leaf.shape[0]}: every stage has "
                "the same number of layers"
            )
        staged = leaf.reshape(stages, -1, *leaf.shape[1:])
        if pipeline.direction == "down":
            staged = staged[::-1]
        copies = jnp.broadcast_to(staged[None], (replicas, *staged.shape))
        return copies.reshape(stages * replicas, *staged.shape[1:])

    stacked = jax.tree.map(one, blocks)
    if mesh is None:
        return stacked
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, s), block_specs(stacked), is_leaf=lambda s: isinstance(s, P)
    )
    return lax.with_sharding_constraint(stacked, shardings)


def collect(sums: Sums, pipeline: PipelineLayout) -> Sums:
    """A whole model's Sums from those of its devices, `[P, ...]`: the inverse of `spread`, added.

    Blocks are added over the replicas, in their order; the ends over all devices, each of which
    has its own part (and most have 0).
    """

    def one(leaf: Array) -> Array:
        added = leaf.reshape(pipeline.replicas, pipeline.stages, *leaf.shape[1:]).sum(axis=0)
        if pipeline.direction == "down":
            added = added[::-1]
        return added.reshape(-1, *leaf.shape[2:])

    (blocks, ends), metrics = sums
    ends = jax.tree.map(lambda leaf: leaf.sum(axis=0), ends)
    metrics = {n: m.max(axis=0) if is_max(n) else m.sum(axis=0) for n, m in metrics.items()}
    return Sums(Weights(jax.tree.map(one, blocks), ends), metrics)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)
