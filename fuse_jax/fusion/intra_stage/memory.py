"""Activation memory of a schedule over time: what the plot and the trace draw."""

from __future__ import annotations

import numpy as np

from fuse_jax.fusion.intra_stage.problem import MODELS, QUANTA_PER_UNIT, TICKS_PER_MS
from fuse_jax.fusion.intra_stage.schedule import Schedule


def memory_curves(
    schedule: Schedule, device: int, cost_model: str = "ideal"
) -> tuple[np.ndarray, np.ndarray]:
    """Memory of a device over time, as steps.

    Between two tasks that take no time nothing is seen here: a peak of zero length counts in
    `Schedule.peaks`, and has no place on a time axis.

    Returns:
      times float64 [E] in ms, from 0, not decreasing; and held float64 [2, E], actor's and critic's
      memory (the problem's unit) from that time to the next.
    """
    graph, timing = schedule.graph, schedule.timing(cost_model)
    row = schedule.order[device]
    # Take (at the start) and give (at the end) in running order: exact at equal times too.
    time = np.stack([timing.start[row], timing.end[row]], axis=1).reshape(-1) / TICKS_PER_MS
    change = np.stack([graph.take[row], -graph.give[row]], axis=1).reshape(-1)
    owner = np.repeat(graph.model[row], 2)
    held = np.cumsum([np.where(owner == model, change, 0) for model in range(len(MODELS))], axis=1)
    keep = np.append(np.diff(time) > 0, True)
    times = np.concatenate([[0.0], time[keep]])
    return times, np.concatenate([np.zeros((2, 1)), held[:, keep] / QUANTA_PER_UNIT], axis=1)
