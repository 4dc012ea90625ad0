"""Search fused schedules for the published and the LLaMA problems; one JSON line a case.

Cases:
  authors/exp0 .. exp11: the twelve configurations of RLHFuse's artifact; makespan first, then the
    memory pass at that makespan (`peak_memory` is after it, `cpu_s` the makespan search alone).
  llama/<actor>-<critic>/M<1|2>[/cap1.0][/split][/v2]: LLaMA sizes 13B, 33B, 65B on 4, 8, 16
    stages, M = stages x 1 or 2, memory cap = the serial 1F1B peak, split backward, two chunks.
  llama/65B-65B/N32M64.

Fields: case, makespan, bound, proven_optimal, peak_memory, serial_makespan, cpu_s, and for
information stopped_by, evaluations, memory_cpu_s, memory_bound, speed_up. Times of the artifact
are in its units.

Run: python launch/benchmark.py schedule [--cases PREFIX[,PREFIX]] [--seconds S]
  [--authors-annealing S] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuse_jax.fusion.intra_stage.authors import authors_annealing, authors_greedy
from fuse_jax.fusion.intra_stage.baselines import serial_1f1b
from fuse_jax.fusion.intra_stage.problem import Pipeline, Problem
from fuse_jax.fusion.intra_stage.search import SearchResult, search
from fuse_jax.fusion.intra_stage.search_peak import lower_peak

# stages, micro-batches, forward (backward is twice that), activation; actor then critic
_AUTHORS = (
    ((8, 32, 5, 1.95), (4, 16, 4, 2)),
    ((8, 16, 5, 1.95), (4, 8, 4, 2)),
    ((8, 8, 5, 1.95), (4, 4, 4, 2)),
    ((8, 32, 5, 1.95), (8, 32, 2, 1)),
    ((8, 16, 5, 1.95), (8, 16, 2, 1)),
    ((8, 8, 5, 1.95), (8, 8, 2, 1)),
    ((16, 64, 2, 1.64), (8, 32, 2, 2)),
    ((16, 32, 2, 1.64), (8, 16, 2, 2)),
    ((16, 16, 2, 1.64), (8, 8, 2, 2)),
    ((16, 64, 2, 1.64), (16, 64, 1, 1)),
    ((16, 32, 2, 1.64), (16, 32, 1, 1)),
    ((16, 16, 2, 1.64), (16, 16, 1, 1)),
)
# layers, hidden size, stages
_LLAMA = {"13B": (40, 5120, 4), "33B": (60, 6656, 8), "65B": (80, 8192, 16)}
_PAIRS = (
    ("13B", "13B"),
    ("33B", "33B"),
    ("65B", "65B"),
    ("13B", "33B"),
    ("33B", "65B"),
    ("13B", "65B"),
)


def authors_problem(index: int) -> Problem:
    """Configuration 0..11 of RLHFuse's artifact; times and memory in its units."""
    models = []
    for (stages, micro_batches, forward, held), direction in zip(_AUTHORS[index], ("up", "down")):
        models.append(
            Pipeline(stages, micro_batches, forward, 2 * forward, held, direction=direction)
        )
    return Problem(*models, name=f"authors/exp{index}")


def llama_pipeline(
    size: str, multiple: int, *, split: bool = False, chunks: int = 1, stages: int | None = None
) -> Pipeline:
    """A LLaMA model's pipeline: five 65B layers take 128 forward and hold 1.0; backward is twice
    the forward.
    """
    layers, hidden, default = _LLAMA[size]
    stages = stages or default
    per_stage = layers / stages / chunks
    forward = round(per_stage * hidden * hidden / (5 * 8192**2) * 128)
    return Pipeline(
        stages,
        stages * multiple,
        forward,
        forward if split else 2 * forward,
        per_stage * hidden / (5 * 8192),
        weight_grad=forward if split else None,
        chunks=chunks,
        placement="vee" if chunks > 1 else "loop",
    )


def llama_problem(
    actor: str,
    critic: str,
    multiple: int,
    *,
    cap: float | None = None,
    split: bool = False,
    chunks: int = 1,
    stages: int | None = None,
) -> Problem:
    """Two LLaMA models; `cap` in units of the serial 1F1B peak (None: no cap)."""
    options: dict[str, Any] = {"split": split, "chunks": chunks, "stages": stages}
    first = llama_pipeline(actor, multiple, **options)
    second = replace(llama_pipeline(critic, multiple, **options), direction="down")
    problem = Problem(first, second)
    if cap is not None:
        problem = replace(problem, memory_cap=cap * serial_1f1b(problem).peak_memory)
    name = f"llama/{actor}-{critic}/" + (
        f"N{stages}M{stages * multiple}" if stages else f"M{multiple}"
    )
    name += (f"/cap{cap:.1f}" if cap else "") + ("/split" if split else "")
    return replace(problem, name=name + (f"/v{chunks}" if chunks > 1 else ""))


