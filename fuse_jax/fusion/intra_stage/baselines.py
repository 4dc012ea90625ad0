"""The schedules to beat: serial and concatenated 1F1B, a Chimera-like one, and the RLHFuse
authors' greedy and annealing.

As schedules, so that anything can time and check them (a memory cap is not looked at); and as
closed formulas for what cannot be
fused: GPipe, interleaved 1F1B and ZB-H1, each model alone, one after the other. Formulas are for
equal stages and micro-batches and free transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numba import njit

from fuse_jax.fusion.intra_stage.graph import build_graph
from fuse_jax.fusion.intra_stage.problem import Pipeline, Problem
from fuse_jax.fusion.intra_stage.schedule import Schedule


def one_f_one_b_row(pipeline: Pipeline, position: int) -> list[tuple[int, int, int]]:
    """Classic 1F1B of one device as (chunk, kind, micro-batch): warm-up forwards, then backward
    and forward in turn.

    With chunks it is Megatron's interleaved order (groups of N micro-batches through all chunks)
    when M is a multiple of N, warm-up 2 (N - 1 - position) + (v - 1) N; a W follows its B at
    once. Interleaving needs placement "loop".
    """
    stages, count, chunks = pipeline.stages, pipeline.micro_batches, pipeline.chunks
    if chunks == 1:
        forwards = [(0, m) for m in range(count)]
        backwards = forwards
        warm_up = min(stages - 1 - position, count)
    else:
        forwards = _interleaved(stages, count, range(chunks))
        backwards = _interleaved(stages, count, range(chunks - 1, -1, -1))
        warm_up = min(2 * (stages - 1 - position) + (chunks - 1) * stages, len(forwards))
    row = [(chunk, 0, m) for chunk, m in forwards[:warm_up]]
    waiting = forwards[warm_up:]
    for chunk, m in backwards:
        if waiting:
            next_chunk, next_m = waiting.pop(0)
            row.append((next_chunk, 0, next_m))
        row.append((chunk, 1, m))
        if pipeline.split:
            row.append((chunk, 2, m))
    return row


def _interleaved(stages: int, count: int, chunks: range) -> list[tuple[int, int]]:
    """(chunk, micro-batch): groups of N micro-batches, each group through one chunk after the
    other.
    """
    return [
        (chunk, m)
        for low in range(0, count, stages)
        for chunk in chunks
        for m in range(low, min(low + stages, count))
    ]


def _model_rows(problem: Problem, model: int) -> np.ndarray:
    """1F1B task ids of one model on every device, int64 [D, tasks of the model]; valid for any
    problem.

    Interleaved rows that the vee placement or an uneven M would block are replaced by one
    micro-batch at a time.
    """
    graph, pipeline = build_graph(problem), problem.pipelines[model]
    kinds = len(pipeline.kinds)
    base = 0 if model == 0 else problem.actor.chunks * len(problem.actor.kinds)
    rows = []
    plain = pipeline.chunks == 1 or (
        pipeline.placement == "loop" and pipeline.micro_batches % pipeline.stages == 0
    )
    for device in range(problem.devices):
        position = device % pipeline.stages
        if pipeline.direction == "down":
            position = pipeline.stages - 1 - position
        row = one_f_one_b_row(pipeline, position) if plain else _one_at_a_time(pipeline)
        rows.append([graph.ids[device, base + c * kinds + kind, m] for c, kind, m in row])
    return np.array(rows, np.int64).reshape(problem.devices, -1)


def _one_at_a_time(pipeline: Pipeline) -> list[tuple[int, int, int]]:
    row = []
    for m in range(pipeline.micro_batches):
        row += [(chunk, 0, m) for chunk in range(pipeline.chunks)]
        for chunk in range(pipeline.chunks - 1, -1, -1):
            row += [(chunk, kind, m) for kind in range(1, len(pipeline.kinds))]
    return row


def concatenated_1f1b(
    problem: Problem,
    first: Literal["actor", "critic"] = "actor",
    direction: Literal["opposite", "same"] = "opposite",
) -> Schedule:
    """1F1B of one model, then of the other, without a barrier: a device goes on as soon as it can.

    direction "same" turns the critic's pipeline to the actor's direction (another problem: see
    the result's `problem`).
    """
    if direction == "same":
        critic = replace(problem.critic, direction=problem.actor.direction)
        problem = replace(problem, critic=critic)
    order = (0, 1) if first == "actor" else (1, 0)
    return Schedule(problem, np.concatenate([_model_rows(problem, m) for m in order], axis=1))


@dataclass(frozen=True)
class Serial:
    """Serial training: the actor's whole step, then the critic's. makespan in ms, peak_memory in
    the problem's unit.
    """

    makespan: float
    peak_memory: float


def alone(problem: Problem, model: int) -> Schedule:
    """1F1B of one model (0 actor, 1 critic) with the other left out."""
    parts = list(problem.pipelines)
    parts[1 - model] = replace(parts[1 - model], micro_batches=0, lengths=None)
    only = replace(problem, actor=parts[0], critic=parts[1], memory_cap=None)
    return Schedule(only, _model_rows(only, model))


def serial_runs(problem: Problem) -> list[Schedule]:
    """Serial 1F1B as one schedule a model, to be run one after the other.

    The baseline of every speed-up: not split, no virtual stages. A split problem is timed with B
    and W as one backward, a chunked one with each device's chunks joined in one stage.
    """
    plain = replace(
        problem, actor=_unsplit(problem.actor), critic=_unsplit(problem.critic), memory_cap=None
    )
    return [alone(plain, model) for model in (0, 1) if plain.pipelines[model].micro_batches]


def serial_1f1b(problem: Problem, cost_model: str = "ideal") -> Serial:
    """Serial 1F1B with a barrier between the models (`serial_runs`): times add, the peak is the
    larger one.
    """
    runs = serial_runs(problem)
    return Serial(
        makespan=sum(run.makespan(cost_model) for run in runs),
        peak_memory=max(run.peak_memory for run in runs),
    )


def _unsplit(pipeline: Pipeline) -> Pipeline:
    """The same work per device without split backward and virtual stages."""
    times = np.array(pipeline.stage_times())
    forward, backward = times[0], times[1:].sum(axis=0)
    joined = np.zeros((3, pipeline.stages))
    for stage in range(pipeline.total_stages):
        joined[:, pipeline.position(stage)] += (
            forward[stage],
            backward[stage],
            pipeline.activation[stage],
        )
    none = (0.0, 0.0, 0.0)
    return replace(
        pipeline,
        forward=tuple(joined[0]),
        backward=tuple(joined[1]),
        activation=tuple(joined[2]),
        weight_grad=None,
        first_extra=none,
        last_extra=none,
        chunks=1,
        placement="loop",
    )


def chimera_like(problem: Problem) -> Schedule:
    """Both pipelines at once, each with 1F1B's limit on micro-batches in flight per stage,
    backward first.

    Chimera (Li & Hoefler, SC'21) runs two copies of one model in opposite directions; this is its
    rule for two models.
    """
    graph = build_graph(problem)
    limits = np.zeros((problem.devices, graph.pool_take.size), np.int64)
    for rows in (_model_rows(problem, model) for model in (0, 1)):
        for pool, (take, give) in enumerate(zip(graph.pool_take, graph.pool_give)):
            change = (graph.cls[rows] == take).astype(np.int64) - (graph.cls[rows] == give)
            if change.size:
                limits[:, pool] = np.maximum(limits[:, pool], np.cumsum(change, axis=1).max(axis=1))
    return Schedule(problem, _limited(graph, limits))


def fused_baselines(problem: Problem) -> list[Schedule]:
    """The baselines that are schedules of the problem itself: both concatenations, the Chimera-
    like.
    """
    return [
        concatenated_1f1b(problem, "actor"),
        concatenated_1f1b(problem, "critic"),
        chimera_like(problem),
    ]


@njit(cache=True)
def _limited(graph, limits):
    """Earliest start first, then the oldest micro-batch, at most limits [D, Q] micro-batches in
    flight.
    """
    devices, classes = graph.ids.shape[0], graph.ids.shape[1]
    count = graph.duration.shape[0]
    order = np.zeros((devices, count // devices), np.int64)
    at, free = np.zeros((devices, classes), np.int64), np.zeros(devices, np.int64)
    end = np.full(count, -1, np.int64)
    for _ in range(count):
        best, rank, device, cls = -1, 0, -1, -1
        for d in range(devices):
            for c in range(classes):
                if at[d, c] >= graph.size[c]:
                    continue
                task = graph.ids[d, c, at[d, c]]
                before = graph.pred[task, 0]
                if before >= 0 and end[before] < 0:
                    continue
                full = False
                for pool in range(limits.shape[1]):
                    if graph.pool_take[pool] == c:
                        full = at[d, c] - at[d, graph.pool_give[pool]] >= limits[d, pool]
                if full:
                    continue
                begin = free[d]
                if before >= 0:
                    begin = max(begin, end[before] + graph.pred_lag[task, 0])
                oldest = -graph.micro_batch[task]
                if best < 0 or begin < best or (begin == best and oldest > rank):
                    best, rank, device, cls = begin, oldest, d, c
        task = graph.ids[device, cls, at[device, cls]]
        order[device, at[device].sum()] = task
        at[device, cls] += 1
        end[task] = best + graph.duration[task]
        free[device] = end[task]
    return order


def gpipe_ms(pipeline: Pipeline) -> float:
    """GPipe, all forwards then all backwards: (M + N - 1)(f + b); Huang et al. 2019."""
    f, b = _even_times(pipeline)
    return (pipeline.micro_batches + pipeline.stages - 1) * (f + b)


def interleaved_ms(pipeline: Pipeline, chunks: int) -> float:
    """Interleaved 1F1B with v chunks: (M + (N - 1) / v)(f + b); Narayanan et al. 2021. Needs M a
    multiple of N.
    """
    if pipeline.micro_batches % pipeline.stages:
        raise ValueError(
            f"micro_batches={pipeline.micro_batches} is not a multiple of stages={pipeline.stages}"
        )
    f, b = _even_times(pipeline)
    return (pipeline.micro_batches + (pipeline.stages - 1) / chunks) * (f + b)


def zb_h1_ms(pipeline: Pipeline) -> float:
    """ZB-H1 at 1F1B's memory: M (F + B + W) + (N - 1)(F + B - W); Qi et al. 2024, M >= N.

    An unsplit backward b counts as B = W = b / 2.
    """
    f, b = _even_times(pipeline)
    w = b / 2 if pipeline.weight_grad is None else pipeline.stage_times()[2][0]
    return pipeline.micro_batches * (f + b) + (pipeline.stages - 1) * (f + (b - w) - w)


def _even_times(pipeline: Pipeline) -> tuple[float, float]:
    """(F, B + W) ms of the stages of one device, which must all be equal."""
    times = pipeline.stage_times()
    if any(len(set(row)) > 1 for row in times) or pipeline.lengths is not None:
        raise ValueError("closed formulas need equal stages and equal micro-batches")
    return times[0][0] * pipeline.chunks, sum(row[0] for row in times[1:]) * pipeline.chunks
