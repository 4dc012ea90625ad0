"""How fast any schedule of one iteration could be, under the same costs and shapes."""

from __future__ import annotations

import numpy as np

from fuse_jax.buckets import bucket_of
from fuse_jax.fusion.inter_stage.costs import Costs, Geometry
from fuse_jax.fusion.inter_stage.workload import Workload


def ideal_bound(geometry: Geometry, costs: Costs, workload: Workload) -> float:
    """ms that no order of work can beat: max(longest sample alone, all work spread evenly).

    The longest sample alone: its prefill, its decode steps each at the fastest number of live
    slots, its dearest column. All work: every token at the number of live slots where a token is
    cheapest, prefills and scoring batches without padding rows, over all instances. A sample that
    moves by being read again draws one token in that prefill, instead of the dearest of its steps
    if that is dearer. Resizing instances or speculative decoding could beat it. A longer context
    must never decode faster.
    """
    again = min(costs.prefill_ms.values()) if geometry.instances > 1 else np.inf
    groups: dict[tuple[int, int], int] = {}
    for pair in zip(workload.prompts, workload.responses, strict=True):
        groups[pair] = groups.get(pair, 0) + 1
    fastest, cheapest = _per_step(costs, geometry, max(p + r for p, r in groups))
    longest, work = 0.0, 0.0
    for (prompt, response), count in groups.items():
        bucket = bucket_of(prompt + response, geometry.buckets)
        columns = [costs.score_ms[column][bucket] for column in geometry.columns]
        prefill = costs.prefill_ms[costs.prefill_bucket(prompt)]
        steps, contexts = _chunks(prompt, response, geometry.chunk)
        if costs.decode.statistic == "mean":  # the others of its slots may be as short as any
            contexts = np.minimum(contexts, min(workload.prompts))
        alone = _decoding(steps, np.interp(contexts, *fastest), again)
        longest = max(longest, prefill + alone + max(columns))
        each = prefill / geometry.prefill_rows + sum(columns) / geometry.buckets[bucket].rows
        each += _decoding(steps, np.interp(contexts, *cheapest), again / geometry.prefill_rows)
        work += count * each
    return max(longest, work / geometry.instances)


def _decoding(steps: np.ndarray, each: np.ndarray, again: float) -> float:
    """ms of `steps` of each chunk at `each` ms, the dearest of them replaced by `again` ms."""
    return float((steps * each).sum()) - max(float(each.max(initial=0.0)) - again, 0.0)


def _chunks(prompt: int, response: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of each chunk of a sample's decoding, and its context in the middle of each."""
    left = response - 1  # the first token comes with the prefill
    starts = np.arange(0, left, chunk)
    steps = np.minimum(chunk, left - starts)
    return steps, prompt + 1 + starts + steps / 2


def _per_step(costs: Costs, geometry: Geometry, longest: int):
    """(contexts, ms a step at its fastest), (contexts, ms a token at its cheapest)."""
    points = np.unique(np.minimum([*costs.decode.context, 1, longest + 1], longest + 1))
    live = sorted({*range(1, geometry.slots + 1)})
    table = np.array([[costs.decode(count, point) for point in points] for count in live])
    return (points, table.min(0)), (points, (table / np.array(live)[:, None]).min(0))
