"""Tokens a second of the slot engine, beside the time XLA's own dot needs for the same products.

    python -m fuse_jax.benchmarks.rollout --prompts 64 --prompt-length 32 --new-tokens 64

One JSON line. `floor` counts the weight products of prefill and decode at the rows they are really
run with, and attention; `measured_over_floor` is in CPU-seconds on a CPU, else in wall seconds.
With `--lengths lognormal` each response has a length of its own (a cap; there are no stop tokens),
so the figure includes how well slots are kept full.

For one thread on one core: `XLA_FLAGS=--xla_cpu_multi_thread_eigen=false OMP_NUM_THREADS=1
taskset -c 0 python -m fuse_jax.benchmarks.rollout`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

import jax
import numpy as np

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
)
from fuse_jax.config import RolloutConfig
from fuse_jax.models import transformer
from fuse_jax.models.architecture import Architecture, parameter_count
from fuse_jax.rollout.batcher import RolloutStats, generate_samples
from fuse_jax.rollout.engine import Engine
from fuse_jax.rollout.warmup import precompile


def parser() -> argparse.ArgumentParser:
    """Command-line flags; the defaults are the model of 1.3 million parameters."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = flags.add_argument
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=0, help="0 = as many as heads")
    add("--ffn", type=int, default=512)
    add("--vocab", type=int, default=1024)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--prompts", type=int, default=64)
    add("--prompt-length", type=int, default=32)
    add("--new-tokens", type=int, default=64, help="of every response, or the cap of lognormal")
    add("--lengths", choices=("fixed", "lognormal"), default="fixed")
    add("--median", type=float, default=0.0, help="of lognormal; 0 = new-tokens / 4")
    add("--sigma", type=float, default=0.8, help="of log length")
    add("--slots", type=int, default=64)
    add("--chunk", type=int, default=16, help="decode steps a dispatch")
    add("--prefill-rows", type=int, default=16)
    add("--temperature", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--repeats", type=int, default=5)
    add("--seed", type=int, default=0)
    return flags


def response_lengths(args: argparse.Namespace) -> list[int]:
    """How many tokens each response has."""
    if args.lengths == "fixed":
        return [args.new_tokens] * args.prompts
    middle = args.median or args.new_tokens / 4
    drawn = np.random.default_rng(args.seed).lognormal(np.log(middle), args.sigma, args.prompts)
    return np.clip(np.rint(drawn), 1, args.new_tokens).astype(int).tolist()


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine of the flags; no stop tokens, so lengths are those asked for."""
    arch = Architecture(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads or args.heads,
        head_dim=args.hidden // args.heads,
    )
    rollout = RolloutConfig(
        slots=args.slots,
        max_prompt_length=args.prompt_length,
        max_new_tokens=args.new_tokens,
        chunk=args.chunk,
        prefill_rows=args.prefill_rows,
        prompt_buckets=(args.prompt_length,),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
    )
    return Engine(arch, rollout, (), args.vocab, dtype=args.dtype)


def least_dots(engine: Engine, prompts: int, tokens: int) -> list[Dot]:
    """Weight products that `tokens` responses tokens to `prompts` prompts cannot do without.

    At the rows they are run with: `prefill_rows` prompts, or `slots` tokens, at once. Only the last
    state of a prompt meets the head.
    """
    arch, rollout = engine.arch, engine.rollout
    prefills, steps = prompts / rollout.prefill_rows, (tokens - prompts) / rollout.slots
    rows = rollout.prefill_rows * rollout.max_prompt_length
    return [
        *forward_dots(arch, rows, head="none", times=prefills),
        Dot(rollout.prefill_rows, arch.hidden_size, arch.vocab_size, prefills),
        *forward_dots(arch, rollout.slots, times=steps),
    ]


def run(args: argparse.Namespace) -> dict:
    """Measure; see the module's docstring for what the result holds."""
    engine, lengths = make_engine(args), response_lengths(args)
    params = transformer.init(engine.arch, jax.random.key(args.seed))
    rng, seed_key = np.random.default_rng(args.seed), jax.random.key(args.seed + 1)
    prompts = rng.integers(0, args.vocab, (args.prompts, args.prompt_length), np.int32)
    compiled = precompile(engine, params, seed_key)

    def once() -> RolloutStats:
        stats = RolloutStats()
        samples = generate_samples(
            engine, params, list(prompts), seed_key=seed_key, max_new_tokens=lengths, stats=stats
        )
        for _ in samples:
            pass
        return stats

    once()
    runs: list[tuple[RolloutStats, Timing]] = [timed(once) for _ in range(args.repeats)]
    stats, timings = runs[-1][0], [timing for _, timing in runs]
    first, tokens = args.prompt_length, sum(lengths)
    contexts = [*range(1, first + 1)] * args.prompts
    contexts += [first + t for length in lengths for t in range(1, length)]
    least = floor(
        least_dots(engine, args.prompts, tokens),
        dtype=args.dtype,
        extra_flops=attention_flops(engine.arch, contexts),
    )
    fastest, middle = best(timings), median(timings)
    on_cpu = jax.default_backend() == "cpu"
    ratio = fastest.cpu_s / least.cpu_s if on_cpu else fastest.wall_s / least.wall_s
    return {
        "benchmark": "rollout",
        "parameters": parameter_count(engine.arch),
        "generated_tokens": tokens,
        "tokens_per_s": tokens / fastest.wall_s,
        "tokens_per_cpu_s": tokens / fastest.cpu_s,
        "cpu_s": fastest.cpu_s,
        "cpu_s_median": middle.cpu_s,
        "wall_s": fastest.wall_s,
        "wall_s_median": middle.wall_s,
        "flops": least.flops,
        "floor_gflops_per_cpu_s": least.gflops_per_cpu_s,
        "floor_cpu_s": least.cpu_s,
        "floor_wall_s": least.wall_s,
        "measured_over_floor": ratio,
        "peak_rss_mib": peak_rss() / 2**20,
        "compiled_programs": compiled.count,
        "compile_s": compiled.seconds,
        "occupancy": stats.occupancy,
        "stats": asdict(stats),
        "flags": vars(args),
        "environment": environment(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the measurement as one JSON line."""
    print(json.dumps(run(parser().parse_args(argv))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
