"""Generalised advantage estimation over padded responses."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fuse_jax.rl.checks import require_float32, require_rows, require_same_shape


def gae(
    rewards: Float[Array, "B R"],
    values: Float[Array, "B R"],
    response_mask: Shaped[Array, "B R"],
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Float[Array, " B"] | None = None,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Advantages and returns by the lambda-weighted sum of temporal-difference errors.

        delta_t  = r_t + gamma V_{t+1} - V_t
        A_t      = delta_t + gamma lambda A_{t+1}
        return_t = A_t + V_t

    over the real tokens only: t + 1 is the next token of the mask, and after the last one A = 0 and
    V = `bootstrap_values` (0 when not given). Padding is never entered, so the critic's values
    there do not leak into the last tokens. Holes in the mask are stepped over.

    Source: Schulman et al. 2016, arXiv 1506.02438, equations 11-16.

    Args:
      rewards: `[B, R]` float32, one a token (see `rewards.shape_rewards`).
      values: `[B, R]` float32, the critic's value of the state before token t.
      response_mask: `[B, R]`, nonzero for real tokens. A row of zeros is allowed.
      gamma: discount a token.
      gae_lambda: 1 gives return minus value (no bias), 0 the one-step error (least variance).
      bootstrap_values: `[B]` float32, the value of the state after the last token. Only for samples
        cut off at the length cap; it must be 0 for those that ended by themselves, as nothing
        follows a stop token.

    Returns:
      advantages (not whitened) and returns, `[B, R]` float32, 0 outside the mask.

    Raises:
      TypeError: an argument is not float32. ValueError: shapes differ.
    """
    require_float32(rewards=rewards, values=values)
    require_same_shape(rewards=rewards, values=values, response_mask=response_mask)
    zeros = jnp.zeros(rewards.shape[0], jnp.float32)
    if bootstrap_values is None:
        bootstrap_values = zeros
    require_float32(bootstrap_values=bootstrap_values)
    require_rows(rewards.shape[0], bootstrap_values=bootstrap_values)

    real = jnp.asarray(response_mask) != 0
    rewards = jnp.where(real, rewards, 0.0)
    values = jnp.where(real, values, 0.0)

    def step_back(carry, token):
        next_advantage, next_value = carry
        reward, value, is_real = token
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * gae_lambda * next_advantage
        carry = (
            jnp.where(is_real, advantage, next_advantage),
            jnp.where(is_real, value, next_value),
        )
        return carry, jnp.where(is_real, advantage, 0.0)

    start = (zeros, jnp.asarray(bootstrap_values))
    _, advantages = jax.lax.scan(step_back, start, (rewards.T, values.T, real.T), reverse=True)
    advantages = advantages.T
    return advantages, jnp.where(real, advantages + values, 0.0)
