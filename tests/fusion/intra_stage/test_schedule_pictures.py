"""Memory curve, Gantt chart and trace show what the independent judge computes."""

import json
import random
import time

import check_schedule as judge
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from random_schedules import draw_orders, draw_problem, rows_of

from fuse_jax.fusion.chart import stack
from fuse_jax.fusion.intra_stage import plot
from fuse_jax.fusion.intra_stage.memory import memory_curves
from fuse_jax.fusion.intra_stage.problem import Problem
from fuse_jax.fusion.intra_stage.schedule import Schedule, Task
from fuse_jax.fusion.intra_stage.trace import schedule_trace


def random_case(seed):
    """(schedule, orders, the judge's verdict) of a random problem."""
    rng = random.Random(seed)
    plain = draw_problem(rng)
    orders = draw_orders(rng, plain)
    return schedule_of(plain, orders), orders, judge.check(plain, orders)


def schedule_of(plain, orders):
    rows = [[Task(*cells) for cells in row] for row in rows_of(plain, orders)]
    return Schedule.from_tasks(Problem.from_dict(plain), rows)


def last_at_each_time(steps):
    """[(time, value)] with one entry a time: the value that holds from then on."""
    return dict(steps)


@pytest.mark.parametrize("seed", range(12))
def test_memory_curves_are_the_judges(seed):
    schedule, _, verdict = random_case(seed)
    for device, steps in enumerate(verdict.memory):
        times, held = memory_curves(schedule, device)
        assert (np.diff(times[1:]) > 0).all() and (held >= 0).all()
        curve = {}
        for t, amount in zip((times * judge.TICKS).round(), held.sum(0) * judge.QUANTA):
            curve[int(t)] = round(amount)
        wanted = last_at_each_time(steps)
        assert {t: curve[t] for t in wanted} == wanted
        assert held[:, -1].tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(6))
def test_trace_has_every_task_in_its_row_at_its_time(seed, tmp_path):
    schedule, orders, verdict = random_case(seed)
    schedule_trace(schedule).write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = iter([e for e in events if e["ph"] == "X"])
    for device, row in enumerate(orders):
        for key in row:
            span = next(spans)
            model, replica, stage, kind, m = key
            assert rows[span["tid"]] == f"device {device}"
            assert span["name"] == f"{model} {kind} {m}"
            assert span["args"] == {"micro_batch": m, "replica": replica, "stage": stage}
            assert span["ts"] == verdict.start[key]  # a tick is a µs
            assert span["ts"] + span["dur"] == verdict.end[key]
    assert next(spans, None) is None
    memory = [e for e in events if e["ph"] == "C" and e["name"] == "device 0"]
    steps = {e["ts"]: round(sum(e["args"].values()) * judge.QUANTA) for e in memory}
    wanted = last_at_each_time(verdict.memory[0])
    assert {t: steps[t] for t in wanted} == wanted


def pixel(image, axis, x, y):
    """Colour of the picture at data coordinates of an axis."""
    column, row = axis.transData.transform((x, y))
    return image[image.shape[0] - 1 - round(row), round(column), :3]


def captured_plot(schedule, path, monkeypatch, **options):
    """Draw, and give back the picture with the axes it was made of."""
    kept = []

    def keep(heights, header):
        figure, axes = stack(heights, header)
        kept.append(axes)
        return figure, axes

    monkeypatch.setattr(plot, "stack", keep)
    plot.plot_schedule(schedule, path, **options)
    return imread(path), kept[0]


@pytest.mark.parametrize("split", [False, True])
def test_every_bar_has_its_colour_where_it_runs(split, tmp_path, monkeypatch):
    actor = {"stages": 4, "micro_batches": 4, "forward": 2, "backward": 3, "activation": 1.0}
    if split:
        actor["weight_grad"] = 3
    plain = {"actor": actor, "critic": {**actor, "stages": 2}, "memory_cap": 9}
    drawn = [draw_orders(random.Random(seed), plain) for seed in (4, 3)]
    serial, schedule = (schedule_of(plain, orders) for orders in drawn)
    options = {"serial": [serial, serial], "bound": 9.0}
    image, axes = captured_plot(schedule, tmp_path / "g.png", monkeypatch, **options)
    assert len({axis.get_xlim() for axis in axes}) == 1 and len(axes) == 3
    halves = [
        (axes[0], drawn[0], 0.0),
        (axes[0], drawn[0], serial.makespan()),
        (axes[1], drawn[1], 0.0),
    ]
    for axis, orders, begin in halves:
        verdict = judge.check(plain, orders)
        for device, row in enumerate(orders):
            for key in row:
                # A quarter into the bar: clear of its edges, its number and the bound's line.
                start, end = verdict.start[key] / judge.TICKS, verdict.end[key] / judge.TICKS
                seen = pixel(image, axis, begin + start + (end - start) / 4, device + 0.3)
                wanted = to_rgb(plot.COLORS[key[0], key[3]])
                assert np.abs(seen - wanted).max() < 0.02, key
    device = int(schedule.peaks().argmax())
    peak_time, peak = max(verdict.memory[device], key=lambda step: step[1])
    at = peak_time / judge.TICKS + 0.5
    assert pixel(image, axes[2], at, peak / judge.QUANTA * 1.05).min() > 0.9  # nothing above it
    assert pixel(image, axes[2], at, 0.2).min() < 0.8


def test_colours_tell_model_and_kind_apart():
    """Also in grey: within a model each kind is clearly darker than the one before."""
    for model in ("actor", "critic"):
        light = [
            float(np.dot(to_rgb(plot.COLORS[model, kind]), (0.2126, 0.7152, 0.0722)))
            for kind in "FBW"
        ]
        assert light[0] > light[1] + 0.2 and light[1] > light[2] + 0.15, (model, light)
    for kind in "FBW":
        actor, critic = (np.array(to_rgb(plot.COLORS[m, kind])) for m in ("actor", "critic"))
        assert actor[2] - actor[0] > 0.25 and critic[0] - critic[2] > 0.25  # blue, orange


def test_large_schedules_draw_fast(tmp_path):
    """16 devices x 64 micro-batches, 4,096 tasks: one patch a task would take tens of seconds."""
    model = {"stages": 16, "micro_batches": 64, "forward": 1, "backward": 2, "activation": 1}
    plain = {"actor": model, "critic": model}
    keys = [("F", m) for m in range(64)] + [("B", m) for m in range(64)]
    row = [(name, 0, kind, m) for name in ("actor", "critic") for kind, m in keys]
    rows = [[Task(d, *cells) for cells in row] for d in range(16)]
    schedule = Schedule.from_tasks(Problem.from_dict(plain), rows).check()
    plot.plot_schedule(schedule, tmp_path / "warm.png")
    start = time.process_time()
    plot.plot_schedule(schedule, tmp_path / "g.png")
    assert time.process_time() - start < 5
    assert imread(tmp_path / "g.png").shape[1] == plot.WIDTH * plot.DPI


def test_a_schedule_that_takes_no_time_can_be_drawn(tmp_path):
    model = {"stages": 1, "micro_batches": 1, "forward": 0, "backward": 0}
    plain = {"actor": model, "critic": model}
    schedule = schedule_of(plain, draw_orders(random.Random(0), plain))
    plot.plot_schedule(schedule, tmp_path / "g.png")
    assert (tmp_path / "g.png").stat().st_size > 1000
