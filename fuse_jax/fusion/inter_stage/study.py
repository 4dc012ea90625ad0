"""What `launch/simulate.py inter-stage` does: assumed or measured figures in, a comparison out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fuse_jax.buckets import automatic_lengths, make_buckets
from fuse_jax.fusion.inter_stage.bound import ideal_bound
from fuse_jax.fusion.inter_stage.choose import Predictor, choose_with, migrations
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable, Geometry
from fuse_jax.fusion.inter_stage.lengths import LengthHistory
from fuse_jax.fusion.inter_stage.plot import plot_timeline
from fuse_jax.fusion.inter_stage.policy import POLICIES, SERIAL, Plan
from fuse_jax.fusion.inter_stage.simulator import simulate
from fuse_jax.fusion.inter_stage.spans import ms_text
from fuse_jax.fusion.inter_stage.sweep import plot_sweep, sweep, sweep_rows
from fuse_jax.fusion.inter_stage.workload import Outcome, Workload
from fuse_jax.fusion.output import OutputError, output_directory

COLUMNS = ("ref_log_probs", "values", "scores")


class StudyError(ValueError):
    """An option that cannot be; the message names it and says what would do."""


@dataclass(frozen=True)
class Study:
    """One setting to compare policies in; `history` is what the controller knows of lengths."""

    geometry: Geometry
    costs: Costs
    workloads: tuple[Workload, ...]
    history: LengthHistory
    about: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a study; every time is in ms."""
    add = parser.add_argument
    add("--instances", type=int, default=8, help="generation instances (default 8)")
    add("--slots", type=int, default=16, help="slots of an instance (16)")
    add("--samples", type=int, help="samples of an iteration (128; of a file of lengths: all)")
    help_ = "lognormal:MEDIAN:CAP[:SIGMA], or a file of response lengths (lognormal:50:512:1.0)"
    add("--lengths", default="lognormal:50:512", help=help_)
    add("--prompt", type=int, default=16, help="tokens of a prompt (16)")
    help_ = "lengths are predicted up to a lognormal error of this sigma (not predicted)"
    add("--prediction-sigma", type=float, metavar="SIGMA", help=help_)
    add("--chunk", type=int, default=8, help="decode steps of a dispatch (8)")
    help_ = "a decode step: MS, or LIVE:MS,LIVE:MS,... by live slots (10)"
    add("--decode-ms", default="10", help=help_)
    add("--prefill-ms", type=float, help="a prefill of --prefill-rows (two decode steps)")
    add("--prefill-rows", type=int, default=8, help="rows of a prefill or a move (8)")
    help_ = "serial scoring time / generation time; sets the cost of scoring batches (0.5)"
    add("--scoring-share", type=float, default=0.5, help=help_)
    add("--scoring-tokens", type=int, default=2048, help="tokens of a scoring batch (2048)")
    add("--move-ms", type=float, default=10.0, help="moving one group's cache (10)")
    add("--weights-ms", type=float, default=0.0, help="bringing the frozen weights in (0)")
    add("--policy", choices=POLICIES, default="auto", help="the one whose timeline is drawn")
    add("--threshold", type=int, default=0, help="R_t of --policy fixed or knee")
    add("--keep", type=int, default=0, help="m of --policy fixed")
    add("--sweep", action="store_true", help="time over all R_t and m, as table and picture")
    add("--draws", type=int, default=4, help="workloads to average over (4)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/inter_stage"), metavar="DIR", help="for pictures")


def run(options: argparse.Namespace) -> str:
    """Compare the policies, write the pictures, and return what to print.

    Raises StudyError: an option that cannot be.
    """
    try:
        study = build(options)
        output_directory(options.out, "--out")
    except StudyError:
        raise
    except OutputError as error:
        raise StudyError(str(error)) from None
    except ValueError as error:
        raise StudyError(f"{error} (from the options; --help lists them)") from error
    predict = Predictor(study.geometry, study.costs, study.workloads, study.history)
    if options.sweep and not migrations(predict.samples, study.geometry, study.costs):
        raise StudyError("--sweep: needs at least 2 instances and 2 samples to migrate anything")
    bound = float(np.mean([ideal_bound(study.geometry, study.costs, w) for w in study.workloads]))
    plans = _plans(predict, options)
    drawn = plans[-1]
    rows = [_row(plan, study, predict(SERIAL)) for plan in plans]
    gain = predict(SERIAL) / bound
    rows.append(["ideal bound", "", "", ms_text(bound), f"{gain:.3f}", "", "", ""])
    head = ["policy", "R_t", "m", "ms", "x serial", "scoring hidden", "moved", "padding rows"]
    lines = [study.about, "", *table([head, *rows]), "", f"{options.policy}: {drawn.why}"]
    lines.append(f"written  {_draw(study, drawn, options.out / 'timeline.png')}")
    if options.sweep:
        found = sweep(predict, bound)
        plot_sweep(found, options.out / "sweep.png", title=study.about)
        at = len(lines) - 1
        lines[at:at] = ["", "ms by R_t and m:", *table(sweep_rows(found)), ""]
        lines.append(f"written  {options.out / 'sweep.png'}")
    return "\n".join(lines)


