"""Generation and scoring, serial and fused, on paced virtual devices: wall time and exactness.

    python launch/benchmark.py inter_stage --sweep

A real tiny model on 8 virtual CPU devices, and sleeps that stand for device time (`paced`).
Response lengths are lognormal and unknown to the controller; all scoring together takes about
half as long as generation. One JSON line a run:

case             "policy": the plan that the policy chose; "sweep": one of a grid of plans;
                 "argmin": the one of the grid that the simulator likes best, with `over_best`, its
                 wall time over that of the best one live
policy, R_t, m   the plan
wall_s           measured, `speedup` times faster than serial_wall_s
predicted_s      simulated, with these response lengths and measured costs
scoring_hidden   share of scoring done before the last sample was generated
migrated         live samples moved
tokens_equal     tokens, log-probs, values and scores are the serial run's, bit by bit
scheduler_share  of the wall time, what the controller took for itself: taking note of what has
                 ended, deciding, keeping samples, counts and the timeline
host_share       of the wall time, what batcher and scorer took of its thread for what they do
                 without a controller too: filling slots, unpacking chunks and scores, laying out
                 scoring batches
dispatch_share   of the wall time, what it spent in calls that start programs, send arrays (weights,
                 prompts, scoring batches, caches that move) or read them, with all that such a call
                 does on the host, as checking a scoring batch against the vocabularies; what is
                 left of the wall time it slept
                 (all three are wall time, with what other threads kept its core for. An accelerator
                 computes nothing on the controller's core, so the virtual devices do not either,
                 where there are two cores or more: see `measure.controller_apart`)
watching_cpu_share
                 of a core, what the threads took that wait for devices
looks            how often it woke

The serial baseline has the same instances, slots and micro-batches, and scores on all devices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.benchmarks.measure import controller_apart
from fuse_jax.benchmarks.paced import Clock, Pace, PacedEngine, PacedScorer
from fuse_jax.buckets import make_buckets
from fuse_jax.config import MeshConfig, RolloutConfig
from fuse_jax.fusion.inter_stage.choose import choose
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable, Geometry
from fuse_jax.fusion.inter_stage.instances import (
    Instance,
    cut_mesh,
    geometry_of,
    instance_rollout,
)
from fuse_jax.fusion.inter_stage.job import SHARES, Job, Outcome
from fuse_jax.fusion.inter_stage.lengths import LengthHistory
from fuse_jax.fusion.inter_stage.measure import measure_costs, warm_up
from fuse_jax.fusion.inter_stage.plot import plot_timeline
from fuse_jax.fusion.inter_stage.policy import SERIAL, Plan, admission
from fuse_jax.fusion.inter_stage.runtime import run
from fuse_jax.fusion.inter_stage.simulator import simulate
from fuse_jax.fusion.inter_stage.spans import figures
from fuse_jax.fusion.inter_stage.workload import Workload
from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture
from fuse_jax.placement.host import to_host
from fuse_jax.placement.mesh import make_mesh, use_cpu_devices
from fuse_jax.rollout.batcher import Request
from fuse_jax.scoring.columns import Column, Model, Role

ARCH = Architecture(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
)
PROMPT = 16
COLUMNS: tuple[Column, ...] = ("ref_log_probs", "values", "scores")
POLICIES = ("serial", "knee", "simulated", "stream", "auto")


def parser() -> argparse.ArgumentParser:
    """Command-line flags."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = flags.add_argument
    add("--instances", type=int, default=8)
    add("--samples", type=int, default=128)
    add("--median", type=float, default=50.0, help="of the lognormal response lengths")
    add("--sigma", type=float, default=1.0, help="of log length")
    add("--cap", type=int, default=512)
    add("--slots", type=int, default=16, help="of one instance")
    add("--chunk", type=int, default=8)
    add("--step-ms", type=float, default=8.0, help="of a decode step, before slots and context")
    add("--scoring-share", type=float, default=0.5, help="scoring over generation, serial")
    add("--policies", default=",".join(POLICIES))
    add("--repeats", type=int, default=1, help="of each policy; the fastest counts")
    add("--sweep", action="store_true", help="also run a grid of R_t and m")
    add("--timeline", type=Path, help="directory for a Gantt chart and a trace of each policy")
    add("--seed", type=int, default=0)
    return flags


@dataclass(frozen=True)
class Setting:
    """What all runs of one benchmark share."""

    instances: list[Instance]
    models: dict[Role, Model]
    requests: list[Request]
    lengths: tuple[int, ...]
    costs: Costs
    geometry: Geometry
    history: LengthHistory
    cap: int

    @property
    def workload(self) -> Workload:
        prompts = tuple(len(request.prompt_tokens) for request in self.requests)
        return Workload(prompts, self.lengths, self.cap)

    def job(self, plan: Plan) -> Job:
        key = jax.random.key(1)
        return Job(self.requests, self.models, key, plan, self.costs, self.history)

    def predicted(self, plan: Plan) -> float:
        """Seconds the simulator gives this workload under `plan`."""
        outcome = simulate(plan, self.geometry, self.costs, self.workload, history=self.history)
        return outcome.total_ms / 1e3


