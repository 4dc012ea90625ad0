"""The short report at the end of a run: report.json for machines, report.png for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fuse_jax.training.metrics import read_lines

SAMPLED, GREEDY, PLAIN = "#1f6f8b", "#e07a1f", "#6b7280"


def write_report(workdir: Path, report: dict[str, Any]) -> None:
    """Write `report` to report.json and draw report.png from metrics.jsonl and samples.jsonl."""
    (workdir / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    lines = read_lines(workdir / "metrics.jsonl")
    ppo = [line for line in lines if line["stage"] == "ppo"]
    held_out = [line for line in lines if line["stage"] == "eval"]
    lengths = {}
    if held_out:
        ends = {"before": held_out[0]["step"], "after": held_out[-1]["step"]}
        lengths = {moment: _response_lengths(workdir, step) for moment, step in ends.items()}
    if ppo or held_out:
        draw_report(ppo, held_out, lengths).savefig(workdir / "report.png", dpi=120)


def _response_lengths(workdir: Path, step: int) -> list[int]:
    """Response lengths of the sampled evaluation at `step`."""
    lines = read_lines(workdir / "samples.jsonl")
    return [line["length"] for line in lines if line["stage"] == "eval" and line["step"] == step]


def draw_report(
    ppo: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    lengths: dict[str, list[int]],
) -> Figure:
    """Reward, gold, KL and response length over iterations, and how lengths are distributed."""
    figure = Figure(figsize=(13, 7.2), layout="constrained")
    axes = figure.subplots(2, 3)
    _reward(axes[0, 0], ppo, held_out)
    _gold(axes[0, 1], ppo, held_out)
    _kl(axes[0, 2], ppo)
    _lengths(axes[1, 0], ppo)
    _histogram(axes[1, 1], lengths)
    _losses(axes[1, 2], ppo)
    return figure


def _series(lines: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    steps, values = zip(*points) if points else ((), ())
    return np.array(steps), np.array(values, dtype=float)


def _plot(axes: Axes, lines: list[dict[str, Any]], name: str, label: str, **style: Any) -> None:
    steps, values = _series(lines, name)
    if len(steps):
        axes.plot(steps, values, label=label, **style)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel("PPO iteration")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9)


def _reward(axes: Axes, ppo: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    _plot(axes, ppo, "score", "training prompts", color=PLAIN, alpha=0.7)
    _plot(axes, held_out, "score", "held out, sampled", color=SAMPLED, marker="o")
    _plot(axes, held_out, "greedy_score", "held out, greedy", color=GREEDY, marker="s")
    _finish(axes, "Reward", "score of the reward source")


def _gold(axes: Axes, ppo: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    _plot(axes, ppo, "gold", "training prompts", color=PLAIN, alpha=0.5)
    _plot(axes, held_out, "gold", "held out, sampled", color=SAMPLED, marker="o")
    _plot(axes, held_out, "greedy_gold", "held out, greedy", color=GREEDY, marker="s")
    axes.set_ylim(0, 1.02)
    _finish(axes, "Gold metric (PPO never sees it)", "share of right responses")


def _kl(axes: Axes, ppo: list[dict[str, Any]]) -> None:
    _plot(axes, ppo, "kl", "KL(actor ‖ reference)", color=SAMPLED)
    low, high = axes.get_ylim()
    axes.set_ylim(min(-0.01, low), max(0.1, high))
    _finish(axes, "KL to the reference", "nats a response")
    steps, values = _series(ppo, "kl_coef")
    if len(set(values)) > 1:
        twin = axes.twinx()
        twin.plot(steps, values, color=PLAIN, linestyle="--")
        twin.set_ylabel("KL coefficient (dashed)")


def _lengths(axes: Axes, ppo: list[dict[str, Any]]) -> None:
    _plot(axes, ppo, "length_mean", "mean", color=SAMPLED)
    _plot(axes, ppo, "length_p50", "median", color=PLAIN)
    _plot(axes, ppo, "length_p99", "99th percentile", color=GREEDY)
    axes.set_ylim(bottom=0)
    _finish(axes, "Response length", "tokens")


def _histogram(axes: Axes, lengths: dict[str, list[int]]) -> None:
    longest = max((max(values) for values in lengths.values() if values), default=1)
    bins = np.arange(0.5, longest + 1.5, max(1, longest // 60)).tolist()
    for (moment, values), color in zip(lengths.items(), (PLAIN, SAMPLED)):
        if values:
            axes.hist(
                values, bins=bins, label=moment, color=color, alpha=0.55, weights=_share(values)
            )
    _finish(axes, "Response lengths, held out", "share of responses")
    axes.set_xlabel("tokens")


def _share(values: list[int]) -> np.ndarray:
    return np.full(len(values), 1 / len(values))


def _losses(axes: Axes, ppo: list[dict[str, Any]]) -> None:
    _plot(axes, ppo, "critic_loss", "critic loss", color=SAMPLED, marker=".")
    _plot(axes, ppo, "entropy", "entropy (nats)", color=GREEDY, marker=".")
    _plot(axes, ppo, "clip_fraction", "clip fraction", color=PLAIN)
    axes.set_ylim(bottom=0)
    _finish(axes, "Update", "")
