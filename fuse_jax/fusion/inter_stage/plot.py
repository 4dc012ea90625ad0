"""Pictures of inter-stage fusion: who does what when, and time over R_t and m.

Simulated and live timelines are the same spans, drawn by the same code. Decoding is blue, the paler
the fewer slots are live; scoring is warm, a hue a column; what is left grey is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fuse_jax.fusion.inter_stage.spans import Span, figures, ms_text

INK, MUTED, RULE, IDLE = "#1b1f24", "#667080", "#d5dae1", "#eef0f3"
PREFILL, DECODE, MOVE, WEIGHTS = "#12a594", "#1f5fa8", "#d6219c", "#667080"
SCORES = ("#f2a33a", "#d9541e", "#8a4fbf", "#7d8f22", "#a8323e")  # one a column, in order
BAR_HEIGHT = 0.84
WIDTH, DPI = 18.0, 130
_LEFT, _RIGHT = 0.75, 0.3  # inches beside the axes


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
    figure, axes = _stack([row * instances] * len(charts))
    columns = _columns(charts)
    longest = max([span.end for chart in charts for span in chart] + [bound or 0.0, 1e-9])
    most = max([s.count for chart in charts for s in chart if s.kind == "decode"], default=1)
    for axis, chart in zip(axes, charts, strict=True):
        _draw(axis, chart, instances, columns, max(most, 1))
        axis.set_xlim(0, longest * 1.005)
        axis.tick_params(labelbottom=axis is axes[-1])
    if serial:
        axes[0].set_title("serial: " + _caption(serial, instances), **_CAPTION)
    gain = ""
    if serial:
        totals = [max(span.end for span in chart) for chart in charts]
        gain = f", {totals[0] / totals[1]:.3f}x the serial speed"
    limit = "" if bound is None else f" (ideal bound {ms_text(bound)} ms, dashed)"
    axes[-1].set_title("fused: " + _caption(spans, instances) + gain + limit, **_CAPTION)
    for ms, text in marks:
        axes[-1].axvline(ms, color=INK, lw=1.0, zorder=5)
        axes[-1].annotate(
            text, (ms, instances - 0.5), (4, 3), textcoords="offset points", fontsize=8.5,
            color=INK, zorder=6, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    if bound is not None:
        axes[-1].axvline(bound, color="white", lw=2.6, zorder=4)
        axes[-1].axvline(bound, color=INK, lw=1.1, ls=(0, (4, 2)), zorder=4)
    axes[-1].set_xlabel("time (ms)", color=MUTED)
    axes[-1].xaxis.set_major_formatter("{x:,.10g}")
    _header(figure, title, charts, columns)
    FigureCanvasAgg(figure).print_png(str(path))


_CAPTION: dict[str, Any] = {"loc": "left", "fontsize": 9.5, "color": MUTED, "pad": 4}


def _columns(charts: Sequence[Sequence[Span]]) -> list[str]:
    """Columns scored, in the order of their first batch."""
    return list(dict.fromkeys(s.name for chart in charts for s in chart if s.kind == "score"))


def _draw(axis: Axes, spans: Sequence[Span], instances: int, columns: list[str], most: int) -> None:
    total = max((span.end for span in spans), default=0.0)
    axis.set_ylim(instances - 0.5, -0.5)
    _fill(axis, [(0.0, total, i) for i in range(instances)], [to_rgb(IDLE)] * instances, 1)
    bars = [span for span in spans if span.kind != "weights" and span.end > span.start]
    colors = [_color(span, columns, most) for span in bars]
    _fill(axis, [(s.start, s.end, s.instance) for s in bars], colors, 2)
    copies = [(s.start, s.end, s.instance) for s in spans if s.kind == "weights"]
    _fill(axis, copies, [to_rgb(WEIGHTS)] * len(copies), 3, height=0.14, shift=0.36)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(RULE)
    axis.tick_params(length=0, labelsize=8.5, colors=MUTED)
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
    bars: Sequence[tuple[float, float, int]],
    colors: Sequence[tuple[float, ...]],
    zorder: float,
    height: float = BAR_HEIGHT,
    shift: float = 0.0,
) -> None:
    """Bars (start, end, row), one polygon each."""
    if not bars:
        return
    start, end, row = (np.array(values, float) for values in zip(*bars, strict=True))
    low, high = row + shift - height / 2, row + shift + height / 2
    corners = np.stack(
        [np.stack([start, end, end, start], 1), np.stack([low, low, high, high], 1)], 2
    )
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


def _stack(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Axes of the given heights (inches) below each other, and room for the header."""
    header, gap, foot = 1.02, 0.36, 0.5
    total = header + sum(heights) + gap * (len(heights) - 1) + foot
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    axes, top = [], total - header
    for height in heights:
        top -= height
        frame = (_LEFT / WIDTH, top / total, (WIDTH - _LEFT - _RIGHT) / WIDTH, height / total)
        axes.append(figure.add_axes(frame))
        top -= gap
    return figure, axes


def _header(
    figure: Figure, title: str, charts: Sequence[Sequence[Span]], columns: list[str]
) -> None:
    """The title, and the legend below it."""
    height = figure.get_figheight()
    figure.text(
        _LEFT / WIDTH, 1 - 0.25 / height, title, fontsize=14, color=INK, weight="bold", va="center"
    )
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
        bbox_to_anchor=(_LEFT / WIDTH - 0.004, 1 - 0.57 / height), labelcolor=INK,
        handlelength=1.2, handleheight=1.0, columnspacing=1.4, handletextpad=0.45,
    )  # fmt: skip
