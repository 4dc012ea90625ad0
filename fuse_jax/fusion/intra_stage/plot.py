"""Gantt charts of schedules, with the memory curve under them.

Hue tells the model (actor blue, critic orange), lightness the kind (F light, B middle, W dark);
what is left pale is bubble. One PolyCollection a colour, so that 10,000 tasks draw in a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D, IdentityTransform

from fuse_jax.fusion.chart import (
    BAR_HEIGHT,
    CAPTION,
    DPI,
    INK,
    MUTED,
    RIGHT,
    RULE,
    WIDTH,
    bars,
    headline,
    mark_bound,
    plain,
    share_time_axis,
    stack,
    write,
)
from fuse_jax.fusion.intra_stage.memory import memory_curves
from fuse_jax.fusion.intra_stage.problem import KINDS, MODELS, TICKS_PER_MS
from fuse_jax.fusion.intra_stage.schedule import Schedule

BUBBLE = "#f4f5f7"
COLORS = {
    ("actor", "F"): "#a9d0f7",
    ("actor", "B"): "#2f7bd0",
    ("actor", "W"): "#133e73",
    ("critic", "F"): "#fcd79b",
    ("critic", "B"): "#ec7f22",
    ("critic", "W"): "#93400c",
}


def plot_schedule(
    schedule: Schedule,
    path: str | Path,
    *,
    serial: Sequence[Schedule] = (),
    bound: float | None = None,
    cost_model: str = "ideal",
) -> None:
    """Write a PNG: one row a device, time to the right in ms, and memory over time below.

    Args:
      schedule: the schedule to draw.
      path: the PNG's path.
      serial: what it replaces, schedules that run one after the other on the same devices
        (`baselines.serial_runs`). Drawn above, to the same scale, and its peak memory is marked.
      bound: no schedule is faster than this many ms; marked by a dashed line.
      cost_model: the transport whose times are drawn.
    """
    charts = [list(serial), [schedule]] if serial else [[schedule]]
    rows = schedule.problem.devices
    row = float(np.clip(6.4 / rows, 0.2, 0.42)) * (0.8 if serial else 1.0)
    figure, axes = stack([row * rows] * len(charts) + [1.75], header=0.78)
    # One tick where nothing takes time: an axis needs some length.
    longest = max(1 / TICKS_PER_MS, *(_length(runs, cost_model) for runs in charts))
    for runs, axis in zip(charts, axes):
        draw_gantt(axis, runs, longest, cost_model)
    if serial:
        axes[0].set_title(_caption(serial, cost_model), **CAPTION)
    fused = axes[-2]
    fused.set_title(_fused_caption(schedule, serial, cost_model, bound), **CAPTION)
    if bound is not None:
        mark_bound(fused, bound)
    draw_memory(axes[-1], schedule, cost_model, serial)
    axes[-1].set_xlim(0, longest)
    share_time_axis(axes)
    _header(figure, schedule, charts)
    write(figure, path)


def plot_timelines(
    schedule: Schedule, timelines: Mapping[str, tuple[np.ndarray, np.ndarray]], path: str | Path
) -> None:
    """Write a PNG of several timelines of one schedule's tasks, to one scale.

    timelines: caption -> start and end of every task in ms, [n] by task id; NaN = did not run.
    """
    rows = schedule.problem.devices
    row = float(np.clip(6.4 / rows, 0.2, 0.42))
    figure, axes = stack([row * rows] * len(timelines), header=0.78)
    longest = max(1 / TICKS_PER_MS, *(float(np.nanmax(end)) for _, end in timelines.values()))
    for axis, (caption, (start, end)) in zip(axes, timelines.items()):
        _frame(axis, rows, longest, float(np.nanmax(end)))
        ran = np.isfinite(start)
        here, until = np.where(ran, start, -1.0), np.where(ran, end, -1.0)  # off the chart
        _draw_bars(axis, schedule, here, until)
        _number_bars(axis, schedule, here, until)
        axis.set_title(caption, **CAPTION)
    share_time_axis(axes)
    _header(figure, schedule, [[schedule]])
    write(figure, path)


def draw_gantt(
    axis: Axes, runs: Sequence[Schedule], until: float, cost_model: str = "ideal"
) -> None:
    """Draw schedules that run one after the other: device 0 at the top, 0 to `until` ms."""
    _frame(axis, runs[0].problem.devices, until, _length(runs, cost_model))
    begin = 0.0
    for run in runs:
        timing = run.timing(cost_model)
        start, end = begin + timing.start / TICKS_PER_MS, begin + timing.end / TICKS_PER_MS
        _draw_bars(axis, run, start, end)
        _number_bars(axis, run, start, end)
        _mark_chunks(axis, run, start, end)
        begin += timing.makespan / TICKS_PER_MS


def _frame(axis: Axes, devices: int, until: float, span: float) -> None:
    """The empty chart of 0 to `until` ms, of which `span` is bubble where nothing is drawn."""
    axis.set_xlim(0, until)
    axis.set_ylim(devices - 0.5, -0.5)
    row = np.arange(devices)
    _fill(axis, bars(0.0 * row, span + 0.0 * row, row), BUBBLE, zorder=1)
    plain(axis)
    axis.set_yticks(range(devices))
    axis.set_ylabel("device", color=MUTED)


def _draw_bars(axis: Axes, schedule: Schedule, start: np.ndarray, end: np.ndarray) -> None:
    graph = schedule.graph
    for (model, kind), color in COLORS.items():
        picked = np.flatnonzero(
            (graph.model == MODELS.index(model)) & (graph.kind == KINDS.index(kind))
        )
        boxes = bars(start[picked], end[picked], graph.device[picked])
        _fill(axis, boxes, color, zorder=2, edge="white")


def _mark_chunks(axis: Axes, schedule: Schedule, start: np.ndarray, end: np.ndarray) -> None:
    """A dark line along the foot of a bar for each chunk before its own (virtual stages)."""
    graph = schedule.graph
    for line in range(int(graph.chunk.max(initial=0))):
        picked = np.flatnonzero(graph.chunk > line)
        boxes = bars(start[picked], end[picked], graph.device[picked])
        foot = boxes[:, 2:, 1].copy() - 0.13 * line * BAR_HEIGHT
        boxes[:, :2, 1], boxes[:, 2:, 1] = foot - 0.07 * BAR_HEIGHT, foot
        _fill(axis, boxes, INK, zorder=2.5)


def draw_memory(
    axis: Axes, schedule: Schedule, cost_model: str = "ideal", serial: Sequence[Schedule] = ()
) -> None:
    """Memory over time of the device with the highest peak, by model; the others as hairlines."""
    device = int(schedule.peaks().argmax())
    span = schedule.timing(cost_model).makespan / TICKS_PER_MS
    curves = [memory_curves(schedule, d, cost_model) for d in range(schedule.problem.devices)]
    for time, held in curves:
        axis.step([*time, span], [*held.sum(0), 0], where="post", color=MUTED, lw=0.4, alpha=0.35)
    time, held = curves[device]
    time = np.append(time, span)
    held = np.append(held, held[:, -1:], axis=1)
    actor, both = held[0], held.sum(0)
    paint = {"step": "post", "lw": 0, "zorder": 2}
    axis.fill_between(time, actor, color=COLORS["actor", "B"], alpha=0.85, **paint)
    axis.fill_between(time, actor, both, color=COLORS["critic", "B"], alpha=0.85, **paint)
    axis.step(time, both, where="post", color=INK, lw=0.9, zorder=3)
    top = schedule.peak_memory
    top = max(top, _mark_levels(axis, schedule, serial))
    axis.set_ylim(0, (top or 1.0) * 1.12)
    axis.set_title(
        f"activation memory of device {device} (the highest peak: {schedule.peak_memory:.4g}), "
        "by model; hairlines: the other devices",
        **CAPTION,
    )
    axis.set_ylabel("memory", color=MUTED)
    plain(axis)
    axis.grid(axis="y", color=RULE, lw=0.5)


def _mark_levels(axis: Axes, schedule: Schedule, serial: Sequence[Schedule]) -> float:
    """Dashed lines at the cap and at the serial schedule's peak; the higher of them."""
    levels = []  # the labels stand apart, for the levels are often almost equal
    if serial:
        levels.append((max(run.peak_memory for run in serial), "serial peak", MUTED, 1.0))
    if schedule.problem.memory_cap is not None:
        levels.append((schedule.problem.memory_cap, "cap", "#c0262d", 0.9))
    for level, name, color, place in levels:
        axis.axhline(level, color=color, lw=1.1, ls=(0, (4, 2)), zorder=4)
        axis.annotate(
            f"{name} {level:.4g}", (place, level), (-4, 2), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="bottom", fontsize=8.5, color=color,
        )  # fmt: skip
    return max((level for level, *_ in levels), default=0.0)


