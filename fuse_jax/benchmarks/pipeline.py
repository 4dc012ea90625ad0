"""Fused against serial training of actor and critic in pipelines, on devices that are paced.

    python launch/benchmark.py pipeline --micro-batches 8,32

Virtual CPU devices, and tasks that sleep for the time a device would take (actor forward 10 ms,
backward 20 ms, critic 6 and 12): what is measured is the executor, whatever the cores. The sleep
wraps the real stage functions of tiny models, whose gradients are checked in the same run. They are
computed on other cores than the host's, where there are two or more, as an accelerator's would be.

One JSON line a schedule: wall_ms, the best of the repeats; makespan_ms, of the schedule where
transfers are free; predicted_ms, under the transport's cost model; serial_wall_ms, of the serial
schedule by the same executor; max_error, of the gradients against those of the unpipelined step,
relative to the largest; compile_s; temp_bytes of a device (none for dispatch: many programs).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.benchmarks.measure import best, controller_apart, repeated
from fuse_jax.benchmarks.pacing import pace, stamp
from fuse_jax.buckets import Bucket
from fuse_jax.config import ComputeConfig, IntraStageConfig, PPOConfig
from fuse_jax.fusion.intra_stage.dispatch import Dispatch
from fuse_jax.fusion.intra_stage.executor import collect, pipeline_mesh
from fuse_jax.fusion.intra_stage.layout import deal_micro_batches, trained_pipelines
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.intra_stage.stages import StageFunctions, join_params, split_params
from fuse_jax.fusion.intra_stage.transport import make_transport
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.transformer import init
from fuse_jax.placement.mesh import use_cpu_devices
from fuse_jax.training.gradients import BOTH, HyperParameters, serial_gradients
from fuse_jax.training.minibatch import Experience, Minibatch, cut_minibatch
from fuse_jax.training.pipeline_engine import make_layout, place_rows
from fuse_jax.training.pipeline_gradients import PipelineGradients, model_stages
from fuse_jax.training.pipeline_plan import COSTS, Planner

PACES = {"actor": {"F": 10.0, "B": 20.0}, "critic": {"F": 6.0, "B": 12.0}}  # ms
LENGTH, PROMPT, VOCABULARY = 8, 2, 37
# What a schedule needs before its step (tables, placement), which a training run does while the
# step before it is under way; then the step, giving gradients.
Run = Callable[[Schedule], Callable[[], Any]]


class Work(NamedTuple):
    """What is measured: the gradients of a mini-batch, by paced stages."""

    planner: Planner
    hp: HyperParameters
    mesh: Mesh
    stages: dict[str, StageFunctions]
    params: dict[str, Any]
    minibatch: Minibatch


def main(argv: Sequence[str]) -> None:
    """Print a line for each transport, number of micro-batches and schedule."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--transports", default="mailbox,dispatch,pair,ring")
    flags.add_argument("--micro-batches", default="8,32")
    flags.add_argument("--devices", type=int, default=8)
    flags.add_argument("--repeats", type=int, default=7)
    help_ = "times as long: on a busy machine its own work then matters less"
    flags.add_argument("--slower", type=float, default=1.0, help=help_)
    args = flags.parse_args(argv)
    use_cpu_devices(args.devices)
    with controller_apart():
        for transport in args.transports.split(","):
            for count in map(int, args.micro_batches.split(",")):
                for line in measure(transport, args.devices, count, args.repeats, args.slower):
                    print(json.dumps(line), flush=True)


