"""A schedule as a Perfetto trace: a row a device, and the memory of each device as a counter."""

from __future__ import annotations

from fuse_jax.fusion.intra_stage.memory import memory_curves
from fuse_jax.fusion.intra_stage.problem import KINDS, MODELS, TICKS_PER_MS
from fuse_jax.fusion.intra_stage.schedule import Schedule
from fuse_jax.fusion.trace import Trace


def schedule_trace(schedule: Schedule, cost_model: str = "ideal") -> Trace:
    """Spans `actor F 3` on row `device 0`, ... and stacked counters of actor's and critic's memory.

    Times are those of `cost_model` (see cost.py). Raises ScheduleError on a deadlock.
    """
    graph, timing, trace = schedule.graph, schedule.timing(cost_model), Trace()
    start = (timing.start / TICKS_PER_MS).tolist()
    end = (timing.end / TICKS_PER_MS).tolist()
    for device, row in enumerate(schedule.order):
        for task in row.tolist():
            trace.span(
                "devices",
                f"device {device}",
                f"{MODELS[graph.model[task]]} {KINDS[graph.kind[task]]} {graph.micro_batch[task]}",
                start[task],
                end[task],
                micro_batch=int(graph.micro_batch[task]),
                replica=int(graph.replica[task]),
                stage=int(graph.stage[task]),
            )
    for device in range(schedule.problem.devices):
        times, held = memory_curves(schedule, device, cost_model)
        for time, amounts in zip(times.tolist(), held.T.tolist()):
            values: dict[str, float] = dict(zip(MODELS, amounts))
            trace.counter("activation memory", f"device {device}", time, values)
    return trace
