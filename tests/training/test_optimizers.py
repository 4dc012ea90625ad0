"""Schedules and AdamW against the formulas."""

import numpy as np
import pytest

from fuse_jax.config import OptimizerConfig, PPOConfig
from fuse_jax.training.optimizers import make_optimizer, make_schedule, planned_updates


def rates(total, **config):
    schedule = make_schedule(OptimizerConfig(learning_rate=0.5, **config), total)
    return [float(schedule(step)) for step in range(total)]


def test_constant():
    assert rates(3) == [0.5] * 3


def test_warm_up_starts_above_zero_and_ends_at_the_full_rate():
    assert rates(6, warmup_fraction=2 / 3) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])


def test_the_last_update_gets_the_final_fraction():
    assert rates(5, schedule="linear", final_fraction=0.2) == pytest.approx(
        [0.5, 0.4, 0.3, 0.2, 0.1]
    )
    cosine = rates(5, schedule="cosine", final_fraction=0.2)
    assert cosine == pytest.approx([0.5, 0.4414, 0.3, 0.1586, 0.1], abs=1e-4)
    warm = rates(6, schedule="linear", final_fraction=0.0, warmup_fraction=1 / 3)
    assert warm == pytest.approx([0.25, 0.5, 0.5, 1 / 3, 1 / 6, 0.0], abs=1e-6)


def test_a_schedule_of_one_step_and_steps_beyond_the_plan():
    schedule = make_schedule(OptimizerConfig(learning_rate=0.5, schedule="linear"), 1)
    assert float(schedule(0)) == 0.5
    schedule = make_schedule(OptimizerConfig(learning_rate=0.5, schedule="cosine"), 4)
    assert float(schedule(9)) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("total", [1, 2, 5, 220])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.99])
def test_a_warm_up_scales_with_its_stage_and_always_ends(total, fraction):
    warm = rates(total, warmup_fraction=fraction)
    assert warm[-1] == 0.5 and warm[0] > 0
    rising = sum(rate < 0.5 for rate in warm)
    assert abs(rising - (fraction * total - 1)) <= 1


def test_impossible_schedules_are_refused():
    with pytest.raises(ValueError, match="total_steps=0"):
        make_schedule(OptimizerConfig(), 0)


def test_planned_updates_count_optimiser_steps():
    config = PPOConfig(iterations=100, epochs=2, minibatches=4, critic_warmup=10)
    assert planned_updates(config) == {"actor": 720, "critic": 800}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_by_the_formula_and_no_decay_of_norms_and_biases(decay):
    config = OptimizerConfig(learning_rate=0.1, b1=0.8, b2=0.9, eps=1e-2, weight_decay=decay)
    optimizer = make_optimizer(config, 10)
    rng = np.random.default_rng(0)
    names = ("kernel", "bias", "scale", "embedding")
    params = {"layer": {n: rng.normal(size=(2, 3)).astype(np.float32) for n in names}}
    state = optimizer.transform.init(params)
    m = v = 0.0
    for t in (1, 2):
        grads = {"layer": {n: rng.normal(size=(2, 3)).astype(np.float32) for n in names}}
        updates, state = optimizer.transform.update(grads, state, params)
        g = grads["layer"]["kernel"]
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        plain = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-2)
        expected = -0.1 * (plain + decay * params["layer"]["kernel"])
        np.testing.assert_allclose(updates["layer"]["kernel"], expected, rtol=1e-5, atol=1e-7)
    plain = make_optimizer(OptimizerConfig(learning_rate=0.1, b1=0.8, b2=0.9, eps=1e-2), 10)
    updates = [
        transform.update(grads, transform.init(params), params)[0]["layer"]
        for transform in (plain.transform, optimizer.transform)
    ]
    for name in names:
        same = np.array_equal(updates[0][name], updates[1][name])
        assert same == (decay == 0 or name in ("bias", "scale")), name