def build(options: argparse.Namespace) -> Study:
    """The setting that `options` describe. Raises StudyError."""
    for name in ("instances", "slots", "prompt", "chunk", "prefill_rows", "draws"):
        _need(getattr(options, name) >= 1, name, getattr(options, name), "give at least 1")
    _need(0 <= options.seed < 2**63, "seed", options.seed, "give a whole number of at least 0")
    _check_policy(options)
    for name in ("move_ms", "weights_ms"):
        _need(getattr(options, name) >= 0, name, getattr(options, name), "give 0 or more")
    share = options.scoring_share
    _need(0 < share < 1000, "scoring_share", share, "give a ratio above 0, such as 0.5")
    lengths, cap, name = _lengths(options.lengths, options.seed)
    longest = options.prompt + cap
    tokens = options.scoring_tokens
    _need(tokens >= 1, "scoring_tokens", tokens, "give at least 1")
    geometry = Geometry(
        options.instances,
        options.slots,
        options.chunk,
        options.prefill_rows,
        make_buckets(automatic_lengths(longest), tokens, 1),
        COLUMNS,
    )
    decode = _decode(options.decode_ms)
    step = decode(options.slots, longest)
    prefill = 2 * step if options.prefill_ms is None else options.prefill_ms
    _need(prefill >= 0, "prefill_ms", prefill, "give 0 or more")
    # A prefill of one row costs what its tokens cost: longer ones, of moved samples, in proportion.
    buckets = {n: prefill * max(n / options.prompt, 1) for n in automatic_lengths(longest)}
    plain = {
        column: tuple(float(b.rows * b.length) for b in geometry.buckets) for column in COLUMNS
    }
    costs = Costs(decode, buckets, plain, options.move_ms, 0.0, options.weights_ms)
    workloads = _workloads(options, lengths, cap)
    history = LengthHistory(tuple(int(length) for length in lengths))
    about = (
        f"{options.instances} instances x {options.slots} slots, "
        f"{len(workloads[0].responses)} samples of {name}, scoring {share:g} x generation"
    )
    costs = _scaled(costs, geometry, workloads, share)
    return Study(geometry, costs, workloads, history, about)


def _scaled(costs: Costs, geometry: Geometry, workloads: Sequence[Workload], share: float) -> Costs:
    """Scoring costs such that serial scoring takes `share` of the time of generation."""
    free = replace(costs, weights_ms=0.0)
    runs = [simulate(SERIAL, geometry, free, workload) for workload in workloads]
    generation = sum(run.generation_ms for run in runs)
    scale = share * generation / sum(run.total_ms - run.generation_ms for run in runs)
    times = {name: tuple(ms * scale for ms in row) for name, row in costs.score_ms.items()}
    return replace(costs, score_ms=times)


def _workloads(options: argparse.Namespace, lengths: np.ndarray, cap: int) -> tuple[Workload, ...]:
    """A file's own lengths as they are, if no number of samples is asked; else draws from them."""
    generator = np.random.default_rng(options.seed)
    from_file = not options.lengths.startswith("lognormal:")
    if options.samples is None and from_file:
        drawn = [lengths]
    else:
        count = 128 if options.samples is None else options.samples
        _need(count >= 1, "samples", count, "give at least 1")
        drawn = [generator.choice(lengths, count) for _ in range(options.draws)]
    sigma, predicted = options.prediction_sigma, [()] * len(drawn)
    if sigma is not None:
        _need(0 <= sigma < 100, "prediction_sigma", sigma, "give 0 or more, such as 0.4")
        errors = [np.exp(sigma * generator.standard_normal(len(each))) for each in drawn]
        predicted = [tuple((a * b).tolist()) for a, b in zip(drawn, errors, strict=True)]
    return tuple(
        Workload((options.prompt,) * len(each), tuple(each.tolist()), cap, expected)
        for each, expected in zip(drawn, predicted, strict=True)
    )


