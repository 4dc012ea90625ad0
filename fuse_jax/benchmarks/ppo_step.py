"""A whole PPO step (rollout, scoring, update) beside the time XLA's own dot needs for its products.

    python -m fuse_jax.benchmarks.ppo_step --prompts 64 --prompt-length 32 --new-tokens 64

One JSON line. A step generates the responses, scores them with reference, critic and reward model
(all of the actor's size), and updates actor and critic on every mini-batch. `parts` are medians of
the step's parts. `floor` counts the products of real tokens at the shapes they are run with, and
attention; `measured_over_floor` is in CPU-seconds on a CPU, else in wall seconds.

For one thread on one core: `XLA_FLAGS=--xla_cpu_multi_thread_eigen=false OMP_NUM_THREADS=1
taskset -c 0 python -m fuse_jax.benchmarks.ppo_step`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuse_jax.benchmarks import rollout
from fuse_jax.benchmarks.measure import (
    Dot,
    Timing,
    attention_flops,
    best,
    environment,
    floor,
    forward_dots,
    median,
    peak_rss,
    timed,
    with_backward,
)
from fuse_jax.buckets import Bucket, automatic_lengths, make_buckets
from fuse_jax.config import ComputeConfig, PPOConfig, RewardConfig
from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture, parameter_count
from fuse_jax.placement.mesh import single_device_mesh
from fuse_jax.rollout.batcher import generate_samples
from fuse_jax.rollout.warmup import precompile
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model, PassOptions, Role, Scored
from fuse_jax.scoring.scorer import Scorer
from fuse_jax.training.experience import (
    ScoredBatch,
    lay_out,
    make_experience,
    ragged,
    shape,
)
from fuse_jax.training.gradients import HyperParameters
from fuse_jax.training.minibatch import Experience, cut_minibatch, training_buckets
from fuse_jax.training.ppo_step import create_ppo_state, make_step


def parser() -> argparse.ArgumentParser:
    """The flags of the rollout benchmark, and those of scoring and update."""
    flags = rollout.parser()
    flags.description = __doc__
    add = flags.add_argument
    add("--minibatches", type=int, default=4)
    add("--epochs", type=int, default=1)
    add("--micro-batch-tokens", type=int, default=768)
    add("--scoring-tokens", type=int, default=1536)
    add("--remat", choices=("none", "full", "dots"), default="none")
    return flags


class PPOStep:
    """Everything one step needs, compiled at the first call."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.prompts % args.minibatches:
            raise ValueError(f"minibatches={args.minibatches} must divide prompts={args.prompts}")
        self.args, self.engine = args, rollout.make_engine(args)
        self.lengths = rollout.response_lengths(args)
        self.longest = args.prompt_length + args.new_tokens
        arch, mesh = self.engine.arch, single_device_mesh()
        actor, critic, reward_model = (
            transformer.init(arch, jax.random.key(args.seed + n), head=head)
            for n, head in enumerate(("lm", "scalar", "scalar"))
        )
        self.frozen = {"reference": actor, "reward_model": reward_model}
        # Fixed lengths need one shape only: the longest, as it is.
        lengths = (self.longest,) if args.lengths == "fixed" else automatic_lengths(self.longest)
        self.scoring_buckets = make_buckets(lengths, args.scoring_tokens, 1)
        self.scorer = Scorer(
            mesh,
            self.scoring_buckets,
            ("ref_log_probs", "values", "scores"),
            max_response=args.new_tokens,
            options=PassOptions(temperature=args.temperature, dtype=jnp.dtype(args.dtype)),
        )
        self.buckets = training_buckets(
            lengths, args.micro_batch_tokens, args.prompts // args.minibatches
        )
        compute = ComputeConfig(dtype=args.dtype, remat=args.remat)
        self.ppo = PPOConfig(minibatches=args.minibatches, epochs=args.epochs)
        hp = HyperParameters(arch, arch, self.ppo, compute, temperature=args.temperature)
        self.update_step = make_step(mesh, hp)
        self.state = create_ppo_state({"actor": actor, "critic": critic}, hp, mesh)
        self.seed_key, self.rng = jax.random.key(args.seed), np.random.default_rng(args.seed)

    def __call__(self) -> dict[str, Timing]:
        """One step; the time of each part."""
        samples, rolled = timed(self.generate)
        scored, scoring = timed(lambda: self.score(samples))
        experience, shaping = timed(lambda: self.experience(samples, scored))
        _, updating = timed(lambda: self.update(experience))
        return {"rollout": rolled, "scoring": scoring, "experience": shaping, "update": updating}

    def generate(self) -> list[Sample]:
        """Responses to fresh prompts."""
        size = (self.args.prompts, self.args.prompt_length)
        prompts = self.rng.integers(0, self.args.vocab, size, np.int32)
        found = generate_samples(
            self.engine,
            self.state.params["actor"],
            list(prompts),
            seed_key=self.seed_key,
            max_new_tokens=self.lengths,
        )
        return list(found)

    def score(self, samples: list[Sample]) -> list[Scored]:
        """Reference log-probs, values and scores."""
        arch = self.engine.arch
        params = {**self.frozen, "critic": self.state.params["critic"]}
        roles: tuple[Role, ...] = ("reference", "reward_model", "critic")
        return self.scorer.score(samples, {role: Model(arch, params[role]) for role in roles})

    def experience(self, samples: list[Sample], scored: list[Scored]) -> Experience:
        """Rewards, advantages and returns."""
        width, count = self.args.new_tokens, len(samples)
        tokens, prompts, responses = lay_out(samples, self.longest, 0)
        batch = ScoredBatch(
            tokens=tokens,
            prompt_lengths=prompts,
            response_lengths=responses,
            truncated=np.zeros(count, bool),
            log_probs=ragged([s.log_probs for s in samples], width),
            ref_log_probs=ragged([_there(s.ref_log_probs) for s in scored], width),
            values=ragged([_there(s.values) for s in scored], width),
            last_values=np.array([s.last_value for s in scored], np.float32),
            scores=np.array([s.score for s in scored], np.float32),
            valid=np.ones(count, bool),
        )
        coef = jnp.float32(self.ppo.kl.coef)
        order = np.arange(count)
        shaped = shape(batch, None, coef, order, reward=RewardConfig(), ppo=self.ppo)
        return make_experience(batch, shaped)

    def update(self, experience: Experience) -> Any:
        """All epochs over all mini-batches."""
        for _ in range(self.args.epochs):
            order = self.rng.permutation(self.args.prompts).reshape(self.args.minibatches, -1)
            for indices in order:
                minibatch = cut_minibatch(experience, indices, self.buckets)
                self.state, metrics = self.update_step(self.state, minibatch)
        return self.state, metrics

    def least_dots(self) -> tuple[list[Dot], float]:
        """Products that a step cannot do without, and the FLOPs of attention."""
        args, arch = self.args, self.engine.arch
        tokens = sum(self.lengths)
        score, train = self.scoring_buckets[-1], self.buckets[-1]
        lm, scalar = (
            lambda bucket, head=head: self._pass(arch, bucket, head) for head in ("lm", "scalar")
        )
        dots = [
            *rollout.least_dots(self.engine, args.prompts, tokens),
            *lm(score),
            *scalar(score),
            *scalar(score),
            *_times(with_backward([*lm(train), *scalar(train)]), args.epochs),
        ]
        first = args.prompt_length
        whole = [t for n in self.lengths for t in range(1, first + n + 1)]
        passes = 1 + 3 + 2 * 3 * args.epochs
        return dots, passes * attention_flops(arch, whole)

    def _pass(self, arch: Architecture, bucket: Bucket, head: str) -> list[Dot]:
        """A forward pass over all real tokens, run at the rows of `bucket`."""
        responses = sum(self.lengths)
        every = responses + self.args.prompts * self.args.prompt_length
        rows = bucket.rows * bucket.length
        dots = forward_dots(arch, rows, head="none", times=every / rows)
        outputs = arch.vocab_size if head == "lm" else 1
        if head == "lm":  # the scalar head's product is a dot of one column: nothing
            at_once = bucket.rows * self.args.new_tokens
            dots.append(Dot(at_once, arch.hidden_size, outputs, responses / at_once))
        return dots