def _number_bars(axis: Axes, schedule: Schedule, start: np.ndarray, end: np.ndarray) -> None:
    """Write the micro-batch's number in the bars, a whole kind of task or none of it.

    The font is the largest that fits most bars of the kind; a kind too narrow for it has none.
    """
    graph = schedule.graph
    left, right = axis.get_xlim()
    width = (end - start) * axis.bbox.width * 72 / DPI / (right - left)  # points
    bar = BAR_HEIGHT * axis.bbox.height * 72 / DPI / schedule.problem.devices
    largest = min(8.0, 0.62 * bar)
    for model, kind in COLORS:
        own = (graph.model == MODELS.index(model)) & (graph.kind == KINDS.index(kind))
        own &= width > 0
        if not own.any():
            continue
        digits = len(str(int(graph.micro_batch[own].max())))
        size = min(largest, (np.quantile(width[own], 0.2) - 1.5) / (_DIGIT_WIDTH * digits))
        if size >= _SMALLEST_FONT:
            _number(axis, schedule, own & (width > size * _DIGIT_WIDTH * digits), start, end, size)


_DIGIT_WIDTH, _SMALLEST_FONT = 0.64, 4.6  # of the font size; points


def _number(axis: Axes, schedule: Schedule, own, start, end, size: float) -> None:
    """Numbers in the middle of the chosen bars [n] bool, one collection a number."""
    graph = schedule.graph
    for micro_batch in np.unique(graph.micro_batch[own]):
        chosen = np.flatnonzero(own & (graph.micro_batch == micro_batch))
        label = TextPath((0, 0), str(micro_batch), size=size)
        extents = label.get_extents()
        middle = Affine2D().translate(
            -extents.x0 - extents.width / 2, -extents.y0 - extents.height / 2
        )
        where = np.stack([(start + end)[chosen] / 2, graph.device[chosen]], axis=1)
        numbers = PathCollection([label.transformed(middle)], sizes=[1.0], offsets=where)
        numbers.set(transform=IdentityTransform(), offset_transform=axis.transData, zorder=3)
        numbers.set(facecolor="white" if graph.kind[chosen[0]] else INK, edgecolor="none")
        axis.add_collection(numbers)


