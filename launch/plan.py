"""Plan before running: search a schedule and read what it promises.

python launch/plan.py schedule --problem configs/schedules/llama_65b_33b.json
python launch/plan.py schedule --problem FILE --problem.actor.lag=0.2 --problem.memory_cap=6

Keys are those of fuse_jax/fusion/intra_stage/problem.py; values are JSON or bare words.
"""

import argparse
import sys
from pathlib import Path


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments, with `overrides` = [(dotted key, text)] from every `--problem.key=value`."""
    from fuse_jax.fusion.intra_stage.problem_file import split_overrides

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    schedule = commands.add_parser(
        "schedule",
        help="fuse the training of actor and critic (RLHFuse): search a schedule, draw it",
        allow_abbrev=False,
    )
    schedule.add_argument("--problem", required=True, metavar="FILE", help="*.json, or *.py")
    schedule.add_argument("--out", metavar="DIR", help="default: runs/schedule/<name of FILE>")
    schedule.add_argument("--evaluations", type=int, default=2_000_000, help="search budget")
    help_ = "budget of the second pass: less peak memory at the same makespan (0: none)"
    schedule.add_argument("--memory_evaluations", type=int, default=0, metavar="N", help=help_)
    help_ = "CPU seconds for each pass; the result then depends on the machine"
    schedule.add_argument("--time_limit", type=float, metavar="S", help=help_)
    schedule.add_argument("--seed", type=int, default=0)
    help_ = "timing of transfers: ideal, rendezvous, neighbour, lockstep or deferred"
    schedule.add_argument("--cost_model", default="ideal", help=help_)
    schedule.add_argument("--plans", type=Path, metavar="DIR", help="where found plans are kept")
    known, rest = parser.parse_known_args(argv)
    try:
        known.overrides = split_overrides(rest)
    except ValueError as error:
        schedule.error(str(error))
    if known.memory_evaluations and known.cost_model != "ideal":
        schedule.error("--memory_evaluations works with --cost_model=ideal only")
    return known


def plan_schedule(arguments: argparse.Namespace) -> None:
    """Search or read the plan, print the figures, write the files."""
    from fuse_jax.fusion.intra_stage.baselines import serial_runs
    from fuse_jax.fusion.intra_stage.plans import find_plan
    from fuse_jax.fusion.intra_stage.problem_file import load_problem
    from fuse_jax.fusion.intra_stage.report import report_text, schedule_figures, write_report
    from fuse_jax.fusion.output import output_directory

    problem = load_problem(arguments.problem, arguments.overrides)
    out = arguments.out or Path("runs/schedule") / Path(arguments.problem).stem
    output_directory(out, "--out")
    found, stored = find_plan(
        problem,
        cost_model=arguments.cost_model,
        evaluations=arguments.evaluations,
        memory_evaluations=arguments.memory_evaluations,
        time_limit=arguments.time_limit,
        seed=arguments.seed,
        directory=arguments.plans,
    )
    serial = serial_runs(problem)
    figures = schedule_figures(found, serial)
    print(report_text(problem, figures))
    if stored:
        print(f"{'':<12} (read from the stored plans, not searched again)")
    for path in write_report(out, found.schedule, serial, figures):
        print(f"{'written':<12} {path}")


def main(argv: list[str]) -> int:
    from fuse_jax.fusion.intra_stage.plans import REFUSALS

    arguments = parse(argv)
    try:
        plan_schedule(arguments)
    except REFUSALS as error:
        print(f"plan.py: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
