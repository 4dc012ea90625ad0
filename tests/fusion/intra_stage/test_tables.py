"""Tables obeyed by hand: every task finds the message it needs in the slot it reads."""

import numpy as np
import pytest

from fuse_jax.fusion.intra_stage.baselines import alone, chimera_like, concatenated_1f1b
from fuse_jax.fusion.intra_stage.layout import (
    Layout,
    deal_micro_batches,
    most_rows,
    relative_lengths,
    trained_pipelines,
)
from fuse_jax.fusion.intra_stage.problem import MODELS, Pipeline, Problem
from fuse_jax.fusion.intra_stage.schedule import Schedule, ScheduleError
from fuse_jax.fusion.intra_stage.tables import (
    Plan,
    Row,
    SlotsError,
    build_tables,
    slots_needed,
)

TIMES = ((5, 10, 4), (3, 6, 2))


def make(stages, dealt, split=False):
    lengths = [relative_lengths(dealt[name], (1.0, 2.5)) for name in MODELS]
    pipelines = [
        Pipeline(n, len(length[0]), f, b, activation=1.0, direction=way, lengths=length)
        if not split
        else Pipeline(n, len(length[0]), f, b, 1.0, w, way, lengths=length)
        for n, (f, b, w), way, length in zip(stages, TIMES, ("up", "down"), lengths)
    ]
    return Problem(*pipelines, devices=max(stages))


