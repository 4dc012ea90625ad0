"""The report of a planned step: figures for people and programs, and the files beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuse_jax.fusion.intra_stage.plot import bubble, plot_schedule
from fuse_jax.fusion.intra_stage.problem import MODELS, Problem
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.intra_stage.search import SearchResult
from fuse_jax.fusion.intra_stage.trace import schedule_trace


def schedule_figures(found: SearchResult, serial: Sequence[Schedule]) -> dict[str, Any]:
    """What there is to say of a search's schedule.

    Args:
      found: the search's result; its cost model's times count.
      serial: serial training of the same two models, run after run (`baselines.serial_runs`).

    Returns:
      makespan, bound, serial_makespan (ms); speedup over serial; bubble and serial_bubble (shares
      of device time, 0..1); peak_memory and serial_peak_memory (the problem's unit); memory_cap or
      None; proven_optimal; stopped_by, evaluations, cpu_s of the search; problem (its name),
      cost_model, devices, tasks.
    """
    schedule, cost_model = found.schedule, found.cost_model
    problem = schedule.problem
    makespan = schedule.makespan(cost_model)
    slow = sum(run.makespan(cost_model) for run in serial)
    return {
        "problem": problem.name,
        "cost_model": cost_model,
        "devices": problem.devices,
        "tasks": problem.devices * problem.tasks_per_device,
        "makespan": makespan,
        "bound": found.bound,
        "proven_optimal": found.proven_optimal,
        "serial_makespan": slow,
        "speedup": slow / makespan if makespan else 1.0,
        "bubble": bubble([schedule], cost_model),
        "serial_bubble": bubble(serial, cost_model),
        "peak_memory": schedule.peak_memory,
        "serial_peak_memory": max(run.peak_memory for run in serial),
        "memory_cap": problem.memory_cap,
        "stopped_by": found.stopped_by,
        "evaluations": found.evaluations,
        "cpu_s": found.cpu_s,
    }


def report_text(problem: Problem, figures: dict[str, Any]) -> str:
    """The figures as lines for a terminal."""
    cap = figures["memory_cap"]
    gap = figures["makespan"] / figures["bound"] - 1 if figures["bound"] else 0.0
    met = "met: proven optimal" if figures["proven_optimal"] else f"not proven: {gap:.2%} above it"
    stop = {"bound": "at the bound", "budget": "at its budget", "time": "by its time limit"}
    lines = {
        "problem": figures["problem"] or "(no name)",
        "pipelines": "; ".join(_pipeline_text(problem, model) for model in range(len(MODELS))),
        "makespan": f"{figures['makespan']:,.6g} ms",
        "bound": f"{figures['bound']:,.6g} ms ({met})",
        "serial 1F1B": f"{figures['serial_makespan']:,.6g} ms",
        "speed-up": f"{figures['speedup']:.3f}x over serial",
        "bubble": f"{figures['bubble']:.1%} (serial {figures['serial_bubble']:.1%})",
        "peak memory": f"{figures['peak_memory']:.5g} (serial {figures['serial_peak_memory']:.5g}, "
        + (f"cap {cap:.5g})" if cap is not None else "no cap)"),
        "search": f"{figures['evaluations']:,} evaluations, {figures['cpu_s']:.2f} CPU-s, "
        f"stopped {stop.get(figures['stopped_by'], figures['stopped_by'])}",
    }
    return "\n".join(f"{name:<12} {text}" for name, text in lines.items())


def _pipeline_text(problem: Problem, model: int) -> str:
    pipeline, replicas = problem.pipelines[model], problem.replicas[model]
    extra = [f"{pipeline.chunks} chunks"] if pipeline.chunks > 1 else []
    extra += ["split backward"] if pipeline.split else []
    return (
        f"{MODELS[model]} {replicas} x {pipeline.stages} stages {pipeline.direction}, "
        + ", ".join([f"{pipeline.micro_batches} micro-batches", *extra])
    )


def write_report(
    out: str | Path, schedule: Schedule, serial: Sequence[Schedule], figures: dict[str, Any]
) -> list[Path]:
    """Write the schedule's files into the directory `out` (made if need be); returns their paths.

    gantt.png, comparison.png (serial above fused, one scale), schedule.csv, schedule.json,
    trace.json (for ui.perfetto.dev) and report.json, the figures.
    """
    directory, cost_model = Path(out), figures["cost_model"]
    directory.mkdir(parents=True, exist_ok=True)
    names = ("gantt.png", "comparison.png", "schedule.csv", "schedule.json", "trace.json")
    gantt, comparison, table, text, trace = (directory / name for name in names)
    limit = figures["bound"]
    plot_schedule(schedule, gantt, bound=limit, cost_model=cost_model)
    plot_schedule(schedule, comparison, serial=serial, bound=limit, cost_model=cost_model)
    table.write_text(schedule.to_csv(cost_model))
    text.write_text(schedule.to_json(cost_model) + "\n")
    schedule_trace(schedule, cost_model).write(trace)
    report = directory / "report.json"
    report.write_text(json.dumps(figures, indent=1) + "\n")
    return [gantt, comparison, table, text, trace, report]
