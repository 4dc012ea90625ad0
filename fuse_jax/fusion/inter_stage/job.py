"""What one iteration of inter-stage fusion is given, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fuse_jax.fusion.inter_stage.costs import Costs
from fuse_jax.fusion.inter_stage.lengths import LengthHistory
from fuse_jax.fusion.inter_stage.policy import Plan
from fuse_jax.fusion.inter_stage.timeline import Timeline
from fuse_jax.rollout.batcher import Request, RolloutStats
from fuse_jax.samples import Sample
from fuse_jax.scoring.columns import Model, Role, Scored
from fuse_jax.scoring.reward_function import RewardResult
from fuse_jax.scoring.sample_rewards import TextRewards

# What the controller's time goes to: its own work (looking at what has ended, deciding, keeping
# samples, counts and the timeline); what batcher and scorer do on the host, as they do without a
# controller (filling slots, unpacking chunks, laying out scoring batches, unpacking scores); calls
# that start programs, send arrays or read them; sleep.
SHARES = ("scheduler", "host", "dispatch", "asleep")


@dataclass
class Counts:
    """What happened in one iteration.

    `migrated` live samples moved; `rerun` samples started again after their instance failed;
    `failed` instances given up; `batches` scoring batches, with `padding_rows` in all;
    `seconds` of the controller's thread by `SHARES`: wall time, with what other threads kept its
    core for. `watching_cpu_s`: of a core, of the threads that wait for devices.
    `looks`: how often the controller woke.
    """

    migrated: int = 0
    rerun: int = 0
    failed: int = 0
    batches: int = 0
    padding_rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    watching_cpu_s: float = 0.0
    looks: int = 0


@dataclass
class Outcome:
    """One scored sample a request, in the order of the requests.

    `rewards` are those of the reward function, None without one. `rollout` has the counts of each
    instance. `generation_ms`: when the last sample was read; `total_ms`: when everything was there.
    """

    samples: list[Sample]
    scored: list[Scored]
    rewards: list[RewardResult] | None
    rollout: list[RolloutStats]
    timeline: Timeline
    counts: Counts
    generation_ms: float = 0.0
    total_ms: float = 0.0


@dataclass
class Job:
    """What an iteration is to do.

    `models` are those that generation ("actor") and the instances' columns read, on any devices or
    on the host. `predicted` response lengths, one a request, spread the load; () = all alike.
    """

    requests: Sequence[Request]
    models: Mapping[Role, Model]
    seed_key: Any
    plan: Plan
    costs: Costs
    history: LengthHistory = field(default_factory=LengthHistory)
    predicted: Sequence[float] = ()
    text_rewards: TextRewards | None = None
