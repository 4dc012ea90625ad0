"""From scores to rewards, advantages and returns by hand, and a critic in the same units."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from fuse_jax.config import CriticConfig, KLConfig, PPOConfig, RewardConfig
from fuse_jax.models.heads import scalars
from fuse_jax.rl.moments import Moments
from fuse_jax.training.experience import (
    ScoredBatch,
    Shaped,
    experience_metrics,
    make_experience,
    shape,
    treat_scores,
)
from fuse_jax.training.models import initial_critic

F32 = np.float32
MASK = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]], bool)


def batch() -> ScoredBatch:
    """Three samples: one cut off at the cap, one that ended after two tokens, one excluded."""
    return ScoredBatch(
        tokens=np.zeros((3, 5), np.int32),
        prompt_lengths=np.full(3, 2, np.int32),
        response_lengths=np.array([3, 2, 3], np.int32),
        truncated=np.array([True, False, False]),
        log_probs=np.array([[-1, -2, -3], [-2, -2, 9], [-1, -1, -1]], F32),
        ref_log_probs=np.array([[-2, -2, -1], [-1, -3, 0], [-7, -7, -7]], F32),
        values=np.array([[0.5, 1, -1], [2, 0, 50], [70, 70, 70]], F32),
        last_values=np.array([4, 100, 1], F32),
        scores=np.array([1, 3, np.nan], F32),
        valid=np.array([True, True, False]),
    )


def shaped_by_hand(kl_coef: float, scores: list[float], gamma: float, gae_lambda: float) -> Shaped:
    """Backwards over the tokens of the two samples that count, in plain Python."""
    given = batch()
    k1 = np.where(MASK, given.log_probs - given.ref_log_probs, 0.0)
    rewards, advantages, returns = (np.zeros((3, 3)) for _ in range(3))
    for row, length in ((0, 3), (1, 2)):
        rewards[row] = -kl_coef * k1[row]
        rewards[row, length - 1] += scores[row]
        after, advantage = (4.0 if row == 0 else 0.0), 0.0
        for t in reversed(range(length)):
            value = given.values[row, t]
            advantage = rewards[row, t] + gamma * after - value + gamma * gae_lambda * advantage
            advantages[row, t], returns[row, t] = advantage, advantage + value
            after = value
    return Shaped(*(jnp.asarray(x) for x in (rewards, advantages, returns, k1, scores)))


def test_a_score_is_normalised_then_clipped_then_replaced_where_truncated():
    moments = Moments(*(jnp.float32(x) for x in (2, 1, 8)))  # mean 1, deviation 2
    scores, truncated = jnp.array([2.0, 100.0, 4.0]), jnp.array([False, False, True])
    reward = RewardConfig(clip=5.0, missing_eos_penalty=-3.0)
    treated = treat_scores(scores, truncated, moments, reward)
    np.testing.assert_allclose(treated, [0.5, 5.0, -3.0], rtol=1e-6)
    kept = treat_scores(scores, truncated, None, RewardConfig(clip=0.0, missing_eos_penalty=None))
    np.testing.assert_array_equal(kept, scores)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_rewards_advantages_and_returns_by_hand(placement):
    ppo = PPOConfig(
        gamma=0.9,
        gae_lambda=0.5,
        whiten_advantages=False,
        bootstrap_truncated=True,
        kl=KLConfig(placement=placement),
    )
    reward = RewardConfig(clip=0.0, missing_eos_penalty=None)
    # The two scores change places, as in a control run; the excluded one's NaN goes nowhere.
    order = np.array([1, 0, 2])
    found = shape(batch(), None, jnp.float32(0.1), order, reward=reward, ppo=ppo)
    wanted = shaped_by_hand(0.1 if placement == "reward" else 0.0, [3.0, 1.0, 0.0], 0.9, 0.5)
    for name, one, other in zip(Shaped._fields, found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)
    experience = make_experience(batch(), found)
    np.testing.assert_array_equal(experience.response_mask, MASK)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_real_tokens():
    reward = RewardConfig(clip=0.0, missing_eos_penalty=None)
    found = shape(batch(), None, jnp.float32(0.1), np.arange(3), reward=reward, ppo=PPOConfig())
    real = np.asarray(found.advantages)[MASK]
    assert real.mean() == pytest.approx(0, abs=1e-6) and real.std() == pytest.approx(1, rel=1e-3)
    assert not np.asarray(found.advantages)[~MASK].any()


def test_metrics_leave_out_padding_and_excluded_samples():
    values = experience_metrics(batch(), shaped_by_hand(0.0, [3.0, 1.0, 0.0], 0.9, 0.5))
    assert (values["score"], values["reward"]) == (2.0, 2.0)
    assert values["kl"] == pytest.approx((1 + 0 - 2 - 1 + 1) / 2)
    assert values["kl_estimate"] == pytest.approx(values["kl"])
    assert (values["truncated"], values["excluded"]) == (1.0, 1.0)
    returns = np.asarray(shaped_by_hand(0.0, [3.0, 1.0, 0.0], 0.9, 0.5).returns)[MASK]
    left = returns - batch().values[MASK]
    assert values["return_mean"] == pytest.approx(returns.mean(), rel=1e-5)
    assert values["explained_variance"] == pytest.approx(1 - left.var() / returns.var(), rel=1e-4)


def test_a_critic_made_of_the_reward_model_predicts_treated_scores():
    run = SimpleNamespace(config=SimpleNamespace(critic=CriticConfig()))
    head = {"kernel": jnp.array([[2.0], [-4.0]]), "bias": jnp.array([1.0])}
    reward_model = {"trunk": 7, "head": head}
    critic = initial_critic(run, {}, reward_model, 3.0, 4.0)
    hidden = jnp.array([[[1.0, 0.5], [0.0, -2.0]]])
    wanted = (scalars(reward_model, hidden) - 3.0) / 4.0
    np.testing.assert_allclose(scalars(critic, hidden), wanted, rtol=1e-6)
    assert critic["trunk"] == 7
    np.testing.assert_array_equal(head["bias"], [1.0])  # the reward model keeps its own
