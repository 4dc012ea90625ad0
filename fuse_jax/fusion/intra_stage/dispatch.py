"""The pipeline without a pipeline program: one jitted function a task, dispatched by the host.

A single controller walks through the schedule and starts each task on its devices; JAX dispatches
asynchronously, so the host runs ahead and every device goes from task to task, waiting for nothing
but its input (the `ideal` cost model). No device decides anything, so there is no conditional: the
transport for the GPUs of one process, and the cross-check of the compiled pipeline, with which it
shares stage functions, schedules and the final reduction.

A device runs one task at a time, in the order of the schedule: each task takes the token that the
one before it on the device has given.

On CPU a copy between devices holds one of the client's threads while it waits for its source: with
one thread a device, tasks of ready devices wait for one (measured: 25 % of a step). So
`placement.mesh.use_cpu_devices` asks for three.

Axes: P pipe devices, each of which is a group of data x tensor devices; M micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.fusion.intra_stage.executor import block_specs, spread
from fuse_jax.fusion.intra_stage.flight import DispatchFlight, Started, ready_within
from fuse_jax.fusion.intra_stage.layout import PipelineLayout
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.intra_stage.stages import StageFunctions, Sums, Weights
from fuse_jax.fusion.intra_stage.walk import Code, Message, Start, Walk, walk_through

# Tasks a device may be behind the host. The CPU client blocks the host at 32, where it could not
# notice a hung device; a device needs no more than a few to be kept busy.
AHEAD = 8


class Dispatch:
    """`run(walk, weights, batches, kl_coef)`: the Sums of `make_pipeline`'s run.

    Args:
      pipelines: of the models it trains, by name, as `layout.trained_pipelines` gives them.
      mesh: (pipe, data, tensor). Inside a group of data x tensor devices XLA partitions the stages:
        give stage functions of whole models, not of shards.
      timeout_s: seconds a task may take before the step is given up.
    """

    def __init__(
        self,
        pipelines: Sequence[tuple[str, PipelineLayout]],
        mesh: Mesh,
        stages: Mapping[str, StageFunctions],
        timeout_s: float = 120.0,
    ) -> None:
        self.pipelines, self.mesh, self.stages = dict(pipelines), mesh, stages
        self.timeout_s = timeout_s
        self.groups = [
            Mesh(devices, ("data", "tensor"), axis_types=mesh.axis_types[1:])
            for devices in mesh.devices
        ]
        # A group of one device is that device: to JAX an array of its own is the cheapest there is.
        self.one_each = self.groups[0].size == 1
        self.places: list[Any] = [
            group.devices.item() if self.one_each else NamedSharding(group, P("data"))
            for group in self.groups
        ]
        self._programs: dict[tuple[Code, int], Any] = {}
        self._numbers: dict[tuple[int, int], Array] = {}
        self._spread = jax.jit(self._on_devices)
        self._zeros: Any = None

    # ------------------------------------------------------------------ once a step

    def prepare(self, schedule: Schedule, dealt: Mapping[str, np.ndarray]) -> Walk:
        """What `run` takes of a schedule; pure host work, for while another step is under way.

        dealt: as for `tables.build_tables`. Raises ScheduleError for a schedule that breaks rules.
        """
        return walk_through(schedule.check(), dealt)

    def run(
        self,
        walk: Walk,
        weights: Mapping[str, Weights],
        batches: Sequence[Any],
        kl_coef: Array,
    ) -> tuple[dict[str, Sums], DispatchFlight]:
        """Dispatch every task of a schedule; the Sums, on their way, and how to wait for them.

        weights: whole models. batches: for each bucket leaves `[M, B, ...]`, rows over data on
        `mesh`. Raises StepError if a device hangs meanwhile.
        """
        flight = DispatchFlight(walk.schedule, [], self.timeout_s)
        step = _Step(self, flight, self._spread(dict(weights)), batches, kl_coef)
        for start in walk.starts:
            step.start(start)
        return step.sums(), flight

    def _on_devices(self, weights: dict[str, Weights]) -> dict[str, Weights]:
        """Each device's stage of the blocks, `[P, L / N, ...]`, and the ends whole on all."""
        everywhere = NamedSharding(self.mesh, P())
        return {
            name: Weights(
                spread(weights[name].blocks, pipeline, self.mesh),
                lax.with_sharding_constraint(weights[name].ends, everywhere),
            )
            for name, pipeline in self.pipelines.items()
        }

    def zeros(
        self, weights: Mapping[str, Weights], micro_batches: Any, kl_coef: Array
    ) -> dict[str, Sums]:
        """Empty Sums of every device, leaves `[P, ...]`; compiled once."""
        if self._zeros is None:
            self._zeros = jax.jit(self._empty)
        return self._zeros(dict(weights), micro_batches, kl_coef)

    def _empty(
        self, weights: dict[str, Weights], micro_batches: Any, kl_coef: Array
    ) -> dict[str, Sums]:
        batch = jax.tree.map(lambda leaf: leaf[0], micro_batches)
        devices = self.mesh.shape["pipe"]
        empty = {}
        for name, (blocks, ends) in weights.items():
            one = Weights(jax.tree.map(lambda leaf: leaf[0], blocks), ends)
            sums = self.stages[name].zero_sums(one, batch, kl_coef)
            every = jax.tree.map(lambda s: jnp.zeros((devices, *s.shape), s.dtype), sums)
            shardings = jax.tree.map(
                lambda spec: NamedSharding(self.mesh, spec),
                self.sums_specs(every),
                is_leaf=lambda spec: isinstance(spec, P),
            )
            empty[name] = lax.with_sharding_constraint(every, shardings)
        return empty

    def sums_specs(self, sums: Sums) -> Sums:
        """PartitionSpec of each leaf `[P, ...]` of a model's Sums."""
        own: Any = jax.tree.map(lambda _: P("pipe"), sums)
        return own._replace(grads=own.grads._replace(blocks=block_specs(sums.grads.blocks)))

    # ------------------------------------------------------------------ places

    def parts(self, tree: Any) -> list[Any]:
        """Arrays on the mesh as each group's own (axis 0 cut over pipe: `[1, ...]`); no copies."""
        leaves, structure = jax.tree.flatten(tree)
        cut = [self._split(leaf) for leaf in leaves]
        return [structure.unflatten([of[d] for of in cut]) for d in range(len(self.groups))]

    def _split(self, leaf: Array) -> list[Array]:
        local = {shard.device: shard.data for shard in leaf.addressable_shards}
        if self.one_each:
            return [local[device] for device in self.places]
        spec = tuple(leaf.sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
        own = spec[:1] == ("pipe",)
        shape = (1, *leaf.shape[1:]) if own else leaf.shape
        within = P(None, *spec[1:]) if own else P(*spec)
        return [
            jax.make_array_from_single_device_arrays(
                shape, NamedSharding(group, within), [local[d] for d in group.devices.flat]
            )
            for group in self.groups
        ]

    def whole(self, parts: Sequence[Any], specs: Any) -> Any:
        """The inverse of `parts` for leaves `[1, ...]`: `[P, ...]` with `specs`."""

        def join(spec: P, *leaves: Array) -> Array:
            local = list(leaves)
            if not self.one_each:
                local = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
            shape = (len(leaves), *leaves[0].shape[1:])
            sharding = NamedSharding(self.mesh, spec)
            return jax.make_array_from_single_device_arrays(shape, sharding, local)

        return jax.tree.map(join, specs, *parts, is_leaf=lambda spec: isinstance(spec, P))

    # ------------------------------------------------------------------ programs

    def number(self, device: int, value: int) -> Array:
        """An int32 that lies on a device's group already."""
        key = (device, value)
        if key not in self._numbers:
            there = self.places[device]
            if not self.one_each:
                there = NamedSharding(self.groups[device], P())
            self._numbers[key] = jax.device_put(np.int32(value), there)
        return self._numbers[key]

    def program(self, code: Code, device: int, sums: Sums | None) -> Any:
        """The jitted function of a task; of each group its own where sums must be told to stay."""
        lanes = self.groups[device].size
        key = (code, device if lanes > 1 else 0)
        if key not in self._programs:
            function = partial(_task, code, self.stages[code.model])
            shardings: Any = None
            if lanes > 1:
                shardings = (jax.tree.map(lambda leaf: leaf.sharding, sums), None, None)
            self._programs[key] = jax.jit(function, donate_argnums=0, out_shardings=shardings)
        return self._programs[key]


def _task(
    code: Code,
    functions: StageFunctions,
    sums: Sums | None,
    turn: Array,
    weights: Weights,
    x: Array | None,
    dy: Array | None,
    micro_batches: Any,
    index: Array | None,
    kl_coef: Array | None,
) -> tuple[Sums | None, Array, Array | None]:
    """(sums, turn, result) of one task on one group. Leaves of sums and blocks: `[1, ...]`.

    `turn` counts a device's tasks, and thereby puts them in order. A stage that is neither first
    nor last gets no ends, no micro-batches, no index and no kl_coef.
    """
    weights = weights._replace(blocks=jax.tree.map(lambda leaf: leaf[0], weights.blocks))
    batch = None
    if micro_batches is not None:
        batch = jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), micro_batches
        )
    ends = {"first": code.first, "last": code.last}
    result = None
    if sums is not None:
        sums = jax.tree.map(lambda leaf: leaf[0], sums)
    if code.kind == "F":
        result = functions.forward(weights, x, batch, **ends)
    elif code.kind == "W":
        sums = functions.backward_weights(weights, x, dy, batch, kl_coef, sums, **ends)
    elif sums is None:  # the input's half of a split backward
        result = functions.backward_input(weights, x, dy, batch, kl_coef, **ends)
    else:
        sums, result = functions.backward(weights, x, dy, batch, kl_coef, sums, **ends)
    if sums is not None:
        sums = jax.tree.map(lambda leaf: leaf[None], sums)
    return sums, turn + 1, result