def response_lengths(args: argparse.Namespace, count: int, seed: int) -> tuple[int, ...]:
    """Lognormal, cut at the cap."""
    drawn = np.random.default_rng(seed).lognormal(np.log(args.median), args.sigma, count)
    return tuple(np.clip(np.rint(drawn), 1, args.cap).astype(int).tolist())


def score_ms(args: argparse.Namespace, geometry: Geometry, pace: Pace, workload: Workload) -> float:
    """ms a scoring batch must take for all of them to be `scoring_share` of generation."""
    middle = PROMPT + args.cap / 2
    step = pace.step + pace.per_live * args.slots / 2 + pace.per_token * middle
    costs = Costs(
        DecodeTable((1,), (1,), ((step,),)),
        {geometry.buckets[-1].length: 0.0},
        {column: [1.0] * len(geometry.buckets) for column in geometry.columns},
    )
    serial = simulate(SERIAL, geometry, costs, workload)
    return args.scoring_share * serial.generation_ms * geometry.instances / serial.scoring_ms


def make_setting(args: argparse.Namespace) -> Setting:
    """Paced instances, compiled, with their costs measured."""
    devices = jax.devices()[: args.instances]
    mesh = make_mesh(MeshConfig(data=args.instances), devices)
    total = RolloutConfig(
        slots=args.slots * args.instances,
        max_prompt_length=PROMPT,
        max_new_tokens=args.cap,
        chunk=args.chunk,
        prefill_rows=8 * args.instances,
        prompt_buckets=(PROMPT,),
    )
    rollout = instance_rollout(total, args.instances)
    longest = PROMPT + args.cap
    buckets = make_buckets((longest // 8, longest // 4, longest // 2, longest), longest, 1)
    lengths = response_lengths(args, args.samples, args.seed)
    pace = Pace(args.step_ms, 0.05, 0.002, 10.0, 0.1, 10.0, 0.0)
    shape = Geometry(args.instances, args.slots, args.chunk, rollout.prefill_rows, buckets, COLUMNS)
    workload = Workload((PROMPT,) * args.samples, lengths, args.cap)
    pace = pace._replace(score=score_ms(args, shape, pace, workload))
    instances = []
    for index, part in enumerate(cut_mesh(mesh, args.instances)):
        clock = Clock(devices[index])
        engine = PacedEngine(
            ARCH, rollout, (), ARCH.vocab_size, mesh=part, pace=pace, lengths=lengths, clock=clock
        )
        scorer = PacedScorer(part, buckets, COLUMNS, max_response=args.cap, pace=pace, clock=clock)
        instances.append(Instance(index, engine, scorer))
    models = make_models(mesh)
    key = jax.random.key(1)
    warm_up(instances, models, key, ways=("kv",))
    for instance in instances:  # what pacing adds compiles in a first run
        placed, scorer = instance.scoring_models(models), instance.scorer
        for column in COLUMNS:
            for bucket in range(len(buckets)):
                scorer.dispatch(column, scorer.batch(bucket, []), placed)
    rng = np.random.default_rng(args.seed)
    requests = [
        Request(i, rng.integers(0, ARCH.vocab_size, PROMPT).astype(np.int32), args.cap)
        for i in range(args.samples)
    ]
    history = LengthHistory(response_lengths(args, 4 * args.samples, args.seed + 1))
    costs = measure_costs(instances, models, key, ways=("kv",))
    geometry = geometry_of(instances)
    return Setting(instances, models, requests, lengths, costs, geometry, history, args.cap)


def make_models(mesh: Any) -> dict[Role, Model]:
    """Trained models on the whole mesh, frozen ones on the host, as in a run."""
    everywhere = NamedSharding(mesh, P())
    models: dict[Role, Model] = {}
    roles: tuple[Role, ...] = ("actor", "reference", "critic", "reward_model")
    for seed, role in enumerate(roles):
        head = "lm" if role in ("actor", "reference") else "scalar"
        params = transformer.init(ARCH, jax.random.key(seed), head=head)
        trained = role in ("actor", "critic")
        models[role] = Model(
            ARCH, jax.device_put(params, everywhere) if trained else to_host(params)
        )
    return models


def equal(outcome: Outcome, serial: Outcome) -> bool:
    """Whether every array of every sample has the same bits."""
    pairs: list[tuple[Any, Any]] = []
    for mine, other in zip(outcome.samples, serial.samples, strict=True):
        pairs += [(mine.response_tokens, other.response_tokens), (mine.log_probs, other.log_probs)]
    for mine, other in zip(outcome.scored, serial.scored, strict=True):
        pairs += [(vars(mine)[name], vars(other)[name]) for name in vars(mine)]
    return all(np.array_equal(a, b) if a is not None else b is None for a, b in pairs)


def measured(setting: Setting, plan: Plan, repeats: int = 1) -> Outcome:
    """The fastest of a few runs."""
    runs = [run(setting.instances, setting.job(plan)) for _ in range(repeats)]
    return min(runs, key=lambda outcome: outcome.total_ms)


def line(case: str, setting: Setting, plan: Plan, outcome: Outcome, serial: Outcome) -> dict:
    """What is printed of one run."""
    found = figures(outcome.timeline.spans, setting.geometry.instances)
    wall = outcome.total_ms / 1e3
    predicted = setting.predicted(plan)
    counts = outcome.counts
    shares = {
        f"{name}_share": round(counts.seconds[name] / wall, 4)
        for name in SHARES
        if name != "asleep"
    }
    return {
        "case": case,
        "policy": plan.policy,
        "R_t": plan.threshold,
        "m": plan.keep,
        "stream": plan.stream,
        "wall_s": round(wall, 3),
        "predicted_s": round(predicted, 3),
        "wall_over_predicted": round(wall / predicted, 3),
        "serial_wall_s": round(serial.total_ms / 1e3, 3),
        "speedup": round(serial.total_ms / outcome.total_ms, 3),
        "scoring_hidden": round(found.scoring_hidden, 3),
        "utilisation": round(found.utilisation, 3),
        "migrated": counts.migrated,
        "tokens_equal": equal(outcome, serial),
        **shares,
        "watching_cpu_share": round(counts.watching_cpu_s / wall, 4),
        "looks": counts.looks,
    }


def save_timeline(
    directory: Path, name: str, setting: Setting, outcome: Outcome, serial: Outcome
) -> None:
    """A Gantt chart with the serial run above it, and the trace."""
    directory.mkdir(parents=True, exist_ok=True)
    plot_timeline(
        outcome.timeline.spans,
        directory / f"{name}.png",
        title=f"{name}, measured",
        instances=setting.geometry.instances,
        serial=serial.timeline.spans,
    )
    outcome.timeline.write(directory / f"{name}.trace.json")


def sweep_plans(setting: Setting, samples: int) -> list[Plan]:
    """A grid of R_t and m, small enough to run live."""
    n, room = setting.geometry.instances, admission(setting.costs, setting.geometry)
    thresholds = {max(1, round(share * samples)) for share in (0.08, 0.15, 0.25, 0.4)}
    keeps = {max(1, round(share * n)) for share in (0.25, 0.375, 0.5, 0.625)}
    return [
        Plan("fixed", threshold=threshold, keep=keep, way="kv")
        for threshold in sorted(thresholds)
        for keep in sorted(keeps)
        if threshold <= keep * room and keep < n
    ]


def benchmark(args: argparse.Namespace) -> list[dict]:
    """Print and return the lines."""
    setting = make_setting(args)
    lines: list[dict] = []

    def show(entry: dict) -> None:
        lines.append(entry)
        print(json.dumps(entry), flush=True)

    # The first run of everything is slower, whatever is compiled.
    measured(setting, Plan("fixed", threshold=args.samples // 4, keep=args.instances // 2))
    serial = measured(setting, SERIAL, args.repeats)
    prompts, given = [PROMPT] * args.samples, (setting.geometry, setting.costs)
    for policy in args.policies.split(","):
        plan = choose(policy, *given, prompts, setting.history, args.cap, way="kv")
        outcome = serial if policy == "serial" else measured(setting, plan, args.repeats)
        show(line("policy", setting, plan, outcome, serial))
        if args.timeline and policy != "serial":
            save_timeline(args.timeline, policy, setting, outcome, serial)
    if args.sweep:
        plans = sweep_plans(setting, args.samples)
        runs = [measured(setting, plan, args.repeats) for plan in plans]
        for plan, outcome in zip(plans, runs, strict=True):
            show(line("sweep", setting, plan, outcome, serial))
        best = min(range(len(plans)), key=lambda i: runs[i].total_ms)
        chosen = min(range(len(plans)), key=lambda i: setting.predicted(plans[i]))
        entry = line("argmin", setting, plans[chosen], runs[chosen], serial)
        entry["best_R_t"], entry["best_m"] = plans[best].threshold, plans[best].keep
        entry["over_best"] = round(runs[chosen].total_ms / runs[best].total_ms, 3)
        show(entry)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run on virtual CPU devices, one an instance."""
    args = parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    use_cpu_devices(args.instances)
    with controller_apart():
        benchmark(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
