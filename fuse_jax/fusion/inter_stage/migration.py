"""Moving unfinished samples from one instance to another, as a policy's `Move` says.

Their caches go along ("kv"), or stay behind and are read again ("prefill"); prompts that had no
slot yet are only queued anew. Either way decoding goes on with the next token.
"""

from __future__ import annotations

from fuse_jax.fusion.inter_stage.lane import Lane
from fuse_jax.fusion.inter_stage.policy import Move
from fuse_jax.rollout.batcher import Progress


def take(source: Lane, move: Move) -> tuple[object, list[Progress]]:
    """Take the samples of `move` out of `source`: rows (None: left behind), and the samples."""
    batcher = source.batcher
    if move.way is None:
        waiting = {one.request.sample_id: one for one in batcher.withdraw()}
        taken = [waiting.pop(sample_id) for sample_id in move.sample_ids]
        batcher.resume(waiting.values())
        return None, taken
    slots = {one.request.sample_id: slot for slot, one in batcher.live.items()}
    chosen = [slots[sample_id] for sample_id in move.sample_ids]
    if move.way == "kv":
        return batcher.detach(chosen)
    return None, batcher.take_out(chosen)


def give(target: Lane, move: Move, rows: object, samples: list[Progress]) -> None:
    """Hand what `take` gave to `target`; its devices go on with what they have meanwhile."""
    batcher = target.batcher
    if rows is None:
        batcher.resume(samples)
        return
    placed = batcher.attach(rows, samples)  # type: ignore[arg-type]
    # The caches are nearly all there is to send: small arrays may be there long before.
    target.timeline.dispatched(
        target.index, "move", placed.values, len(samples), "kv", tuple(move.sample_ids)
    )