def _times(dots: list[Dot], count: int) -> list[Dot]:
    return [Dot(dot.m, dot.k, dot.n, dot.count * count) for dot in dots]


def _there(column: np.ndarray | None) -> np.ndarray:
    if column is None:
        raise RuntimeError("the scorer left out a column that it was asked for")
    return column


def total(parts: dict[str, Timing]) -> Timing:
    """The whole step."""
    return Timing(sum(t.cpu_s for t in parts.values()), sum(t.wall_s for t in parts.values()))


def run(args: argparse.Namespace) -> dict:
    """Measure; see the module's docstring for what the result holds."""
    step = PPOStep(args)
    compiled = precompile(step.engine, step.state.params["actor"], step.seed_key)
    _, warm_up = timed(step)
    timings = [step() for _ in range(args.repeats)]
    dots, attention = step.least_dots()
    least = floor(dots, dtype=args.dtype, extra_flops=attention)
    steps = [total(parts) for parts in timings]
    fastest, middle = best(steps), median(steps)
    on_cpu = jax.default_backend() == "cpu"

    def part(name: str, value: Callable[[Timing], float]) -> float:
        return statistics.median(value(parts[name]) for parts in timings)

    return {
        "benchmark": "ppo_step",
        "parameters": parameter_count(step.engine.arch),
        "samples": args.prompts,
        "generated_tokens": sum(step.lengths),
        "tokens_per_s": sum(step.lengths) / fastest.wall_s,
        "cpu_s": fastest.cpu_s,
        "cpu_s_median": middle.cpu_s,
        "wall_s": fastest.wall_s,
        "wall_s_median": middle.wall_s,
        "parts_cpu_s": {name: part(name, lambda t: t.cpu_s) for name in timings[0]},
        "parts_wall_s": {name: part(name, lambda t: t.wall_s) for name in timings[0]},
        "flops": least.flops,
        "floor_gflops_per_cpu_s": least.gflops_per_cpu_s,
        "floor_cpu_s": least.cpu_s,
        "floor_wall_s": least.wall_s,
        "measured_over_floor": fastest.cpu_s / least.cpu_s
        if on_cpu
        else fastest.wall_s / least.wall_s,
        "peak_rss_mib": peak_rss() / 2**20,
        "compile_s": compiled.seconds + warm_up.wall_s,
        "flags": vars(args),
        "environment": environment(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the measurement as one JSON line."""
    print(json.dumps(run(parser().parse_args(argv))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