def deal(counts, stages):
    devices = max(stages)
    return {name: deal_micro_batches(counts, devices // n) for name, n in zip(MODELS, stages)}


def layout_for(schedule, dealt, ticked):
    pipelines = trained_pipelines(schedule.problem)
    slots = slots_needed(schedule, dealt, ticked)
    rows = most_rows(pipelines, 40, ticked)
    devices = schedule.problem.devices
    return Layout(devices, pipelines, 2, tuple(slots[n] for n, _ in pipelines), rows)


class Machine:
    """Runs tables with names in place of arrays: ('x', stage, replica, micro-batch)."""

    def __init__(self, schedule, dealt, ticked):
        self.layout = layout_for(schedule, dealt, ticked)
        self.tables = build_tables(schedule, dealt, self.layout, ticked=ticked)
        self.ticked, self.graph = ticked, schedule.graph
        self.pipelines = dict(self.layout.pipelines)
        devices = self.layout.devices
        self.pools = [
            {n: [None] * (s + 1) for n, s in zip(self.layout.models, self.layout.slots)}
            for _ in range(devices)
        ]
        self.box, self.done = {}, []
        self.ran = [[] for _ in range(devices)]

    def row(self, device, step):
        return Row(*(int(v) for v in self.tables.rows[device, step]))

    def run(self):
        if self.ticked:
            for step in range(self.tables.steps):
                rows = [self.row(d, step) for d in range(self.layout.devices)]
                sent = [self.task(d, row) for d, row in enumerate(rows)]
                self.exchange(rows, sent)
            return self
        at = [0] * self.layout.devices
        moved = True
        while moved:
            moved = False
            for device in range(self.layout.devices):
                while at[device] < self.tables.steps:
                    row = self.row(device, at[device])
                    if row.receive >= 0 and (device, row.receive) not in self.box:
                        break
                    sent = self.task(device, row)
                    if row.to >= 0:
                        assert (row.to, row.tag) not in self.box
                        self.box[row.to, row.tag] = sent
                    at[device] += 1
                    moved = True
        assert at == [self.tables.steps] * self.layout.devices
        assert not self.box
        return self

    def task(self, device, row):
        if row.branch == 0:
            assert (row.task, row.receive, row.to) == (-1, -1, -1)
            return None
        name, kind, bucket = self.layout.branches[row.branch - 1]
        pool, last = self.pools[device][name], self.pipelines[name].stages - 1
        stage = int(self.graph.stage[row.task])
        assert device == self.pipelines[name].device(int(self.graph.replica[row.task]), stage)
        batch = (int(self.graph.replica[row.task]), int(self.graph.micro_batch[row.task]))
        if not self.ticked and row.receive >= 0:
            pool[row.x_slot if kind == "F" else row.g_slot] = self.box.pop((device, row.receive))
        if stage > 0:
            assert pool[row.x_slot] == ("x", name, stage, *batch)
        if kind != "F" and stage < last:
            assert pool[row.g_slot] == ("g", name, stage, *batch)
        self.done.append((name, kind, stage, *batch, bucket, row.index))
        self.ran[device].append(row.task)
        pool[-1] = "trash"
        sends = (kind == "F" and stage < last) or (kind == "B" and stage > 0)
        assert sends == (row.to >= 0)
        step = 1 if kind == "F" else -1
        return ("x" if kind == "F" else "g", name, stage + step, *batch)

    def exchange(self, rows, sent):
        for device, row in enumerate(rows):
            for side, other in (("below", device - 1), ("above", device + 1)):
                for name, pool in self.pools[device].items():
                    into = getattr(row, f"{side}_{name}")
                    if into == len(pool) - 1:
                        continue
                    assert rows[other].to == device
                    pool[into] = sent[other]
                    low = min(device, other)
                    pair = (
                        (row.even, rows[other].even) if low % 2 == 0 else (row.odd, rows[other].odd)
                    )
                    assert pair == (1, 1)


CASES = [
    # stages, counts of the two buckets, split
    ((4, 4), (4, 4), False),
    ((4, 2), (5, 2), False),
    ((2, 4), (0, 3), True),
    ((8, 8), (9, 4), True),
    ((1, 3), (2, 2), False),
]


@pytest.mark.parametrize("ticked", [False, True])
@pytest.mark.parametrize(("stages", "counts", "split"), CASES)
def test_every_task_runs_once_on_its_own_messages(stages, counts, split, ticked):
    dealt = deal(counts, stages)
    problem = make(stages, dealt, split)
    for schedule in (chimera_like(problem), concatenated_1f1b(problem)):
        machine = Machine(schedule, dealt, ticked).run()
        done = machine.done
        assert machine.ran == Plan(schedule, dealt, ticked).orders
        expected = sum(
            sum(counts) * len(pipeline.kinds) * pipeline.stages
            for _, pipeline in trained_pipelines(problem)
        )
        assert len(done) == len(set(done)) == expected
        for name in MODELS:
            real = {tuple(place) for place in dealt[name].reshape(-1, 2) if place[0] >= 0}
            assert {entry[-2:] for entry in done if entry[0] == name} == real


def test_a_model_alone_and_empty_micro_batches_in_the_middle():
    dealt = deal((4, 2), (4, 2))
    dealt["critic"][1, 1] = -1
    only = alone(make((4, 2), dealt), 1)
    done = Machine(only, dealt, False).run().done
    assert {entry[0] for entry in done} == {"critic"}
    assert not any(entry[3:5] == (1, 1) for entry in done)
    assert sum(entry[1] == "B" for entry in done) == 2 * 5


def test_micro_batches_are_dealt_in_turn():
    np.testing.assert_array_equal(
        deal_micro_batches((2, 3), 2), [[[0, 0], [1, 0], [1, 2]], [[0, 1], [1, 1], [-1, -1]]]
    )
    assert deal_micro_batches((0, 0), 4).tolist() == [[[-1, -1]]] * 4


@pytest.mark.parametrize(("ticked", "most"), [(False, 4), (True, 5)])
def test_slots_are_those_in_use_at_once_whatever_the_number_of_micro_batches(ticked, most):
    for count in (8, 32):
        dealt = deal((count, 0), (4, 4))
        schedule = concatenated_1f1b(make((4, 4), dealt))
        assert max(slots_needed(schedule, dealt, ticked).values()) <= most


def test_rows_have_room_for_the_slowest_schedule():
    """One micro-batch at a time, and one model after the other: no two tasks in the same tick."""
    dealt = deal((4, 0), (3, 3))
    problem = make((3, 3), dealt)
    graph = chimera_like(problem).graph
    order = np.array(
        [
            [
                graph.ids[device, cls, m]
                for low in (0, 2)
                for m in range(4)
                for cls in (low, low + 1)
            ]
            for device in range(3)
        ]
    )
    slowest = Schedule(problem, order)
    pipelines = trained_pipelines(problem)
    for ticked, most in ((True, 2 * 4 * 2 * 3), (False, 2 * 4 * 2)):
        assert most_rows(pipelines, 4, ticked) == most
        layout = Layout(3, pipelines, 2, (4, 4), most)
        assert build_tables(slowest, dealt, layout, ticked=ticked).steps <= most


def test_what_does_not_fit_the_program_is_refused_by_name():
    dealt = deal((8, 0), (4, 4))
    schedule = chimera_like(make((4, 4), dealt))
    fits = layout_for(schedule, dealt, False)
    few = Layout(fits.devices, fits.pipelines, 2, (1, 1), fits.rows)
    with pytest.raises(SlotsError, match=r"needs \d+ slots for the actor, the program has 1"):
        build_tables(schedule, dealt, few, ticked=False)
    short = Layout(fits.devices, fits.pipelines, 2, fits.slots, 3)
    with pytest.raises(ScheduleError, match="32 steps, the program has room for 3"):
        build_tables(schedule, dealt, short, ticked=False)
    split = chimera_like(make((4, 4), dealt, split=True))
    with pytest.raises(ScheduleError, match="compiled for"):
        build_tables(split, dealt, fits, ticked=False)
    with pytest.raises(ScheduleError, match="were dealt"):
        build_tables(schedule, deal((7, 0), (4, 4)), fits, ticked=False)
    wrong = Schedule(schedule.problem, schedule.order[:, ::-1])
    with pytest.raises(ScheduleError, match="broken rules"):
        build_tables(wrong, dealt, fits, ticked=False)
    chunked = Problem(Pipeline(2, 4, 1, 2, chunks=2), Pipeline(2, 4, 1, 2, direction="down"))
    with pytest.raises(ScheduleError, match=r"actor\.chunks=2.*use chunks=1"):
        trained_pipelines(chunked)