def measure(
    transport: Any, devices: int, micro_batches: int, repeats: int, slower: float = 1.0
) -> list[dict[str, Any]]:
    """The lines of one transport and number of micro-batches: fused, then serial."""
    paces = {n: {kind: slower * ms for kind, ms in of.items()} for n, of in PACES.items()}
    hp, minibatch = settings(devices), make_minibatch(micro_batches)
    params = make_params(hp)
    wanted, _ = jax.jit(partial(serial_gradients, hp=hp))(params, minibatch)
    times = {
        name: {kind: np.full((1, devices), ms) for kind, ms in of.items()}
        for name, of in paces.items()
    }
    fused = IntraStageConfig(transport=transport, schedule="fused")
    planner = Planner(fused, devices, (devices, devices), times, COSTS[transport])
    plans = {
        "fused": planner.plan([micro_batches]),
        "serial": planner.serial(BOTH, [micro_batches]),
    }
    stages = {name: paced(functions, paces[name]) for name, functions in model_stages(hp).items()}
    make = dispatched if transport == "dispatch" else compiled
    mesh = pipeline_mesh(devices)
    # As the state of a run does, parameters lie on the devices before the step.
    params = jax.device_put(params, NamedSharding(mesh, P()))
    work = Work(planner, hp, mesh, stages, params, minibatch)
    run, temp_bytes, compile_s = make(work)
    lines = []
    for name, plan in plans.items():
        step = run(plan.schedule)
        started = time.perf_counter()
        error = largest_error(step(), wanted)
        first = time.perf_counter() - started
        walls = repeated(step, repeats)
        # Tasks that are dispatched are compiled at their first step.
        compile_s = first - best(walls).wall_s if compile_s is None else compile_s
        lines.append(
            {
                "case": f"{devices}x{micro_batches}",
                "transport": transport,
                "schedule": name,
                "devices": devices,
                "micro_batches": micro_batches,
                "wall_ms": round(1e3 * best(walls).wall_s, 1),
                "makespan_ms": plan.schedule.makespan(),
                "predicted_ms": plan.predicted,
                "max_error": error,
                "compile_s": round(compile_s, 2),  # one program, or one set, serves both
                "temp_bytes": temp_bytes,
            }
        )
    for line in lines:
        line["serial_wall_ms"] = lines[-1]["wall_ms"]
    return lines


def paced(stages: StageFunctions, paces: Mapping[str, float]) -> StageFunctions:
    """Stage functions that take as long as on a device of that pace (or longer, if they must)."""

    def begun(weights: Any, *arguments: Any) -> tuple[Any, ...]:
        """The arguments, and when they were there: what follows reads them behind the clock."""
        arrays = [leaf for leaf in jax.tree.leaves(arguments) if leaf.size > 1]
        return lax.optimization_barrier((weights, *arguments, stamp(arrays[0])))

    def forward(*arguments: Any, **place: Any) -> Any:
        *begins, since = begun(*arguments)
        y = stages.forward(*begins, **place)
        return pace(y, paces["F"] + no_time(y), since)

    def backward(*arguments: Any, **place: Any) -> Any:
        *begins, since = begun(*arguments)
        sums, dx = stages.backward(*begins, **place)
        return sums, pace(dx, paces["B"], since)

    return dataclasses.replace(stages, forward=forward, backward=backward)


def no_time(x: Array) -> Array:
    """0.0, for work enough that XLA does not run the program in its caller's thread.

    It does so where there is next to nothing to compute, as in the last stage's forward: the sleep
    would then hold up the host, which is no device.
    """
    square = jnp.broadcast_to(x.reshape(-1)[:1].astype(jnp.float32), (32, 32))
    return 0.0 * jnp.sum(square @ square)


def compiled(work: Work) -> tuple[Run, int, float]:
    """Gradients by one program; its memory beyond its arguments, and the seconds to make it."""
    planner, hp, mesh, stages, params, minibatch = work
    name: Any = planner.settings.transport
    link = make_transport(name, planner.devices)
    layout = make_layout(planner, BOTH, minibatch, ticked=link.ticked)
    gradients = PipelineGradients(layout, mesh, hp, link, stages)
    step = jax.jit(partial(gradients, hp=hp))
    planned = gradients.place(
        gradients.prepare(minibatch, planner.plan(counts(minibatch)).schedule)
    )
    started = time.perf_counter()
    executable = step.lower(params, planned).compile()
    compile_s = time.perf_counter() - started

    def run(schedule: Schedule) -> Callable[[], Any]:
        planned = jax.block_until_ready(gradients.place(gradients.prepare(minibatch, schedule)))
        return lambda: executable(params, planned)[0]

    memory = executable.memory_analysis()
    return run, 0 if memory is None else int(memory.temp_size_in_bytes), compile_s


