"""The mutations that `python tests/mutants.py` makes; each names fast tests that must notice it.

A text must occur exactly once in its file. Say what goes wrong in the name, and break what a slip
of the hand would break: flip a mask, shift by one, drop a term.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One broken place.

    file: from the root of the repository. original, mutated: text of the file, and what to put in
    its place. tests: pytest node ids, from the root, of which at least one must fail.
    """

    name: str
    file: str
    original: str
    mutated: str
    tests: tuple[str, ...]


RL = [
    Mutant(
        "gae enters the padding",
        "fuse_jax/rl/advantages.py",
        "jnp.where(is_real, value, next_value),",
        "value,",
        ("tests/rl/test_advantages.py::test_a_hole_in_the_mask_is_stepped_over",),
    ),
    Mutant(
        "gae keeps the critic's values of the padding",
        "fuse_jax/rl/advantages.py",
        "real = jnp.asarray(response_mask) != 0",
        "real = jnp.ones_like(response_mask, bool)",
        ("tests/rl/test_advantages.py::test_by_hand_with_values_in_the_padding",),
    ),
    Mutant(
        "gae forgets lambda",
        "fuse_jax/rl/advantages.py",
        "advantage = delta + gamma * gae_lambda * next_advantage",
        "advantage = delta + gamma * next_advantage",
        ("tests/rl/test_advantages.py::test_by_hand_with_values_in_the_padding",),
    ),
    Mutant(
        "gae drops the bootstrap value",
        "fuse_jax/rl/advantages.py",
        "start = (zeros, jnp.asarray(bootstrap_values))",
        "start = (zeros, zeros)",
        ("tests/rl/test_advantages.py::test_bootstrap_is_the_value_after_the_last_token",),
    ),
    Mutant(
        "returns are the advantages",
        "fuse_jax/rl/advantages.py",
        "jnp.where(real, advantages + values, 0.0)",
        "jnp.where(real, advantages, 0.0)",
        ("tests/rl/test_advantages.py::test_by_hand_with_values_in_the_padding",),
    ),
    Mutant(
        "mean over padding too",
        "fuse_jax/rl/masked.py",
        "count = jnp.sum(jnp.asarray(mask) != 0, axis=axis).astype(jnp.float32)",
        "count = jnp.sum(jnp.asarray(mask) == mask, axis=axis).astype(jnp.float32)",
        ("tests/rl/test_masked.py::test_moments_and_whitening_count_real_entries_only",),
    ),
    Mutant(
        "mean of nothing is 0/0",
        "fuse_jax/rl/masked.py",
        "/ jnp.maximum(count, 1.0)",
        "/ count",
        ("tests/rl/test_masked.py::test_sum_and_mean_along_an_axis_and_of_nothing",),
    ),
    Mutant(
        "mask multiplies instead of selecting",
        "fuse_jax/rl/masked.py",
        "jnp.sum(jnp.where(jnp.asarray(mask) != 0, x, 0.0), axis=axis)",
        "jnp.sum(x * mask, axis=axis)",
        ("tests/rl/test_masked.py::test_sum_and_mean_along_an_axis_and_of_nothing",),
    ),
    Mutant(
        "whitening trusts one pass over large equal entries",
        "fuse_jax/rl/masked.py",
        "correction = masked_mean(residual, mask)",
        "correction = 0.0 * masked_mean(residual, mask)",
        ("tests/rl/test_masked.py::test_equal_entries_whiten_to_nothing",),
    ),
    Mutant(
        "response mask one too long",
        "fuse_jax/rl/masked.py",
        "jnp.arange(R) < jnp.asarray(response_lengths)[:, None]",
        "jnp.arange(R) <= jnp.asarray(response_lengths)[:, None]",
        ("tests/rl/test_masked.py::test_response_mask_comes_from_lengths",),
    ),
    Mutant(
        "kl of reference against actor",
        "fuse_jax/rl/kl.py",
        "delta = jnp.subtract(log_probs, ref_log_probs)",
        "delta = jnp.subtract(ref_log_probs, log_probs)",
        ("tests/rl/test_kl.py::test_values_by_hand",),
    ),
    Mutant(
        "k3 bounds only its exponential",
        "fuse_jax/rl/kl.py",
        "jnp.where(small, series, jnp.expm1(-b) + b)",
        "jnp.where(small, series, jnp.expm1(-b) + delta)",
        ("tests/rl/test_kl.py::test_extreme_differences_stay_finite",),
    ),
    Mutant(
        "full kl lets impossible tokens in",
        "fuse_jax/rl/kl.py",
        "possible = logits > -jnp.inf",
        "possible = logits == logits",
        ("tests/rl/test_kl.py::test_full_kl_agrees_with_the_oracle_and_skips_padded_vocabulary",),
    ),
    Mutant(
        "adaptive coefficient turns the wrong way",
        "fuse_jax/rl/kl.py",
        "kl_coef * (1.0 + error *",
        "kl_coef * (1.0 - error *",
        ("tests/rl/test_kl.py::test_adaptive_coefficient_by_hand",),
    ),
    Mutant(
        "nan does not stop early",
        "fuse_jax/rl/kl.py",
        "return jnp.logical_not(jnp.asarray(approx_kl, jnp.float32) <= factor * target_kl)",
        "return jnp.asarray(approx_kl, jnp.float32) > factor * target_kl",
        ("tests/rl/test_kl.py::test_early_stop",),
    ),
    Mutant(
        "score lands one token before the last",
        "fuse_jax/rl/rewards.py",
        "jnp.cumsum(real[:, ::-1], axis=1)[:, ::-1] == 1",
        "jnp.cumsum(real[:, ::-1], axis=1)[:, ::-1] == 2",
        ("tests/rl/test_rl_rewards.py::test_by_hand_full_short_one_token_and_empty",),
    ),
    Mutant(
        "kl is paid out as a reward",
        "fuse_jax/rl/rewards.py",
        "cost = -kl_coef * ",
        "cost = kl_coef * ",
        ("tests/rl/test_rl_rewards.py::test_by_hand_full_short_one_token_and_empty",),
    ),
    Mutant(
        "penalty is added to the score",
        "fuse_jax/rl/rewards.py",
        "jnp.float32(penalty), scores)",
        "scores + jnp.float32(penalty), scores)",
        ("tests/rl/test_rl_rewards.py::test_missing_eos_penalty_replaces_the_score",),
    ),
    Mutant(
        "one nan score poisons the moments",
        "fuse_jax/rl/moments.py",
        "keep = (jnp.asarray(valid) != 0) & jnp.isfinite(x)",
        "keep = jnp.asarray(valid) != 0",
        ("tests/rl/test_moments.py",),
    ),
    Mutant(
        "moments forget the spread between batches",
        "fuse_jax/rl/moments.py",
        " + jnp.square(d) * moments.count * share",
        "",
        ("tests/rl/test_moments.py::test_by_hand",),
    ),
    Mutant(
        "every sequence mean over all sequences, empty ones too",
        "fuse_jax/rl/weights.py",
        "jnp.sum(jnp.any(counted, axis=1))",
        "jnp.sum(jnp.any(counted, axis=1) | True)",
        ("tests/rl/test_loss_weights.py",),
    ),
    Mutant(
        "excluded samples stay in the loss",
        "fuse_jax/rl/weights.py",
        "return real & (jnp.asarray(sample_valid) != 0)[:, None]",
        "return real",
        ("tests/rl/test_loss_weights.py::test_excluded_sample_is_in_no_denominator",),
    ),
    Mutant(
        "each part divides by its own tokens",
        "fuse_jax/rl/weights.py",
        "total = totals[mode]",
        "total = None",
        ("tests/rl/test_loss_weights.py::test_two_ranks_by_hand",),
    ),
    Mutant(
        "losses do not clean beneath a zero weight",
        "fuse_jax/rl/losses.py",
        "return [jnp.where(weights != 0, a, 0.0) for a in arrays]",
        "return [jnp.asarray(a) for a in arrays]",
        ("tests/rl/test_losses.py::test_nan_beneath_a_zero_weight_is_not_there",),
    ),
    Mutant(
        "ratio is not bounded before exp",
        "fuse_jax/rl/losses.py",
        "jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))",
        "jnp.exp(log_ratio)",
        ("tests/rl/test_losses.py::test_extreme_ratios_stay_finite",),
    ),
    Mutant(
        "upper clip takes the lower value",
        "fuse_jax/rl/losses.py",
        "1.0 + clip_eps_high) * advantages",
        "1.0 + clip_eps_low) * advantages",
        ("tests/rl/test_losses.py::test_policy_loss_by_hand",),
    ),
    Mutant(
        "policy loss takes the better branch",
        "fuse_jax/rl/losses.py",
        "objective = jnp.minimum(free, clipped)",
        "objective = jnp.maximum(free, clipped)",
        ("tests/rl/test_losses.py::test_policy_loss_by_hand",),
    ),
    Mutant(
        "dual clip for good actions too",
        "fuse_jax/rl/losses.py",
        "dual_held = (advantages < 0) & (objective < floor)",
        "dual_held = objective < floor",
        ("tests/rl/test_losses.py::test_dual_clip_bounds_a_bad_action_that_became_likely",),
    ),
    Mutant(
        "value loss takes the better branch",
        "fuse_jax/rl/losses.py",
        "error = jnp.maximum(free, jnp.square(held - returns))",
        "error = jnp.minimum(free, jnp.square(held - returns))",
        ("tests/rl/test_losses.py::test_value_loss_by_hand",),
    ),
    Mutant(
        "k1 is let into the loss",
        "fuse_jax/rl/losses.py",
        'if kind not in ("k2", "k3"):',
        'if kind not in ("k1", "k2", "k3"):',
        ("tests/rl/test_losses.py::test_kl_loss_refuses_kinds_whose_gradient_is_not_the_kl",),
    ),
    Mutant(
        "pair margin helps instead of asking more",
        "fuse_jax/rl/losses.py",
        "jax.nn.softplus(margin - difference)",
        "jax.nn.softplus(-margin - difference)",
        ("tests/rl/test_losses.py::test_bradley_terry_by_hand",),
    ),
    Mutant(
        "maxima of parts are added",
        "fuse_jax/rl/metrics.py",
        'if name.endswith("_max")',
        'if name.endswith("_maximum")',
        ("tests/rl/test_rl_invariance.py::test_combined_metrics_add_except_maxima_and_must_match",),
    ),
]

MUTANTS = [*RL]