def problems() -> Iterator[Problem]:
    """All cases in the order they are printed."""
    for index in range(len(_AUTHORS)):
        yield authors_problem(index)
    yield llama_problem("65B", "65B", 2, stages=32)
    for multiple in (1, 2):
        for actor, critic in _PAIRS:
            for split in (False, True):
                for cap in (None, 1.0):
                    yield llama_problem(actor, critic, multiple, cap=cap, split=split)
    for actor, critic in _PAIRS:
        for split in (False, True):
            for cap in (None, 1.0):
                yield llama_problem(actor, critic, 1, cap=cap, split=split, chunks=2)


def _line(problem: Problem, found: SearchResult) -> dict[str, Any]:
    serial = serial_1f1b(problem)
    return {
        "case": problem.name,
        "makespan": found.makespan,
        "bound": found.bound,
        "proven_optimal": found.proven_optimal,
        "peak_memory": found.peak_memory,
        "serial_makespan": serial.makespan,
        "cpu_s": round(found.cpu_s, 3),
        "speed_up": round(serial.makespan / found.makespan, 4),
        "serial_peak_memory": serial.peak_memory,
        "stopped_by": found.stopped_by,
        "evaluations": found.evaluations,
    }


def run_case(
    problem: Problem, seconds: float, seed: int = 0, keep: Path | None = None
) -> dict[str, Any]:
    """One line: the makespan search, and for the authors' problems the memory pass after it.

    keep: a directory for the problem (JSON) and the schedule (CSV), for others to check.
    """
    found = search(problem, time_limit=seconds, seed=seed, evaluations=10**9)
    line = _line(problem, found)
    if problem.name.startswith("authors/"):
        left = max(0.0, seconds - found.cpu_s)
        lower = lower_peak(found, time_limit=left, seed=seed, evaluations=10**9)
        line.update(
            peak_memory=lower.peak_memory,
            memory_bound=lower.memory_bound,
            memory_cpu_s=round(lower.cpu_s, 3),
            memory_stopped_by=lower.stopped_by,
        )
        found = lower
    if keep is not None:
        name = problem.name.replace("/", "_")
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{name}.json").write_text(problem.to_json())
        (keep / f"{name}.csv").write_text(found.schedule.to_csv())
    return line


def annealing_line(problem: Problem, target: float, seconds: float) -> dict[str, Any]:
    """The authors' Algorithm 1 from their greedy start to the same makespan, in rounds until the
    time is up.
    """
    import time

    began = time.process_time()
    best, evaluations = authors_greedy(problem), 0
    seed = 0
    while best.makespan() > target and time.process_time() - began < seconds:
        run = authors_annealing(
            authors_greedy(problem),
            evaluations=400_000,
            hot=3.0,
            cold=0.003,
            target=target,
            seed=seed,
        )
        evaluations, seed = evaluations + run.evaluations, seed + 1
        if run.schedule.makespan() < best.makespan():
            best = run.schedule
    return {
        "case": f"{problem.name}/authors-annealing",
        "makespan": best.makespan(),
        "target": target,
        "reached": best.makespan() <= target,
        "cpu_s": round(time.process_time() - began, 3),
        "evaluations": evaluations,
    }


def warm_up() -> None:
    """Run every kernel once on a tiny problem, so that cpu_s is without compilation or loading."""
    tiny = llama_problem("13B", "13B", 1, cap=0.8)
    search(tiny, evaluations=20_000)
    found = search(replace(tiny, memory_cap=None), evaluations=10)
    lower_peak(found, evaluations=2_000)
    authors_annealing(authors_greedy(tiny), evaluations=10)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one JSON line a case."""
    parser = argparse.ArgumentParser(
        prog="schedule", description="Search fused schedules; JSON lines."
    )
    parser.add_argument(
        "--cases", default="", help="only cases that start with one of these, by comma"
    )
    parser.add_argument("--seconds", type=float, default=58.0, help="CPU seconds a case may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--authors-annealing",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="also run the authors' annealing to the same makespan on their problems",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="write each problem and schedule there"
    )
    options = parser.parse_args(argv)
    prefixes = tuple(options.cases.split(","))
    warm_up()
    for problem in problems():
        if not problem.name.startswith(prefixes):
            continue
        line = run_case(problem, options.seconds, options.seed, options.keep)
        print(json.dumps(line), flush=True)
        if options.authors_annealing and problem.name.startswith("authors/"):
            line = annealing_line(problem, line["makespan"], options.authors_annealing)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
