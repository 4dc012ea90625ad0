"""The pipeline without a pipeline program: one jitted function a task, dispatched by the host.

A single controller walks through the schedule and starts each task on its devices; JAX dispatches
asynchronously, so the host runs ahead and every device goes from task to task, waiting for nothing
but its input (the `ideal` cost model). No device decides anything, so there is no conditional: the
transport for the GPUs of one process, and the cross-check of the compiled pipeline, with which it
shares stage functions, schedules and the final reduction.

A device runs one task at a time, in the order of the schedule: each task takes the token that the
one before it on the device has given.

On CPU a copy between devices holds one of the client's threads while it waits for its source, and
there are as many threads as devices: tasks of ready devices may wait for one (measured: 25 % of a
step). With more virtual devices than the pipeline uses there are threads enough.

Axes: P pipe devices, each of which is a group of data x tensor devices; M micro-batches.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.fusion.intra_stage.executor import block_specs, spread
from fuse_jax.fusion.intra_stage.flight import DispatchFlight, Started, ready_within
from fuse_jax.fusion.intra_stage.layout import PipelineLayout
from fuse_jax.fusion.intra_stage.problem import KINDS, MODELS
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.intra_stage.stages import StageFunctions, Sums, Weights
from fuse_jax.fusion.intra_stage.tables import Plan

# Tasks a device may be behind the host. The CPU client blocks the host at 32, where it could not
# notice a hung device; a device needs no more than a few to be kept busy.
AHEAD = 8


class _Code(NamedTuple):
    """Whose code a task is: what is static about it."""

    model: str
    kind: str
    first: bool
    last: bool


class Walk(NamedTuple):
    """A schedule, and its tasks in the order in which they are dispatched."""

    schedule: Schedule
    plan: Plan
    order: list[int]


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
        self._programs: dict[tuple[_Code, int], Any] = {}
        self._numbers: dict[tuple[int, int], Array] = {}
        self._spread = jax.jit(self._on_devices)
        self._zeros: Any = None

    # ------------------------------------------------------------------ once a step

    def prepare(self, schedule: Schedule, dealt: Mapping[str, np.ndarray]) -> Walk:
        """What `run` takes of a schedule; pure host work, for while another step is under way.

        dealt: as for `tables.build_tables`. Raises ScheduleError for a schedule that breaks rules.
        """
        plan = Plan(schedule.check(), dealt, ticked=False)
        return Walk(schedule, plan, list(in_order(schedule, plan)))

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
        step = _Step(self, walk.plan, flight, self._spread(dict(weights)), batches, kl_coef)
        for task in walk.order:
            step.start(task)
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
        spec = tuple(leaf.sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
        own = spec[:1] == ("pipe",)
        shape = (1, *leaf.shape[1:]) if own else leaf.shape
        within = P(None, *spec[1:]) if own else P(*spec)
        local = {shard.device: shard.data for shard in leaf.addressable_shards}
        return [
            jax.make_array_from_single_device_arrays(
                shape, NamedSharding(group, within), [local[d] for d in group.devices.flat]
            )
            for group in self.groups
        ]

    def whole(self, parts: Sequence[Any], specs: Any) -> Any:
        """The inverse of `parts` for leaves `[1, ...]`: `[P, ...]` with `specs`."""

        def join(spec: P, *leaves: Array) -> Array:
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
            sharding = NamedSharding(self.groups[device], P())
            self._numbers[key] = jax.device_put(np.int32(value), sharding)
        return self._numbers[key]

    def program(self, code: _Code, device: int, sums: Sums | None) -> Any:
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
    code: _Code,
    functions: StageFunctions,
    sums: Sums | None,
    turn: Array,
    weights: Weights,
    x: Array | None,
    dy: Array | None,
    micro_batches: Any,
    index: Array,
    kl_coef: Array,
) -> tuple[Sums | None, Array, Array | None]:
    """(sums, turn, result) of one task on one group. Leaves of sums and blocks: `[1, ...]`.

    `turn` counts a device's tasks, and thereby puts them in order.
    """
    weights = weights._replace(blocks=jax.tree.map(lambda leaf: leaf[0], weights.blocks))
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
        plan: Plan,
        flight: DispatchFlight,
        weights: dict[str, Weights],
        batches: Sequence[Any],
        kl_coef: Array,
    ) -> None:
        self.dispatch, self.plan, self.flight = dispatch, plan, flight
        zeros = dispatch.zeros(weights, batches[0], kl_coef)
        self._weights = {name: dispatch.parts(whole) for name, whole in weights.items()}
        self._batches = [dispatch.parts(batch) for batch in batches]
        self._kl_coef = dispatch.parts(kl_coef)
        devices = range(len(dispatch.groups))
        self._turn = [dispatch.number(device, 0) for device in devices]
        self._behind: list[deque[Started]] = [deque() for _ in devices]
        self._messages: dict[tuple[str, str, int, int], Array] = {}
        # Cut up when the first backward asks for them: the first forwards need not wait.
        self._zeros = zeros
        self._sums: dict[str, list[Sums]] = {}
        self._sums_specs = {name: dispatch.sums_specs(sums) for name, sums in zeros.items()}

    def _sums_of(self, model: str) -> list[Sums]:
        if model not in self._sums:
            self._sums[model] = self.dispatch.parts(self._zeros[model])
        return self._sums[model]

    def start(self, task: int) -> None:
        """Dispatch one task, and the way of its result."""
        graph, dispatch = self.plan.graph, self.dispatch
        model, kind = MODELS[graph.model[task]], KINDS[graph.kind[task]]
        device, micro_batch = int(graph.device[task]), int(graph.micro_batch[task])
        pipeline, stage = dispatch.pipelines[model], int(graph.stage[task])
        code = _Code(model, kind, stage == 0, stage == pipeline.stages - 1)
        bucket, index = self.plan.place(task)
        adds = kind == pipeline.kinds[-1]
        take = self._messages.pop if adds else self._messages.get
        x = take(("x", model, device, micro_batch), None)
        dy = take(("g", model, device, micro_batch), None) if kind != "F" else None
        sums = self._sums_of(model)[device] if adds else None
        self._make_room(device)
        sums, self._turn[device], result = dispatch.program(code, device, sums)(
            sums,
            self._turn[device],
            self._weights[model][device],
            x,
            dy,
            self._batches[bucket][device] if code.first or code.last else None,
            dispatch.number(device, index),
            self._kl_coef[device],
        )
        if adds:
            self._sums[model][device] = sums
        self._behind[device].append(Started(task, self._turn[device]))
        self.flight.started.append(self._behind[device][-1])
        after = self.plan.receiver(task)
        if after >= 0:
            other = int(graph.device[after])
            there = NamedSharding(dispatch.groups[other], P("data"))
            what = "x" if kind == "F" else "g"
            self._messages[what, model, other, micro_batch] = jax.device_put(result, there)

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
            name: self.dispatch.whole(self._sums_of(name), self._sums_specs[name])
            for name in self._zeros
        }


def in_order(schedule: Schedule, plan: Plan) -> Iterator[int]:
    """The real tasks: every device's in its order, each after the one it needs, earliest first."""
    start = schedule.timing().start
    at = [0] * len(plan.orders)
    done: set[int] = set()
    waiting: dict[int, int] = {}  # task -> device whose next task needs it
    heap: list[tuple[int, int]] = []

    def offer(device: int) -> None:
        if at[device] < len(plan.orders[device]):
            task = plan.orders[device][at[device]]
            needed = plan.sender(task)
            if needed < 0 or needed in done:
                heapq.heappush(heap, (int(start[task]), device))
            else:
                waiting[needed] = device

    for device in range(len(plan.orders)):
        offer(device)
    while heap:
        _, device = heapq.heappop(heap)
        task = plan.orders[device][at[device]]
        yield task
        done.add(task)
        at[device] += 1
        offer(device)
        if task in waiting:
            offer(waiting.pop(task))