def dispatched(work: Work) -> tuple[Run, None, None]:
    """Gradients by tasks that the host dispatches."""
    planner, _, mesh, stages, params, minibatch = work
    pipelines = trained_pipelines(planner.problem(counts(minibatch)))
    dispatch = Dispatch(pipelines, mesh, stages)
    dealt = {n: deal_micro_batches(counts(minibatch), p.replicas) for n, p in pipelines}
    weights = {name: split_params(params[name]) for name in params}
    total = {n: jax.jit(partial(collect, pipeline=p)) for n, p in pipelines}
    placed = place_rows(minibatch, mesh)
    batches = [bucket.micro_batches for bucket in placed.buckets]

    def run(schedule: Schedule) -> Callable[[], Any]:
        walk = dispatch.prepare(schedule, dealt)

        def step() -> Any:
            sums, flight = dispatch.run(walk, weights, batches, placed.kl_coef)
            grads = {name: join_params(total[name](part).grads) for name, part in sums.items()}
            flight.wait()
            return grads

        return step

    return run, None, None


def largest_error(grads: Any, wanted: Any) -> float:
    """Largest difference of a gradient, relative to its model's largest; of both models."""
    errors = []
    for name in wanted:
        pairs = list(zip(jax.tree.leaves(grads[name]), jax.tree.leaves(wanted[name]), strict=True))
        largest = max(float(jnp.abs(b).max()) for _, b in pairs)
        errors.append(max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs) / largest)
    return max(errors)


def counts(minibatch: Minibatch) -> list[int]:
    """Micro-batches of each bucket."""
    return [int(bucket.count) for bucket in minibatch.buckets]


def settings(layers: int) -> HyperParameters:
    """Tiny models of as many layers as stages."""
    arch = Architecture("llama", VOCABULARY, 16, 32, layers, 2, 1, 8)
    return HyperParameters(arch, arch, PPOConfig(), ComputeConfig())


def make_params(hp: HyperParameters) -> dict[str, Any]:
    """Actor and critic; the critic's head is not zero, so that its trunk has a gradient.

    It is drawn so that values are about as large as the returns: much larger ones would make all
    gradients differences of large numbers, and what is compared rounding.
    """
    actor, critic, head = jax.random.split(jax.random.key(0), 3)
    params = {"actor": init(hp.actor, actor), "critic": init(hp.critic, critic, head="scalar")}
    width = hp.critic.hidden_size
    params["critic"]["head"]["kernel"] = width**-0.5 * jax.random.normal(head, (width, 1))
    return params


def make_minibatch(micro_batches: int, rows: int = 2) -> Minibatch:
    """Random samples of one length in `micro_batches` micro-batches of `rows` rows."""
    samples, response = micro_batches * rows, LENGTH - PROMPT
    rng = np.random.default_rng(0)

    def noise(mean: float = 0.0) -> np.ndarray:
        return (mean + 0.3 * rng.normal(size=(samples, response))).astype(np.float32)

    experience = Experience(
        tokens=rng.integers(1, VOCABULARY, (samples, LENGTH)).astype(np.int32),
        prompt_lengths=np.full(samples, PROMPT, np.int32),
        response_lengths=np.full(samples, response, np.int32),
        response_mask=np.ones((samples, response), np.float32),
        log_probs=noise(-3.5),
        ref_log_probs=noise(-3.5),
        values=noise(),
        advantages=noise(),
        returns=noise(1.0),
        valid=np.ones(samples, bool),
    )
    return cut_minibatch(experience, np.arange(samples), (Bucket(LENGTH, rows),))
