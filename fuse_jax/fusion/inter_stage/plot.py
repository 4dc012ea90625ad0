"""Pictures of inter-stage fusion: who does what when, and time over R_t and m.

Simulated and live timelines are the same spans, drawn by the same code. Decoding is blue, the paler
the fewer slots are live; scoring is warm, a hue a column; what is left grey is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fuse_jax.fusion.chart import (
    BAR_HEIGHT,
    CAPTION,
    INK,
    LEFT,
    MUTED,
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
from fuse_jax.fusion.inter_stage.spans import Span, figures, ms_text

IDLE = "#eef0f3"
PREFILL, DECODE, MOVE, WEIGHTS = "#12a594", "#1f5fa8", "#d6219c", "#667080"
SCORES = ("#f2a33a", "#d9541e", "#8a4fbf", "#7d8f22", "#a8323e")  # one a column, in order


def plot_timeline(
    spans: Sequence[Span],
    path: str | Path,
    *,
    instances: int,
    title: str = "inter-stage fusion",
    serial: Sequence[Span] = (),
    bound: float | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> None:
    """Write a PNG: a row an instance, time to the right in ms.

    Args:
      spans: the timeline to draw.
      serial: the timeline it replaces, drawn above to the same scale.
      bound: no order of work is faster than this many ms; a dashed line.
      marks: (ms, what happened then), for instance the migration.
    """
    charts = [list(serial), list(spans)] if serial else [list(spans)]
    row = float(np.clip(5.2 / instances, 0.11, 0.4))
    figure, axes = stack([row * instances] * len(charts), header=1.02)
    columns = _columns(charts)
    longest = max([span.end for chart in charts for span in chart] + [bound or 0.0, 1e-9])
    most = max([s.count for chart in charts for s in chart if s.kind == "decode"], default=1)
    for axis, chart in zip(axes, charts, strict=True):
        _draw(axis, chart, instances, columns, max(most, 1))
        axis.set_xlim(0, longest * 1.005)
    if serial:
        axes[0].set_title("serial: " + _caption(serial, instances), **CAPTION)
    gain = ""
    if serial:
        totals = [max(span.end for span in chart) for chart in charts]
        gain = f", {totals[0] / totals[1]:.3f}x the serial speed"
    limit = "" if bound is None else f" (ideal bound {ms_text(bound)} ms, dashed)"
    axes[-1].set_title("fused: " + _caption(spans, instances) + gain + limit, **CAPTION)
    for ms, text in marks:
        axes[-1].axvline(ms, color=INK, lw=1.0, zorder=5)
        axes[-1].annotate(
            text, (ms, instances - 0.5), (4, 3), textcoords="offset points", fontsize=8.5,
            color=INK, zorder=6, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    if bound is not None:
        mark_bound(axes[-1], bound)
    share_time_axis(axes)
    _header(figure, title, charts, columns)
    write(figure, path)


def _columns(charts: Sequence[Sequence[Span]]) -> list[str]:
    """Columns scored, in the order of their first batch."""
    return list(dict.fromkeys(s.name for chart in charts for s in chart if s.kind == "score"))


def _draw(axis: Axes, spans: Sequence[Span], instances: int, columns: list[str], most: int) -> None:
    total = max((span.end for span in spans), default=0.0)
    axis.set_ylim(instances - 0.5, -0.5)
    _fill(axis, [(0.0, total, i) for i in range(instances)], [to_rgb(IDLE)] * instances, 1)
    drawn = [span for span in spans if span.kind != "weights" and span.end > span.start]
    colors = [_color(span, columns, most) for span in drawn]
    _fill(axis, [(s.start, s.end, s.instance) for s in drawn], colors, 2)
    copies = [(s.start, s.end, s.instance) for s in spans if s.kind == "weights"]
    _fill(axis, copies, [to_rgb(WEIGHTS)] * len(copies), 3, height=0.14, shift=0.36)
    plain(axis)
    axis.set_yticks(range(0, instances, max(1, instances // 16)))
    axis.set_ylabel("instance", color=MUTED)


def _color(span: Span, columns: list[str], most: int) -> tuple[float, ...]:
    if span.kind == "decode":
        # A square root: one live slot of 32 must still be told from none.
        share = (span.count / most) ** 0.5
        return tuple(1 - (1 - c) * (0.15 + 0.85 * share) for c in to_rgb(DECODE))
    if span.kind == "score":
        return to_rgb(SCORES[columns.index(span.name) % len(SCORES)])
    return to_rgb({"prefill": PREFILL, "move": MOVE}[span.kind])


def _fill(
    axis: Axes,
    boxes: Sequence[tuple[float, float, int]],
    colors: Sequence[tuple[float, ...]],
    zorder: float,
    height: float = BAR_HEIGHT,
    shift: float = 0.0,
) -> None:
    """Bars (start, end, row), one polygon each."""
    if not boxes:
        return
    start, end, row = (np.array(values, float) for values in zip(*boxes, strict=True))
    corners = bars(start, end, row, height, shift)
    # A hairline of white keeps neighbours apart; it would hide boxes narrower than itself.
    style = {"facecolors": colors, "edgecolors": "white", "linewidths": 0.15}
    axis.add_collection(PolyCollection(list(corners), zorder=zorder, **style))


def _caption(spans: Sequence[Span], instances: int) -> str:
    """What a timeline amounts to, as a line over its chart."""
    seen = figures(spans, instances)
    return (
        f"{ms_text(seen.total_ms)} ms, generation ends at {ms_text(seen.generation_ms)}, "
        f"{seen.utilisation:.0%} of device time used, {seen.scoring_hidden:.0%} of scoring hidden"
    )


def _header(
    figure: Figure, title: str, charts: Sequence[Sequence[Span]], columns: list[str]
) -> None:
    """The title, and the legend below it."""
    height = figure.get_figheight()
    headline(figure, title)
    kinds = {span.kind for chart in charts for span in chart}
    patches = [
        Patch(facecolor=color, label=label)
        for kind, color, label in (
            ("prefill", PREFILL, "prefill"),
            ("decode", DECODE, "decode (paler: fewer live slots)"),
            ("move", MOVE, "samples moved in"),
        )
        if kind in kinds
    ]
    patches += [
        Patch(facecolor=SCORES[i % len(SCORES)], label=f"score: {column}")
        for i, column in enumerate(columns)
    ]
    if "weights" in kinds:
        patches.append(Patch(facecolor=WEIGHTS, label="foot line: weights brought in"))
    patches.append(Patch(facecolor=IDLE, edgecolor=RULE, label="idle"))
    figure.legend(
        handles=patches, ncols=len(patches), loc="center left", frameon=False, fontsize=9.5,
        bbox_to_anchor=(LEFT / WIDTH - 0.004, 1 - 0.57 / height), labelcolor=INK,
        handlelength=1.2, handleheight=1.0, columnspacing=1.4, handletextpad=0.45,
    )  # fmt: skip
