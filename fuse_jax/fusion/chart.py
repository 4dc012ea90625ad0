"""What the charts of both fusions share: paper, ink, axes one above the other, bars of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, MUTED, RULE = "#1b1f24", "#667080", "#d5dae1"
BAR_HEIGHT = 0.84  # of a row
WIDTH, DPI = 20.0, 160  # inches, and dots an inch: 32 devices x 64 micro-batches still resolve
LEFT, RIGHT = 0.74, 0.29  # inches beside the axes
CAPTION: dict[str, Any] = {"loc": "left", "fontsize": 9.5, "color": MUTED, "pad": 4}


def stack(heights: Sequence[float], header: float) -> tuple[Figure, list[Axes]]:
    """A figure with axes of these heights (inches) one above the other, under a header."""
    gap, foot = 0.35, 0.5
    total = header + sum(heights) + gap * (len(heights) - 1) + foot
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    axes, top = [], total - header
    for height in heights:
        top -= height
        frame = (LEFT / WIDTH, top / total, (WIDTH - LEFT - RIGHT) / WIDTH, height / total)
        axes.append(figure.add_axes(frame))
        top -= gap
    return figure, axes


def headline(figure: Figure, text: str) -> None:
    """The figure's title, at the left of its header."""
    y = 1 - 0.26 / figure.get_figheight()
    figure.text(LEFT / WIDTH, y, text, fontsize=14, color=INK, weight="bold", va="center")


def plain(axis: Axes) -> None:
    """Only the foot line and quiet labels."""
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(RULE)
    axis.tick_params(length=0, labelsize=8.5, colors=MUTED)
    axis.set_axisbelow(True)


def bars(
    start: np.ndarray,
    end: np.ndarray,
    row: np.ndarray,
    height: float = BAR_HEIGHT,
    shift: float = 0.0,
) -> np.ndarray:
    """Corners of bars [n], `shift` below the middle of their rows; float64 [n, 4, 2]."""
    low, high = row + shift - height / 2, row + shift + height / 2
    x = np.stack([start, end, end, start], axis=1)
    return np.stack([x, np.stack([low, low, high, high], axis=1)], axis=2)


def mark_bound(axis: Axes, ms: float) -> None:
    """A dashed line at a time that nothing can beat."""
    axis.axvline(ms, color="white", lw=2.6, zorder=4)
    axis.axvline(ms, color=INK, lw=1.1, ls=(0, (4, 2)), zorder=4)


def share_time_axis(axes: Sequence[Axes]) -> None:
    """Label the lowest axis with the time in ms, the others not."""
    for axis in axes:
        axis.tick_params(labelbottom=axis is axes[-1])
    axes[-1].xaxis.set_major_formatter("{x:,.10g}")
    axes[-1].set_xlabel("time (ms)", color=MUTED)


def write(figure: Figure, path: str | Path) -> None:
    """Write a PNG."""
    FigureCanvasAgg(figure).print_png(str(path))