def _lengths(text: str, seed: int) -> tuple[np.ndarray, int, str]:
    """Response lengths, their cap, and words for them."""
    if text.startswith("lognormal:"):
        parts = text.split(":")[1:]
        try:
            median, cap, sigma = (*map(float, parts), 1.0)[:3]
        except ValueError:
            median = cap = sigma = float("nan")
        ok = len(parts) in (2, 3) and median > 0 and cap >= 1 and sigma >= 0 and cap < 1e7
        _need(ok, "lengths", text, "write lognormal:MEDIAN:CAP[:SIGMA], e.g. lognormal:50:512:1.0")
        generator = np.random.default_rng(seed + 1)
        drawn = median * np.exp(sigma * generator.standard_normal(4096))
        lengths = np.clip(np.round(drawn), 1, int(cap)).astype(int)
        return lengths, int(cap), f"median {median:g}, cap {cap:g} (lognormal, σ {sigma:g})"
    path = Path(text)
    _need(path.is_file(), "lengths", text, "name a file, or write lognormal:MEDIAN:CAP[:SIGMA]")
    try:
        content = path.read_text()
        values = json.loads(content) if content.lstrip().startswith("[") else content.split()
        whole = [value if isinstance(value, int) else int(str(value)) for value in values]
    except (ValueError, TypeError) as error:
        fix = "write whole numbers, one a line or as a JSON list"
        raise StudyError(f"--lengths {text}: {error}: {fix}") from error
    ok = all(not isinstance(value, bool) and 1 <= value < 10**7 for value in whole)
    _need(len(whole) > 0 and ok, "lengths", text, "give whole numbers from 1 to 9999999")
    lengths = np.array(whole)
    return lengths, int(lengths.max()), f"{path.name} (median {np.median(lengths):g})"


def _decode(text: str) -> DecodeTable:
    """A decode table from `MS`, or from `LIVE:MS,LIVE:MS,...`."""
    fix = "write a time in ms, such as 10, or LIVE:MS pairs, such as 1:8,16:10,64:14"
    try:
        if ":" not in text:
            return DecodeTable((1,), (1,), ((float(text),),))
        pairs = sorted(
            (int(live), float(ms)) for live, ms in (p.split(":") for p in text.split(","))
        )
        return DecodeTable(tuple(p[0] for p in pairs), (1,), tuple((p[1],) for p in pairs))
    except ValueError as error:
        raise StudyError(f"--decode-ms {text}: {error}: {fix}") from error


def _need(ok: bool, name: str, value: object, fix: str) -> None:
    if not ok:
        raise StudyError(f"--{name.replace('_', '-')} {value}: {fix}")


def _check_policy(options: argparse.Namespace) -> None:
    """Refuse R_t and m that the policy has no use for or no room for."""
    if options.policy == "fixed":
        keep, threshold = options.keep, options.threshold
        fix = f"keep 1 to {options.instances - 1} of the {options.instances} instances"
        if options.instances == 1:
            fix = "one instance has none to free: give --instances 2 or more, or another --policy"
        _need(1 <= keep < options.instances, "keep", keep, fix)
        room = keep * options.slots
        fix = f"between 1 and {room}, the slots of --keep {keep}"
        _need(1 <= threshold <= room, "threshold", threshold, fix)
    else:
        _need(not options.keep, "keep", options.keep, "it goes with --policy fixed only")
    if options.policy not in ("fixed", "knee"):
        fix = "it goes with --policy fixed or knee only"
        _need(not options.threshold, "threshold", options.threshold, fix)
    most = options.instances * options.slots
    fix = f"give 0 to {most}, the slots of all instances (0: chosen)"
    _need(0 <= options.threshold <= most, "threshold", options.threshold, fix)


def _plans(predict: Predictor, options: argparse.Namespace) -> list[Plan]:
    """One plan a policy, the asked one last."""
    others = [p for p in ("serial", "knee", "simulated", "stream") if p != options.policy]
    asked = {"threshold": options.threshold, "keep": options.keep}
    handed = Plan("hand-off", why="hand-off without migration")
    compared = [choose_with(predict, name) for name in others]
    return [compared[0], handed, *compared[1:], choose_with(predict, options.policy, **asked)]


def _row(plan: Plan, study: Study, serial_ms: float) -> list[str]:
    """A plan's figures, means over the workloads."""
    runs = [
        simulate(plan, study.geometry, study.costs, workload, history=study.history)
        for workload in study.workloads
    ]
    ms = float(np.mean([run.total_ms for run in runs]))
    return [
        plan.policy,
        f"{plan.threshold}" if plan.threshold else "-",
        f"{plan.keep}" if plan.threshold else "-",
        ms_text(ms),
        f"{serial_ms / ms:.3f}",
        f"{np.mean([run.scoring_hidden for run in runs]):.0%}",
        f"{np.mean([run.migrated for run in runs]):.4g}",
        f"{np.mean([run.padding_rows for run in runs]):.4g}",
    ]


def _draw(study: Study, plan: Plan, path: Path) -> Path:
    """The timeline of the first workload, under serial."""
    workload = study.workloads[0]

    def timeline(of: Plan) -> Outcome:
        return simulate(
            of, study.geometry, study.costs, workload, history=study.history, record=True
        )

    chosen = timeline(plan)
    moved = [(chosen.migrated_at, f"R_t = {plan.threshold}, m = {plan.keep}")]
    plot_timeline(
        chosen.spans,
        path,
        instances=study.geometry.instances,
        title=study.about,
        serial=timeline(SERIAL).spans,
        bound=ideal_bound(study.geometry, study.costs, workload),
        marks=[(at, text) for at, text in moved if at is not None],
    )
    return path


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as aligned lines: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]