def _caption(runs: Sequence[Schedule], cost_model: str) -> str:
    """The line over a serial chart: length, bubble, memory."""
    peak = max(run.peak_memory for run in runs)
    return (
        f"serial: {_length(runs, cost_model):,.6g} ms, bubble {bubble(runs, cost_model):.1%}, "
        f"peak memory {peak:.4g}"
    )


def _fused_caption(
    schedule: Schedule, serial: Sequence[Schedule], cost_model: str, bound: float | None
) -> str:
    """The line over the fused chart: as `_caption`, with the bound and the gain."""
    makespan = schedule.makespan(cost_model)
    limit = "" if bound is None else f" (bound {bound:,.6g} ms, dashed)"
    gain = f", {_length(serial, cost_model) / makespan:.3f}x the serial speed" if serial else ""
    return (
        f"fused: {makespan:,.6g} ms{limit}{gain}, bubble {bubble([schedule], cost_model):.1%}, "
        f"peak memory {schedule.peak_memory:.4g}"
    )


def _length(runs: Sequence[Schedule], cost_model: str) -> float:
    """ms of schedules that run one after the other."""
    return sum(run.makespan(cost_model) for run in runs)


def bubble(runs: Sequence[Schedule], cost_model: str = "ideal") -> float:
    """Idle share, 0..1, of all device time of schedules that run one after the other."""
    total = _length(runs, cost_model) * runs[0].problem.devices
    work = sum(int(run.graph.duration.sum()) for run in runs) / TICKS_PER_MS
    return 1.0 - work / total if total else 0.0


def _header(figure: Figure, schedule: Schedule, charts: Sequence[Sequence[Schedule]]) -> None:
    """Title at the left, legend at the right."""
    height = figure.get_figheight()
    title = schedule.problem.name or "actor and critic, fused"
    y = 1 - 0.26 / height
    headline(figure, title)
    present = {
        (MODELS[model], KINDS[kind])
        for runs in charts
        for run in runs
        for model, kind in zip(run.graph.model.tolist(), run.graph.kind.tolist())
    }
    patches = [
        Patch(facecolor=color, label=f"{model} {kind}")
        for (model, kind), color in COLORS.items()
        if (model, kind) in present
    ]
    patches.append(Patch(facecolor=BUBBLE, edgecolor=RULE, label="bubble"))
    if schedule.problem.has_chunks:
        patches.append(Patch(facecolor=INK, label="foot line: later chunk"))
    figure.legend(
        handles=patches, ncols=len(patches), loc="center right", frameon=False, fontsize=10,
        bbox_to_anchor=(1 - RIGHT / WIDTH + 0.004, y), labelcolor=INK, handlelength=1.2,
        handleheight=1.0, columnspacing=1.3, handletextpad=0.45,
    )  # fmt: skip


def _fill(axis: Axes, boxes: Any, color: str, zorder: float, edge: str = "none") -> None:
    """Draw many boxes [n, 4, 2] in one colour."""
    style = {"facecolors": color, "edgecolors": edge, "linewidths": 0.35}
    axis.add_collection(PolyCollection(boxes, zorder=zorder, **style))