class _Step:
    """One walk through a schedule: what lies where."""

    def __init__(
        self,
        dispatch: Dispatch,
        flight: DispatchFlight,
        weights: dict[str, Weights],
        batches: Sequence[Any],
        kl_coef: Array,
    ) -> None:
        self.dispatch, self.flight = dispatch, flight
        self._whole = weights, batches[0], kl_coef
        self._weights = {
            name: [(part, _inner(part)) for part in dispatch.parts(whole)]
            for name, whole in weights.items()
        }
        self._batches = [dispatch.parts(batch) for batch in batches]
        self._kl_coef = dispatch.parts(kl_coef)
        devices = range(len(dispatch.groups))
        self._turn = [dispatch.number(device, 0) for device in devices]
        self._behind: list[deque[Started]] = [deque() for _ in devices]
        self._messages: dict[Message, Array] = {}
        self._leaving: dict[Message, Array] = {}  # still where they were made
        # Made when the first backward asks for them: the first forwards need not wait.
        self._zeros: dict[str, Sums] = {}
        self._sums: dict[str, list[Sums]] = {}

    def _sums_of(self, model: str) -> list[Sums]:
        if model not in self._sums:
            if not self._zeros:
                self._zeros = self.dispatch.zeros(*self._whole)
            self._sums[model] = self.dispatch.parts(self._zeros[model])
        return self._sums[model]

    def start(self, start: Start) -> None:
        """Dispatch one task. Its result goes its way when its reader is dispatched."""
        dispatch, code, device = self.dispatch, start.code, start.device
        at_end = code.first or code.last
        if start.x in self._leaving or start.dy in self._leaving:
            self._send()
        take = self._messages.get if start.keeps else self._messages.pop
        x, dy = take(start.x, None), None
        if start.dy is not None:
            dy = take(start.dy, None)
        # A stage in the middle neither reads the ends of the model nor adds to theirs.
        sums, rest = None, None
        if not start.keeps:
            sums = rest = self._sums_of(code.model)[device]
            sums = sums if at_end else Sums(_inner(sums.grads), {})
        self._make_room(device)
        sums, self._turn[device], result = dispatch.program(code, device, sums)(
            sums,
            self._turn[device],
            self._weights[code.model][device][0 if at_end else 1],
            x,
            dy,
            self._batches[start.bucket][device] if at_end else None,
            dispatch.number(device, start.index) if at_end else None,
            self._kl_coef[device] if at_end else None,
        )
        if rest is not None:
            if not at_end:
                grads = Weights(sums.grads.blocks, rest.grads.ends)
                sums = Sums(grads, rest.metrics)
            self._sums[code.model][device] = sums
        begun = Started(start.task, self._turn[device])
        self._behind[device].append(begun)
        self.flight.started.append(begun)
        if start.sent is not None:
            self._leaving[start.sent] = result

    def _send(self) -> None:
        """Copy all results that wait to their readers' devices: one call costs little more than the
        copy of one."""
        there = [self.dispatch.places[message.device] for message in self._leaving]
        copies = jax.device_put(list(self._leaving.values()), there)
        self._messages.update(zip(self._leaving, copies))
        self._leaving.clear()

    def _make_room(self, device: int) -> None:
        """Wait until the device is not too far behind the host."""
        behind = self._behind[device]
        while behind and (len(behind) >= AHEAD or behind[0].token.is_ready()):
            if not ready_within(behind[0].token, self.flight.timeout_s):
                self.flight.wait()  # says which task it is that does not end
            behind.popleft()

    def sums(self) -> dict[str, Sums]:
        """Each model's Sums as global arrays `[P, ...]`."""
        return {
            name: self.dispatch.whole(
                self._sums_of(name), self.dispatch.sums_specs(self._zeros[name])
            )
            for name in self._weights
        }


def _inner(weights: Weights) -> Weights:
    """Those of a stage in the middle, which has no end."""
    return Weights(weights.blocks, {})
