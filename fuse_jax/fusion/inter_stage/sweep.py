"""Time over R_t and m: the table behind a choice, and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fuse_jax.fusion.chart import DPI, INK, MUTED, RULE, plain, write
from fuse_jax.fusion.inter_stage.choose import Predictor, keeps, knee_keep, thresholds
from fuse_jax.fusion.inter_stage.policy import SERIAL, Plan, admission
from fuse_jax.fusion.inter_stage.spans import ms_text


@dataclass(frozen=True)
class Sweep:
    """Simulated ms of migrating at `thresholds[i]` to `keeps[j]` instances: `ms[i, j]`.

    NaN where those admit fewer. `knee_ms[i]` is with m by the knee rule (NaN: all
    instances would stay), `handed_ms` without migration.
    """

    samples: int
    thresholds: tuple[int, ...]
    keeps: tuple[int, ...]
    ms: np.ndarray
    knee: tuple[int, ...]
    knee_ms: np.ndarray
    handed_ms: float
    serial_ms: float
    bound_ms: float

    @property
    def best(self) -> tuple[int, int, float]:
        """(R_t, m, ms) of the fastest pair; R_t = 0 if not migrating is as fast."""
        if not np.isfinite(self.ms).any() or np.nanmin(self.ms) >= self.handed_ms:
            return 0, 0, self.handed_ms
        i, j = np.unravel_index(np.nanargmin(self.ms), self.ms.shape)
        return self.thresholds[i], self.keeps[j], float(self.ms[i, j])


def sweep(predict: Predictor, bound_ms: float) -> Sweep:
    """Simulate every pair (R_t, m) worth trying."""
    geometry, costs, samples = predict.geometry, predict.costs, predict.samples
    rows, kept = thresholds(samples), keeps(geometry.instances)
    room = admission(costs, geometry)

    def ms(threshold: int, keep: int) -> float:
        if threshold > keep * room or keep >= geometry.instances:
            return float("nan")
        return predict(Plan("fixed", threshold=threshold, keep=keep))

    knee = [knee_keep(threshold, geometry, costs) for threshold in rows]
    return Sweep(
        samples,
        tuple(rows),
        tuple(kept),
        np.array([[ms(t, m) for m in kept] for t in rows]).reshape(len(rows), len(kept)),
        tuple(knee),
        np.array([ms(t, m) for t, m in zip(rows, knee, strict=True)]),
        predict(Plan("fixed")),
        predict(SERIAL),
        bound_ms,
    )


def plot_sweep(found: Sweep, path: str | Path, *, title: str = "inter-stage fusion") -> None:
    """Write a PNG: left, time over R_t for every m; right, speed over serial of every pair."""
    figure = Figure(figsize=(16.0, 6.6), dpi=DPI, facecolor="white")
    lines, grid = figure.subplots(1, 2, width_ratios=(1.0, 1.08))
    figure.subplots_adjust(left=0.05, right=0.985, top=0.87, bottom=0.1, wspace=0.14)
    figure.text(0.05, 0.955, title, fontsize=14, color=INK, weight="bold", va="center")
    _draw_lines(lines, found)
    _draw_grid(grid, found)
    write(figure, path)


def _draw_lines(axis, found: Sweep) -> None:
    x = 100 * np.array(found.thresholds) / found.samples
    colors = matplotlib.colormaps["viridis"](np.linspace(0.05, 0.92, max(len(found.keeps), 1)))
    for j, keep in enumerate(found.keeps):
        label = f"m = {keep}" if j in (0, len(found.keeps) // 2, len(found.keeps) - 1) else None
        axis.plot(x, found.ms[:, j], color=colors[j], lw=1.3, label=label)
    axis.plot(x, found.knee_ms, color="#d6219c", lw=2.2, ls=(0, (5, 2)), label="m by the knee rule")
    threshold, keep, ms = found.best
    low, high = min(found.bound_ms, ms), np.nanmax([found.handed_ms, *found.ms.flat])
    # Serial is far above where everything is good: then it is named and not drawn.
    shown = found.serial_ms < high + 1.5 * (high - low)
    high = max(high, found.serial_ms) if shown else high
    for level, color, style, text in (
        (found.serial_ms, INK, "-", "serial" if shown else "serial, above the picture"),
        (found.handed_ms, MUTED, "-.", "hand-off, no migration"),
        (found.bound_ms, INK, (0, (4, 2)), "ideal bound"),
    ):
        axis.axhline(level, color=color, lw=1.2, ls=style, label=f"{text}: {ms_text(level)} ms")
    label = f"best: R_t = {threshold}, m = {keep}: {ms_text(ms)} ms"
    mark = {"marker": "*", "ms": 15, "mec": "white", "color": "#d9541e", "ls": "none", "zorder": 5}
    axis.plot([100 * threshold / found.samples], [ms], label=label, **mark)
    axis.set_ylim(low - 0.05 * (high - low), high + 0.35 * (high - low))
    axis.set_xlabel("R_t, unfinished samples at the migration (% of all)", color=MUTED)
    axis.set_ylabel("generation and scoring (ms)", color=MUTED)
    axis.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=2, loc="upper left")
    axis.grid(color=RULE, lw=0.5)
    axis.yaxis.set_major_formatter("{x:,.10g}")
    plain(axis)


def _draw_grid(axis, found: Sweep) -> None:
    speed = found.serial_ms / found.ms
    axis.imshow(speed, aspect="auto", cmap="YlGnBu", origin="lower")
    middle = (np.nanmax(speed) + np.nanmin(speed)) / 2 if np.isfinite(speed).any() else 0.0
    for i, j in np.ndindex(*speed.shape):
        if np.isfinite(speed[i, j]):
            color = "white" if speed[i, j] > middle else INK
            axis.text(j, i, f"{speed[i, j]:.3f}", ha="center", va="center", fontsize=8, color=color)
    threshold, keep, _ = found.best
    if threshold:
        i, j = found.thresholds.index(threshold), found.keeps.index(keep)
        box = {"fill": False, "ec": "#d9541e", "lw": 2.4}
        axis.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, **box))
    axis.set_xticks(range(len(found.keeps)), [str(keep) for keep in found.keeps])
    names = [f"{t} ({t / found.samples:.0%})" for t in found.thresholds]
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("m, instances that go on generating", color=MUTED)
    axis.set_title(
        "speed over serial by R_t and m (blank: more than m admit)", loc="left", fontsize=9.5,
        color=MUTED,
    )  # fmt: skip
    plain(axis)


def sweep_rows(found: Sweep) -> list[Sequence[str]]:
    """The sweep as rows of a table, the first its head: ms by R_t (down) and m (across)."""
    head = ["R_t", *(f"m={keep}" for keep in found.keeps), "knee rule"]
    rows: list[Sequence[str]] = [head]
    for i, threshold in enumerate(found.thresholds):
        cells = ["-" if np.isnan(ms) else ms_text(ms) for ms in found.ms[i]]
        knee = found.knee_ms[i]
        last = "-" if np.isnan(knee) else f"{ms_text(knee)} (m={found.knee[i]})"
        rows.append([f"{threshold} ({threshold / found.samples:.0%})", *cells, last])
    return rows
