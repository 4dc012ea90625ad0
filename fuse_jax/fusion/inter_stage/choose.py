"""The plan of an iteration, chosen by simulating it with recently seen response lengths.

Policies (RLHFuse, arXiv 2409.13221 §4, and beyond): `serial` scores after all generation; `fixed`
takes R_t and m as given; `knee` is the paper's rule, m = the fewest instances that decode R_t
samples below saturation, with the best R_t by simulation; `simulated` takes the best pair (R_t, m),
and no migration if that is best; `stream` does not migrate and scores in the gaps; `auto` takes the
fastest of all, which is `serial` unless something is predicted to beat it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from fuse_jax.fusion.inter_stage.costs import Costs, Geometry
from fuse_jax.fusion.inter_stage.lengths import LengthHistory
from fuse_jax.fusion.inter_stage.policy import POLICIES, SERIAL, Plan, WayChoice, admission
from fuse_jax.fusion.inter_stage.simulator import simulate
from fuse_jax.fusion.inter_stage.spans import ms_text
from fuse_jax.fusion.inter_stage.workload import Workload

# Samples simulated to choose a plan, about: large iterations try fewer plans on fewer workloads.
BUDGET = 400_000
SHARES = (0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75)  # R_t / samples


class Predictor:
    """Mean simulated time of plans over a few workloads. Remembers what it simulated."""

    def __init__(
        self,
        geometry: Geometry,
        costs: Costs,
        workloads: Sequence[Workload],
        history: LengthHistory,
    ) -> None:
        self.geometry, self.costs = geometry, costs
        self.workloads, self.history = tuple(workloads), history
        self._known: dict[tuple, float] = {}

    @property
    def samples(self) -> int:
        return len(self.workloads[0].responses)

    def __call__(self, plan: Plan, workloads: int | None = None) -> float:
        """ms of `plan`, over the first `workloads` (default: all)."""
        count = len(self.workloads) if workloads is None else min(workloads, len(self.workloads))
        return sum(self._one(plan, i) for i in range(count)) / count

    def _one(self, plan: Plan, index: int) -> float:
        key = (plan.handoff, plan.threshold, plan.keep, plan.stream, plan.pack, plan.way, index)
        if key not in self._known:
            outcome = simulate(
                plan, self.geometry, self.costs, self.workloads[index], history=self.history
            )
            self._known[key] = outcome.total_ms
        return self._known[key]

    def best(self, plans: Iterable[Plan]) -> Plan:
        """The fastest plan, with its prediction; the first of equals.

        After each workload the slower half falls out, so that those left are told apart by many.
        Of more plans than the budget allows some are tried, evenly spaced.
        """
        left = list(enumerate(spaced(list(plans), max(8, BUDGET // (4 * self.samples)))))
        for count in range(1, len(self.workloads)):
            # Equals so far may differ later: those that migrate earlier more than others.
            left.sort(key=lambda item: (self(item[1], count), -item[1].threshold, item[0]))
            left = left[: max(8, len(left) // 2)]
        best = min(left, key=lambda item: (self(item[1]), item[0]))[1]
        return replace(best, predicted_ms=self(best), serial_ms=self(SERIAL))


def spaced(plans: Sequence[Plan], most: int) -> list[Plan]:
    """At most `most` of `plans`, evenly spaced, the first and the last among them."""
    if len(plans) <= most:
        return list(plans)
    return [plans[round(i * (len(plans) - 1) / (most - 1))] for i in range(most)]


def draw_workloads(
    prompts: Sequence[int],
    history: LengthHistory,
    cap: int,
    *,
    predicted: Sequence[float] = (),
    ratios: Sequence[float] = (),
    draws: int = 4,
    seed: int = 0,
) -> list[Workload]:
    """Workloads of these prompt lengths, responses drawn from past lengths (cut at `cap`).

    With `predicted` lengths, and past `ratios` of actual to predicted ones, a response is its
    prediction times one of those (see `lengths.PromptLengths`).
    """
    if not history.lengths:
        raise ValueError("no response lengths seen yet: nothing to draw from")
    generator = np.random.default_rng(seed)

    def one() -> Workload:
        if len(predicted) and len(ratios):
            drawn = np.array(predicted) * generator.choice(ratios, len(prompts))
        else:
            drawn = generator.choice(history.lengths, len(prompts))
        responses = np.clip(np.round(drawn), 1, cap).astype(int)
        return Workload(tuple(prompts), tuple(responses.tolist()), cap, tuple(predicted))

    return [one() for _ in range(draws)]


def thresholds(samples: int) -> list[int]:
    """R_t worth trying: shares of the samples, and a few single samples at the low end."""
    found = {1, 2, *(round(share * samples) for share in SHARES)}
    return sorted(count for count in found if 1 <= count < samples)


def keeps(instances: int) -> list[int]:
    """m worth trying: all of a few, or about a dozen of many."""
    if instances <= 12:
        return list(range(1, instances))
    shares = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    return sorted({1, 2, 3, 4, *(round(share * instances) for share in shares)} - {0, instances})


def migrations(
    samples: int, geometry: Geometry, costs: Costs, way: WayChoice = "auto", *, pack: bool = False
) -> list[Plan]:
    """Plans that migrate: pairs (R_t, m) of which the m instances admit R_t samples."""
    room = admission(costs, geometry)
    return [
        Plan("simulated", threshold=threshold, keep=keep, way=way, pack=pack)
        for threshold in thresholds(samples)
        for keep in keeps(geometry.instances)
        if threshold <= keep * room
    ]


def knee_keep(threshold: int, geometry: Geometry, costs: Costs) -> int:
    """m by RLHFuse's rule: the fewest instances that take R_t samples unsaturated, all in slots.

    m = ceil(R_t / admission); may equal the number of instances, and then nothing migrates.
    """
    return min(-(-threshold // admission(costs, geometry)), geometry.instances)


def knee_plans(
    thresholds: Sequence[int], geometry: Geometry, costs: Costs, way: WayChoice = "auto"
) -> list[Plan]:
    """The knee rule at each R_t; none where all instances would be kept, for nothing migrates."""
    rule = {t: knee_keep(t, geometry, costs) for t in thresholds}
    return [
        Plan("knee", threshold=threshold, keep=keep, way=way)
        for threshold, keep in rule.items()
        if keep < geometry.instances
    ]


def choose(
    policy: str,
    geometry: Geometry,
    costs: Costs,
    prompts: Sequence[int],
    history: LengthHistory,
    cap: int,
    *,
    predicted: Sequence[float] = (),
    ratios: Sequence[float] = (),
    threshold: int = 0,
    keep: int = 0,
    way: WayChoice = "auto",
    draws: int = 8,
    seed: int = 0,
) -> Plan:
    """The plan for an iteration of `prompts` (their lengths), predicted where lengths are known.

    Args:
      history: response lengths seen lately. Empty (a first iteration): `knee` takes R_t = 20 % of
        the samples, the paper's best; `simulated` and `auto` hand samples over without migrating,
        which needs no forecast.
      cap: the most tokens of a response.
      predicted, ratios: see `draw_workloads`. With both, packing is tried too.
      draws: workloads to simulate; of large iterations fewer.
      threshold, keep: R_t and m of `fixed`, whose R_t is lowered to what m instances take before
        decoding saturates (`policy.admission`; the plan's `why` says so); `threshold` also fixes
        R_t of `knee` (0: choose it).

    Raises ValueError: an unknown policy, or R_t and m that cannot be.
    """
    costs.check(geometry)
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: choose one of {', '.join(POLICIES)}")
    lowered = ""
    if policy == "fixed":
        _check_fixed(threshold, keep, geometry)
        room = keep * admission(costs, geometry)
        if threshold > room:
            asked = f"threshold={threshold} is more than keep={keep} instances take before decoding"
            lowered, threshold = f"{asked} saturates: R_t = {room} instead; ", room
    if not history.lengths:
        plan = _unpredicted(policy, geometry, costs, len(prompts), threshold, keep, way)
        return replace(plan, why=lowered + plan.why)
    draws = min(draws, max(1, BUDGET // (10 * len(prompts))))
    trusted = {"predicted": predicted, "ratios": ratios} if len(ratios) else {}
    workloads = draw_workloads(prompts, history, cap, draws=draws, seed=seed, **trusted)
    predict = Predictor(geometry, costs, workloads, history)
    plan = choose_with(predict, policy, threshold=threshold, keep=keep, way=way)
    return replace(plan, why=lowered + plan.why)


def choose_with(
    predict: Predictor, policy: str, *, threshold: int = 0, keep: int = 0, way: WayChoice = "auto"
) -> Plan:
    """`choose` with workloads that are given."""
    geometry, costs, samples = predict.geometry, predict.costs, predict.samples
    handed = Plan(policy, why="hand-off without migration")
    asked = [threshold] if policy == "knee" and threshold else thresholds(samples)
    knee = knee_plans(asked, geometry, costs, way)
    packed = []
    if predict.workloads[0].predicted:
        packed = [
            replace(handed, pack=True),
            *migrations(samples, geometry, costs, way, pack=True),
        ]
    candidates = {
        "serial": [SERIAL],
        "fixed": [Plan("fixed", threshold=threshold, keep=keep)],
        "knee": knee or [handed],
        "simulated": [handed, *migrations(samples, geometry, costs, way), *packed],
        "stream": [Plan("stream", stream=True)],
    }
    # Of equals the first is taken. The budget may leave out the pair that the knee rule gives.
    tried = {"auto": ("serial", "simulated", "knee", "stream"), "simulated": ("simulated", "knee")}
    best, *others = [
        predict.best(replace(plan, way=way) for plan in candidates[name])
        for name in tried.get(policy, (policy,))
    ]
    for other in others:
        if _faster(other, best):
            best = other
    why = SERIAL.why if policy == "serial" else _reason(best, samples)
    return replace(best, policy=policy, why=why)


def _faster(one: Plan, other: Plan) -> bool:
    assert one.predicted_ms is not None and other.predicted_ms is not None
    return one.predicted_ms < other.predicted_ms * (1 - 1e-9)


def _unpredicted(
    policy: str,
    geometry: Geometry,
    costs: Costs,
    samples: int,
    threshold: int,
    keep: int,
    way: WayChoice,
) -> Plan:
    """Plans for when no response lengths are known."""
    why = "no response lengths seen yet"
    if policy == "serial":
        return SERIAL
    if policy == "stream":
        return Plan("stream", stream=True, why=why)
    if policy == "knee":
        asked = threshold or max(1, round(0.2 * samples))
        found = knee_plans([asked], geometry, costs, way)
        if not found:
            return Plan(policy, why=why + f": {asked} samples saturate fewer instances, none moves")
        why += f": R_t = {asked}, m by saturation"
        return replace(found[0], why=why)
    if policy in ("simulated", "auto"):
        return Plan(policy, why=why + ": hand-off without migration")
    return Plan(policy, threshold=threshold, keep=keep, way=way, why=why)


def _check_fixed(threshold: int, keep: int, geometry: Geometry) -> None:
    if threshold < 0:
        raise ValueError(f"threshold={threshold}: R_t is a number of samples, 0 = never migrate")
    if threshold and not 1 <= keep < geometry.instances:
        raise ValueError(
            f"keep={keep}: keep between 1 and {geometry.instances - 1} of the "
            f"{geometry.instances} instances"
        )
    if threshold > keep * geometry.slots:
        raise ValueError(
            f"threshold={threshold} samples do not fit keep={keep} instances of "
            f"{geometry.slots} slots: lower it to {keep * geometry.slots}, or keep more"
        )


def _reason(plan: Plan, samples: int) -> str:
    """One sentence on a predicted plan."""
    assert plan.predicted_ms is not None and plan.serial_ms is not None
    if not plan.handoff:
        return f"serial: nothing was predicted faster than its {ms_text(plan.serial_ms)} ms"
    if plan.stream:
        what = "scoring in the gaps, no migration"
    elif plan.threshold:
        share = plan.threshold / samples
        what = f"migration to {plan.keep} at {plan.threshold} unfinished ({share:.0%})"
    else:
        what = "hand-off without migration"
    if plan.pack:
        what += ", alike predicted lengths together"
    gain = plan.serial_ms / plan.predicted_ms
    return f"{what}: {ms_text(plan.predicted_ms)} ms predicted, {gain:.3f}x serial"


def needs_refresh(planned: LengthHistory, recent: LengthHistory, limit: float = 0.1) -> bool:
    """Whether lengths drifted since a plan was made: by more than `limit` and more than chance.

    Kolmogorov-Smirnov distance against max(limit, its 5 % point for two samples of these sizes).
    """
    a, b = len(planned.lengths), len(recent.lengths)
    if not a or not b:
        return a != b
    return planned.drift(recent) > max(limit, 1.36 * ((a + b) / (a * b)) ** 0.5)
