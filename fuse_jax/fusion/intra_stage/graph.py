"""A problem's tasks as flat arrays: what the compiled kernels read.

Task ids are dense: model, replica, stage, kind, micro-batch from the slowest to the fastest
  index. Every task has at most
one predecessor on the data path (F(g) after F(g-1), B(g) after B(g+1), W after B), hence at most
two successors. A class is a (model, chunk, kind): on each device its tasks run in index order, so
a schedule of a device is a string of classes. A pool is a (model, chunk): the memory its F class
takes and its last class gives back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fuse_jax.fusion.intra_stage.problem import Pipeline, Problem, to_quanta, to_ticks


class Graph(NamedTuple):
    """n tasks on D devices in C classes and Q pools; times in ticks, memory in quanta; -1 means
    none.

    duration, tail, take, give int64 [n]: `take` is held from the task's start, `give` freed at
    its end. device, cls, micro_batch, model, replica, kind, chunk, stage int64 [n]. pred,
    pred_lag, succ, succ_lag int64 [n, 2]. ids int64 [D, C, M]: tasks of a class in the order they
    run; size int64 [C]. pool_model, pool_take, pool_give int64 [Q]: model, taking class and
    giving class of each pool.
    """

    duration: np.ndarray
    tail: np.ndarray
    take: np.ndarray
    give: np.ndarray
    device: np.ndarray
    cls: np.ndarray
    micro_batch: np.ndarray
    model: np.ndarray
    replica: np.ndarray
    kind: np.ndarray
    chunk: np.ndarray
    stage: np.ndarray
    pred: np.ndarray
    pred_lag: np.ndarray
    succ: np.ndarray
    succ_lag: np.ndarray
    ids: np.ndarray
    size: np.ndarray
    pool_model: np.ndarray
    pool_take: np.ndarray
    pool_give: np.ndarray


def _model_tasks(
    pipeline: Pipeline, model: int, replicas: int, base: int, first_class: int
) -> dict:
    """Columns of one model's tasks, ids from `base`, classes from `first_class`."""
    kinds, count, stages = len(pipeline.kinds), pipeline.micro_batches, pipeline.total_stages
    shape = (replicas, stages, kinds, count)
    replica, stage, kind, micro_batch = (axis.reshape(-1) for axis in np.indices(shape))
    device_of = np.array(
        [[pipeline.device(k, g) for g in range(stages)] for k in range(replicas)], np.int64
    )
    length = np.array([pipeline.replica_lengths(k) for k in range(replicas)], float)
    length = length.reshape(replicas, count)[replica, micro_batch]
    times = np.array(pipeline.stage_times())[kind, stage]
    held = np.array(pipeline.activation)[stage]
    quanta = np.array([to_quanta(amount) for amount in held * length], np.int64)
    ids = base + np.arange(replica.size).reshape(shape)
    pred = np.full(shape, -1, np.int64)
    pred[:, 1:, 0] = ids[:, :-1, 0]
    pred[:, :-1, 1] = ids[:, 1:, 1]
    pred[:, -1, 1] = ids[:, -1, 0]
    if kinds == 3:
        pred[:, :, 2] = ids[:, :, 1]
    return {
        "duration": np.array([to_ticks(ms) for ms in times * length], np.int64),
        "tail": np.where(kind == kinds - 1, to_ticks(pipeline.tail), 0),
        "take": np.where(kind == 0, quanta, 0),
        "give": np.where(kind == kinds - 1, quanta, 0),
        "device": device_of[replica, stage],
        "cls": first_class + (stage // pipeline.stages) * kinds + kind,
        "micro_batch": micro_batch,
        "model": np.full(replica.size, model),
        "replica": replica,
        "kind": kind,
        "chunk": stage // pipeline.stages,
        "stage": stage,
        "pred": pred.reshape(-1),
        "lag": np.full(replica.size, to_ticks(pipeline.lag)),
    }


@lru_cache(maxsize=64)
def build_graph(problem: Problem) -> Graph:
    """Flat arrays of all tasks of a problem."""
    parts, pools, base, first_class = [], [], 0, 0
    size: list[int] = []
    for model, pipeline in enumerate(problem.pipelines):
        part = _model_tasks(pipeline, model, problem.replicas[model], base, first_class)
        parts.append(part)
        kinds = len(pipeline.kinds)
        for chunk in range(pipeline.chunks):
            start = first_class + chunk * kinds
            pools.append((model, start, start + kinds - 1))
        size += [pipeline.micro_batches] * (kinds * pipeline.chunks)
        base += part["duration"].size
        first_class += kinds * pipeline.chunks
    col = {key: np.concatenate([part[key] for part in parts]).astype(np.int64) for key in parts[0]}
    pred, lag = col.pop("pred"), col.pop("lag")
    here = np.flatnonzero(pred >= 0)
    local = col["device"][here] == col["device"][pred[here]]
    pred2, pred_lag = np.full((base, 2), -1, np.int64), np.zeros((base, 2), np.int64)
    pred2[:, 0] = pred
    pred_lag[here, 0] = np.where(local, 0, lag[here])
    succ, succ_lag = np.full((base, 2), -1, np.int64), np.zeros((base, 2), np.int64)
    is_w = (
        col["kind"][here] == 2
    )  # a W is always the second successor, so that each slot is written once
    slot = is_w.astype(np.int64)
    succ[pred[here], slot] = here
    succ_lag[pred[here], slot] = pred_lag[here, 0]
    ids = np.full((problem.devices, len(size), max(size)), -1, np.int64)
    ids[col["device"], col["cls"], col["micro_batch"]] = np.arange(base)
    pool = np.array(pools, np.int64)
    graph = Graph(
        **col,
        pred=pred2,
        pred_lag=pred_lag,
        succ=succ,
        succ_lag=succ_lag,
        ids=ids,
        size=np.array(size, np.int64),
        pool_model=pool[:, 0].copy(),
        pool_take=pool[:, 1].copy(),
        pool_give=pool[:, 2].copy(),
    )
    for array in graph:
        array.setflags(write=False)
    return graph


def reverse(graph: Graph) -> Graph:
    """The same tasks with time running backwards: what took memory gives it, successors come
    before.

    `micro_batch` keeps naming the task; `ids` lists each class from the last micro-batch to the
    first.
    """
    ids = graph.ids.copy()
    for cls, count in enumerate(graph.size):
        ids[:, cls, :count] = ids[:, cls, :count][:, ::-1]
    ids.setflags(write=False)
    return graph._replace(
        take=graph.give,
        give=graph.take,
        pred=graph.succ,
        pred_lag=graph.succ_lag,
        succ=graph.pred,
        succ_lag=graph.pred_lag,
        ids=ids,
        pool_take=graph.pool_give,
        pool_give=graph.pool_take,
    )
