"""Measure: one JSON line a case on standard output.

    python launch/benchmark.py rollout|ppo_step|schedule|pipeline|inter_stage [options]

`--help` after the name lists the options.
"""

import importlib
import sys

BENCHMARKS = ("rollout", "ppo_step", "schedule", "pipeline", "inter_stage")


def main(argv: list[str]) -> None:
    if not argv or argv[0] not in BENCHMARKS:
        sys.exit(f"usage: python launch/benchmark.py {'|'.join(BENCHMARKS)} [options]")
    importlib.import_module(f"fuse_jax.benchmarks.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
