"""The order of gains that RLHFuse reports, on an assumed H100 cluster (no constant is measured).

Decode steps by a roofline (3.35 TB/s at 75 %, 989 TFLOP/s at 45 %, 36 us a layer), scoring at 45 %
of peak, cache moved at 40 GB/s a GPU; 64 GPUs, 512 samples of median 200 tokens (lognormal).
"""

import numpy as np
import pytest

from fuse_jax.buckets import Bucket
from fuse_jax.fusion.inter_stage.bound import ideal_bound
from fuse_jax.fusion.inter_stage.choose import Predictor, choose_with, knee_keep
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable, Geometry
from fuse_jax.fusion.inter_stage.lengths import LengthHistory
from fuse_jax.fusion.inter_stage.policy import SERIAL, Plan
from fuse_jax.fusion.inter_stage.workload import Workload

BANDWIDTH, FLOPS, GPUS, PROMPT, SAMPLES = 3.35e12 * 0.75, 989e12 * 0.45, 64, 256, 512
MODELS = {"13B": (13e9, 40, 5120, 2), "33B": (32.5e9, 60, 6656, 4), "65B": (65e9, 80, 8192, 8)}


def cluster(actor: str, critic: str, cap: int, scoring: float) -> tuple[Geometry, Costs]:
    """Instances of the actor's tensor-parallel size; `scoring` multiplies the cost of scoring."""
    params, layers, hidden, tensor = MODELS[actor]
    cache = 4 * layers * hidden  # bytes a token
    slots = int((tensor * 80e9 * 0.85 - 2 * params) / (cache * (PROMPT + 0.6 * cap)))
    live, context = sorted({1, 2, 4, 8, 16, 32, 64, 128, slots}), (PROMPT, PROMPT + cap)
    live = tuple(count for count in live if count <= slots)

    def step(count: int, tokens: int) -> float:
        memory = (2 * params + count * tokens * cache) / (tensor * BANDWIDTH)
        return 1e3 * (max(memory, 2 * params * count / (tensor * FLOPS)) + layers * 36e-6)

    table = tuple(tuple(step(count, tokens) for tokens in context) for count in live)
    buckets = tuple(Bucket(n, 8192 // n) for n in range(PROMPT + 64, PROMPT + cap + 1, 64))
    sizes = {"ref_log_probs": params, "values": MODELS[critic][0], "scores": MODELS[critic][0]}
    scores = {
        column: [1e3 * scoring * 2 * size * b.rows * b.length / (tensor * FLOPS) for b in buckets]
        for column, size in sizes.items()
    }
    weights = 1e3 * 2 * sum(sizes.values()) / GPUS / 50e9
    costs = Costs(
        DecodeTable(live, context, table, "mean"),
        {PROMPT: 0.0},
        scores,
        move_token_ms=1e3 * cache / (tensor * 40e9),
        weights_ms=weights,
    )
    return Geometry(GPUS // tensor, slots, 4, 32, buckets, tuple(sizes)), costs


def gains(actor: str, critic: str, cap: int, scoring: float, draws: int = 3) -> dict[str, float]:
    """Speed over serial of each policy, means over workloads."""
    geometry, costs = cluster(actor, critic, cap, scoring)
    generator = np.random.default_rng(1)

    def lengths(count: int) -> tuple[int, ...]:
        drawn = np.round(200 * np.exp(generator.standard_normal(count)))
        return tuple(np.clip(drawn, 1, cap).astype(int).tolist())

    workloads = [Workload((PROMPT,) * SAMPLES, lengths(SAMPLES), cap) for _ in range(draws)]
    predict = Predictor(geometry, costs, workloads, LengthHistory(lengths(2048)))
    serial = predict(SERIAL)
    share = round(0.2 * SAMPLES)
    knee = Plan("knee", threshold=share, keep=knee_keep(share, geometry, costs))
    bound = np.mean([ideal_bound(geometry, costs, workload) for workload in workloads])
    best = {name: choose_with(predict, name) for name in ("knee", "simulated", "auto")}
    found = {name: serial / plan.predicted_ms for name, plan in best.items() if plan.predicted_ms}
    handed, streamed = Plan("hand-off"), Plan("stream", stream=True)
    found |= {"hand-off": serial / predict(handed), "stream": serial / predict(streamed)}
    if knee.keep < geometry.instances:
        found["knee at 20 %"] = serial / predict(knee)
    found |= {"bound": float(serial / bound), "best R_t": best["simulated"].threshold / SAMPLES}
    return found | {"best m": best["simulated"].keep / geometry.instances, "serial s": serial / 1e3}


def check_order(found: dict[str, float]) -> None:
    """simulated >= knee >= hand-off >= serial, below the bound; auto is the best of them."""
    assert found["simulated"] >= found["knee"] > found["hand-off"] > 1.0
    assert found["bound"] > found["auto"] >= found["simulated"] * (1 - 1e-9)


def test_the_order_of_gains():
    """65B actor, 33B critic, cap 1024: 8 instances. A former simulator, fluid in its scoring, gave
    1.179 to the knee rule at 20 % and 1.179 to the best (R_t, m)."""
    found = gains("65B", "33B", 1024, 1, draws=2)
    check_order(found)
    assert 1.1 < found["knee at 20 %"] < 1.3 and 1.15 < found["simulated"] < 1.35


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "knee_at_20", "best"),
    [
        (("33B", "65B", 512, 1), 1.066, 1.270),
        (("33B", "65B", 1024, 1), 1.238, 1.253),
        pytest.param(
            *(("33B", "65B", 1024, 2), 1.249, 1.405),
            marks=pytest.mark.xfail(
                strict=True,
                reason="1.216: that one moved more samples than decode unsaturated",
            ),
        ),
        (("33B", "65B", 2048, 2), 1.276, 1.327),
        (("65B", "33B", 1024, 1), 1.179, 1.179),
        (("13B", "33B", 1024, 1), 1.130, 1.185),
        (("13B", "33B", 1024, 2), 1.302, 1.329),
    ],
)
def test_against_a_former_simulator(setting, knee_at_20, best):
    """Within 8 %: that one scored without batches or buckets, in workloads of its own. RLHFuse
    reports 1.2 to 1.6 on generation and inference, and R_t of about 20 % of the batch."""
    found = gains(*setting)
    check_order(found)
    print(setting, {name: round(value, 3) for name, value in found.items()})
    assert found["knee at 20 %"] == pytest.approx(knee_at_20, rel=0.08)
    assert found["simulated"] == pytest.approx(best, rel=0.08)
