"""The timeline of one update, planned against measured: a picture and a Chrome trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Float

from fuse_jax.fusion.intra_stage.cost import CostModel
from fuse_jax.fusion.intra_stage.plot import plot_timelines
from fuse_jax.fusion.intra_stage.problem import KINDS, MODELS, TICKS_PER_MS
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.trace import Trace

PICTURE, TRACE = "pipeline.png", "pipeline_trace.json"
Times = tuple[np.ndarray, np.ndarray]


def write_timeline(
    workdir: Path, schedule: Schedule, cost_model: CostModel, spans: Float[np.ndarray, "n 5"] | None
) -> None:
    """`pipeline.png` and `pipeline_trace.json` (ui.perfetto.dev) in `workdir`.

    spans: as `mailbox.Program.spans` gives them; None where the transport notes no times: then the
    plan is all there is.
    """
    timing = schedule.timing(cost_model)
    timelines = {"planned": (timing.start / TICKS_PER_MS, timing.end / TICKS_PER_MS)}
    if spans is not None and len(spans):
        timelines["measured"] = measured_times(schedule, spans)
    captions = {
        f"{name}: {float(np.nanmax(end)):.1f} ms": times
        for name, times in timelines.items()
        for end in times[1:]
    }
    plot_timelines(schedule, captions, workdir / PICTURE)
    trace(schedule, timelines).write(workdir / TRACE)


def measured_times(schedule: Schedule, spans: Float[np.ndarray, "n 5"]) -> Times:
    """Start and end in ms of every task by id, from the first start; NaN if it did not run.

    With several lanes a task starts with the first and ends with the last.
    """
    count = schedule.graph.duration.size
    start, end = np.full(count, np.inf), np.full(count, -np.inf)
    tasks = spans[:, 2].astype(int)
    np.minimum.at(start, tasks, spans[:, 3])
    np.maximum.at(end, tasks, spans[:, 4])
    ran = np.isfinite(start)
    begin = start[ran].min()
    return (
        np.where(ran, 1e3 * (start - begin), np.nan),
        np.where(ran, 1e3 * (end - begin), np.nan),
    )


def trace(schedule: Schedule, timelines: dict[str, Times]) -> Trace:
    """A group of rows for each timeline, a row a device."""
    graph, out = schedule.graph, Trace()
    for name, (start, end) in timelines.items():
        for device, row in enumerate(schedule.order.tolist()):
            for task in row:
                if np.isfinite(start[task]):
                    model, kind = MODELS[graph.model[task]], KINDS[graph.kind[task]]
                    label = f"{model} {kind} {graph.micro_batch[task]}"
                    out.span(name, f"device {device}", label, float(start[task]), float(end[task]))
    return out
