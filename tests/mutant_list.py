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

ROLLOUT = [
    Mutant(
        "rows of a group go into slots from its first row on again",
        "fuse_jax/rollout/batcher.py",
        "self._slot_index(slots, first=group.taken)",
        "self._slot_index(slots)",
        ("tests/rollout/test_batcher.py::test_order_of_arrival_changes_nothing",),
    ),
    Mutant(
        "a chunk is launched blindly while prompts wait",
        "fuse_jax/rollout/batcher.py",
        "if not self.waiting and self.launched < 2:",
        "if self.launched < 2:",
        ("tests/rollout/test_batcher.py::test_a_finished_slot_is_refilled_before_the_next_chunk",),
    ),
    Mutant(
        "a response that ended is called truncated",
        "fuse_jax/rollout/batcher.py",
        "truncated=int(tokens[-1]) not in stop_tokens",
        "truncated=int(tokens[-1]) in stop_tokens",
        ("tests/rollout/test_batcher.py::test_every_prompt_comes_out_once_with_consistent_arrays",),
    ),
    Mutant(
        "detached slots go on where they were",
        "fuse_jax/rollout/batcher.py",
        "self.state = self.engine.release(self.state, self._slot_index(slots))",
        "self.engine.release(jax.tree.map(lambda x: x + 0, self.state), self._slot_index(slots))",
        ("tests/rollout/test_batcher.py::test_migrated_samples_are_bit_equal",),
    ),
    Mutant(
        "noise comes from the sum of sample and position",
        "fuse_jax/rollout/sampling.py",
        "jax.random.fold_in(jax.random.fold_in(seed_key, i), t)",
        "jax.random.fold_in(seed_key, i + t)",
        ("tests/rollout/test_sampling.py::test_a_draw_depends_on_its_sample_and_position_only",),
    ),
    Mutant(
        "log-probs are of the perturbed logits",
        "fuse_jax/rollout/sampling.py",
        "log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)",
        "log_probs = chosen - jax.nn.logsumexp(perturbed, axis=-1)",
        ("tests/rollout/test_sampling.py::test_token_and_log_prob_are_the_oracles",),
    ),
    Mutant(
        "top-p leaves out the token that reaches it",
        "fuse_jax/rollout/sampling.py",
        "(before < sampling.top_p)",
        "(reached < sampling.top_p)",
        ("tests/rollout/test_sampling.py::test_token_and_log_prob_are_the_oracles",),
    ),
    Mutant(
        "padding of the vocabulary may be drawn",
        "fuse_jax/rollout/sampling.py",
        "if sampling.valid_vocab < logits.shape[-1]:",
        "if False:",
        (
            "tests/rollout/test_sampling.py::test_greedy_takes_the_best_real_token_with_probability_one",
        ),
    ),
    Mutant(
        "the first token is drawn after one prompt token too many",
        "fuse_jax/rollout/programs.py",
        "(lengths - 1)[:, None, None]",
        "lengths[:, None, None]",
        ("tests/rollout/test_engine.py::test_log_probs_are_those_of_a_full_forward_pass",),
    ),
    Mutant(
        "decoding draws with the noise of the token before",
        "fuse_jax/rollout/programs.py",
        "state.sample_ids, state.generated, seed_key)",
        "state.sample_ids, state.generated - 1, seed_key)",
        ("tests/rollout/test_engine.py::test_log_probs_are_those_of_a_full_forward_pass",),
    ),
    Mutant(
        "a response may be one token longer than its cap",
        "fuse_jax/rollout/programs.py",
        "(generated >= max_new)",
        "(generated > max_new)",
        ("tests/rollout/test_engine.py::test_a_chunk_ends_when_all_slots_are_done",),
    ),
    Mutant(
        "slots that are done go on writing",
        "fuse_jax/rollout/programs.py",
        "written = live & (draw.tokens >= 0)",
        "written = draw.tokens >= 0",
        ("tests/rollout/test_engine.py::test_done_and_released_slots_are_left_alone",),
    ),
    Mutant(
        "attention reads one cached position too many",
        "fuse_jax/rollout/cache_attention.py",
        "jnp.arange(block) < lengths[:, None]",
        "jnp.arange(block) <= lengths[:, None]",
        ("tests/rollout/test_engine.py::test_log_probs_are_those_of_a_full_forward_pass",),
    ),
    Mutant(
        "the last block of the cache is not read",
        "fuse_jax/rollout/cache_attention.py",
        "return -(-jnp.max(jnp.where(live, lengths, 0)) // block)",
        "return jnp.max(jnp.where(live, lengths, 0)) // block",
        ("tests/rollout/test_engine.py::test_log_probs_are_those_of_a_full_forward_pass",),
    ),
]

SCORING = [
    Mutant(
        "kl of the reference against the actor",
        "fuse_jax/scoring/passes.py",
        "return full_kl(logits, ref_logits)",
        "return full_kl(ref_logits, logits)",
        ("tests/scoring/test_passes.py::test_log_probs_by_hand",),
    ),
    Mutant(
        "scoring forgets the temperature",
        "fuse_jax/scoring/passes.py",
        "        temperature=temperature,\n        valid_vocab=valid_vocab,",
        "        valid_vocab=valid_vocab,",
        ("tests/scoring/test_passes.py::test_log_probs_by_hand",),
    ),
    Mutant(
        "log-probs beneath the mask come through",
        "fuse_jax/scoring/passes.py",
        "> 0, statistics.log_probs, 0.0)",
        "> -1, statistics.log_probs, 0.0)",
        ("tests/scoring/test_passes.py::test_log_probs_by_hand",),
    ),
    Mutant(
        "last value is of the state before the last token",
        "fuse_jax/scoring/passes.py",
        "return values, _at_end(params, hidden, prompt_lengths + response_lengths)",
        "return values, _at_end(params, hidden, prompt_lengths + response_lengths - 1)",
        ("tests/scoring/test_passes.py::test_alignment_by_hand",),
    ),
    Mutant(
        "bucket follows from the response alone",
        "fuse_jax/scoring/scorer.py",
        "return bucket_of(sample.length, self.buckets)",
        "return bucket_of(response, self.buckets)",
        ("tests/scoring/test_scorer.py::test_samples_fall_in_the_bucket_of_their_own_length",),
    ),
    Mutant(
        "dispatch waits for the device",
        "fuse_jax/scoring/scorer.py",
        "        start_copies(arrays)",
        "        jax.block_until_ready(arrays)",
        ("tests/scoring/test_scorer.py::test_readiness_a_sample_and_column_without_waiting",),
    ),
    Mutant(
        "scores go to the first samples instead of their own",
        "fuse_jax/scoring/scorer.py",
        "pending.write([scored[i] for i in positions])",
        "pending.write(scored[: len(positions)])",
        ("tests/scoring/test_scorer.py::test_every_column_equals_the_unbatched_oracle",),
    ),
    Mutant(
        "nan is a score",
        "fuse_jax/scoring/reward_call.py",
        "if not abs(score) <= FLOAT32_MAX:",
        "if abs(score) > FLOAT32_MAX:",
        ("tests/scoring/test_reward_function.py::test_what_counts_as_a_score",),
    ),
    Mutant(
        "late answers are accepted",
        "fuse_jax/scoring/worker_pool.py",
        "late = seconds > self.timeout",
        "late = False",
        (
            "tests/scoring/test_reward_function.py::test_answer_beyond_the_limit_is_late_even_if_it_was_seen_in_time",
        ),
    ),
    Mutant(
        "results come in the order of their arrival",
        "fuse_jax/scoring/reward_function.py",
        "return [self._ready.pop(key) for key in keys]",
        "return [self._ready.pop(key) for key in list(self._ready)]",
        ("tests/scoring/test_reward_function.py::test_results_keep_order_and_stream",),
    ),
]

TRAINING = [
    Mutant(
        "loss weights are of a bucket instead of the mini-batch",
        "fuse_jax/training/minibatch.py",
        "weights=aligned(weights[members]),",
        "weights=aligned(weights[members] / max(weights[members].sum(), 1e-9)),",
        ("tests/training/test_minibatch.py::test_weights_are_of_the_whole_minibatch",),
    ),
    Mutant(
        "a micro-batch that is not full is dropped",
        "fuse_jax/training/minibatch.py",
        "np.int32(-(-len(members) // bucket.rows))",
        "np.int32(len(members) // bucket.rows)",
        (
            "tests/training/test_minibatch.py::test_every_sample_has_one_row_in_the_bucket_of_its_own_length",
        ),
    ),
    Mutant(
        "response columns are one short",
        "fuse_jax/training/minibatch.py",
        "response = min(bucket.length - 1, ",
        "response = min(bucket.length - 2, ",
        ("tests/training/test_minibatch.py::test_shapes_do_not_depend_on_the_samples",),
    ),
    Mutant(
        "explained variance forgets the mean of the returns",
        "fuse_jax/training/gradients.py",
        'sums["return_sq"] - jnp.square(sums["return_mean"])',
        'sums["return_sq"]',
        ("tests/training/test_gradients.py::test_explained_variance_from_the_sums",),
    ),
    Mutant(
        "every micro-batch's gradient is clipped by itself",
        "fuse_jax/training/gradients.py",
        "lambda g: g.astype(jnp.float32), grads)",
        "lambda g: jnp.clip(g.astype(jnp.float32), -1.0, 1.0), grads)",
        (
            "tests/training/test_gradients.py::test_gradients_and_metrics_of_the_real_micro_batches_are_added_as_they_are",
        ),
    ),
    Mutant(
        "micro-batches that hold nothing are run too",
        "fuse_jax/training/gradients.py",
        "lax.fori_loop(0, bucket.count, turn, total)",
        "lax.fori_loop(0, len(jax.tree.leaves(bucket.micro_batches)[0]), turn, total)",
        (
            "tests/training/test_gradients.py::test_gradients_and_metrics_of_the_real_micro_batches_are_added_as_they_are",
        ),
    ),
    Mutant(
        "entropy is punished",
        "fuse_jax/training/gradients.py",
        "loss = loss - ppo.entropy_coef * entropy",
        "loss = loss + ppo.entropy_coef * entropy",
        (
            "tests/training/test_gradients.py::test_the_actors_loss_is_policy_less_entropy_and_plus_kl",
        ),
    ),
    Mutant(
        "gradients that are not finite are taken",
        "fuse_jax/training/state.py",
        "_choose(finite, moved, params[name])",
        "moved",
        (
            "tests/training/test_state.py::test_a_gradient_that_is_not_finite_leaves_its_model_alone_and_is_counted",
        ),
    ),
    Mutant(
        "small gradients are blown up to the clip",
        "fuse_jax/training/state.py",
        "jnp.where(norm > max_norm, max_norm / norm, 1.0)",
        "max_norm / norm",
        ("tests/training/test_state.py::test_each_model_is_clipped_by_its_own_norm",),
    ),
    Mutant(
        "warm-up begins with a rate of zero",
        "fuse_jax/training/optimizers.py",
        "(done + 1) / warmup",
        "done / warmup",
        (
            "tests/training/test_optimizers.py::test_warm_up_starts_above_zero_and_ends_at_the_full_rate",
        ),
    ),
    Mutant(
        "every epoch has the order of the first",
        "fuse_jax/training/ppo_loop.py",
        "ORDER_SEED, iteration, epoch)",
        "ORDER_SEED, iteration)",
        (
            "tests/training/test_ppo_loop.py::test_every_epoch_and_iteration_takes_each_sample_once_in_an_order_of_its_own",
        ),
    ),
    Mutant(
        "the actor is trained where the critic should be alone",
        "fuse_jax/training/ppo_loop.py",
        "parts.critic_step if warming or stopped else parts.step",
        "parts.step if warming or stopped else parts.critic_step",
        ("tests/training/test_ppo_loop.py::test_the_critic_warms_up_alone",),
    ),
    Mutant(
        "an early stop leaves the actor training",
        "fuse_jax/training/ppo_loop.py",
        "parts.critic_step if warming or stopped else parts.step",
        "parts.critic_step if warming else parts.step",
        ("tests/training/test_ppo_loop.py::test_the_actor_stops_early_and_the_critic_goes_on",),
    ),
    Mutant(
        "the penalty for a missing end is normalised",
        "fuse_jax/training/experience.py",
        "missing_eos_penalty(scores, truncated, reward.missing_eos_penalty)",
        "missing_eos_penalty(scores, truncated, normalise_scores(jnp.float32(-3), moments))",
        (
            "tests/training/test_experience.py::test_a_score_is_normalised_then_clipped_then_replaced_where_truncated",
        ),
    ),
    Mutant(
        "responses that ended are bootstrapped too",
        "fuse_jax/training/experience.py",
        "jnp.where(batch.truncated, batch.last_values, 0.0)",
        "batch.last_values",
        ("tests/training/test_experience.py::test_rewards_advantages_and_returns_by_hand[reward]",),
    ),
    Mutant(
        "kl is charged in the reward and in the loss",
        "fuse_jax/training/experience.py",
        'kl_coef if ppo.kl.placement == "reward" else jnp.zeros_like(kl_coef)',
        "kl_coef",
        ("tests/training/test_experience.py::test_rewards_advantages_and_returns_by_hand[loss]",),
    ),
    Mutant(
        "critic's head keeps the offset of raw scores",
        "fuse_jax/training/models.py",
        '(head["bias"] - mean) / deviation',
        'head["bias"] / deviation',
        (
            "tests/training/test_experience.py::test_a_critic_made_of_the_reward_model_predicts_treated_scores",
        ),
    ),
]

INTER_STAGE = [
    Mutant(
        "a sample that is read again draws its first token again",
        "fuse_jax/rollout/batcher.py",
        "[progress.generated for progress in chosen]",
        "[0 for progress in chosen]",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_a_tail_read_again_agrees_within_the_margin",
        ),
    ),
    Mutant(
        "caches stay behind where they should move",
        "fuse_jax/fusion/inter_stage/migration.py",
        'if move.way == "kv":',
        'if move.way == "prefill":',
        ("tests/fusion/inter_stage/test_runtime.py::test_the_tail_moves_with_its_caches",),
    ),
    Mutant(
        "a barrier stands before scoring",
        "fuse_jax/fusion/inter_stage/policy.py",
        "return backlog == 0 if plan.handoff else unfinished == 0",
        "return unfinished == 0",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_a_finished_sample_is_scored_within_a_chunk",
        ),
    ),
    Mutant(
        "the serial plan scores before generation has ended",
        "fuse_jax/fusion/inter_stage/policy.py",
        "backlog == 0 if plan.handoff else unfinished == 0",
        "backlog == 0",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_serial_scores_nothing_before_the_last_sample",
        ),
    ),
    Mutant(
        "scoring batches of a failed instance are lost",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "self.table.give_back(unit.column, unit.bucket, unit.samples)",
        "pass",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_scores_of_a_failed_scorer_are_given_again",
        ),
    ),
    Mutant(
        "samples of a failed instance are lost",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "        self._restart(unfinished)",
        "        pass",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_samples_of_a_failed_instance_run_elsewhere",
        ),
    ),
    Mutant(
        "scores are written to the samples of another batch",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "for position in unit.samples]",
        "for position in reversed(unit.samples)]",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_every_plan_gives_the_serial_bits[handoff]",
        ),
    ),
    Mutant(
        "work starts before the device is free",
        "fuse_jax/fusion/inter_stage/timeline.py",
        "start = max(start, free_at[instance])",
        "pass",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_the_timeline_holds_every_kind_of_work_without_overlap",
        ),
    ),
    Mutant(
        "ends are as late as the look that sees them",
        "fuse_jax/fusion/inter_stage/timeline.py",
        "(at - self._started) * 1e3",
        "self.now()",
        (
            "tests/fusion/inter_stage/test_overhead.py::test_an_end_is_noted_when_it_is_and_not_when_it_is_seen",
        ),
    ),
    Mutant(
        "what a given-up instance still does is told",
        "fuse_jax/fusion/inter_stage/timeline.py",
        "            if not self._dropped[work.instance]:",
        "            if True:",
        (
            "tests/fusion/inter_stage/test_overhead.py::test_what_an_instance_given_up_ends_later_is_not_told",
        ),
    ),
    Mutant(
        "copies of weights hold up the work behind them",
        "fuse_jax/fusion/inter_stage/timeline.py",
        '(instance, kind == "weights")',
        "instance",
        ("tests/fusion/inter_stage/test_overhead.py::test_weights_hold_nothing_up",),
    ),
    Mutant(
        "a program that failed ends the thread that waits for it",
        "fuse_jax/fusion/inter_stage/watchers.py",
        "contextlib.suppress(Exception)",
        "contextlib.suppress(KeyError)",
        ("tests/fusion/inter_stage/test_overhead.py::test_what_failed_has_ended_too",),
    ),
    Mutant(
        "a thread keeps what it waited for",
        "fuse_jax/fusion/inter_stage/watchers.py",
        "            due = array = None  # it may hold a cache",
        "            pass",
        (
            "tests/fusion/inter_stage/test_overhead.py::test_a_timeline_tells_what_ended_and_lets_go_of_it",
        ),
    ),
    Mutant(
        "the interpreter does not wait for threads that wait for devices",
        "fuse_jax/fusion/inter_stage/watchers.py",
        "thread.join(max(end - time.monotonic(), 0.0))",
        "pass",
        (
            "tests/fusion/inter_stage/test_overhead.py::test_a_program_ends_in_order_while_a_device_works",
        ),
    ),
    Mutant(
        "threads outlive their run",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "            self.timeline.close()",
        "            pass",
        ("tests/fusion/inter_stage/test_overhead.py::test_no_thread_outlives_a_run_that_fails",),
    ),
    Mutant(
        "an instance is not asked what is due after its chunk",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "bool(finished))\n        self._changed[lane.index] = lane",
        "bool(finished))",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_every_plan_gives_the_serial_bits[handoff]",
        ),
    ),
    Mutant(
        "what a failed step had done is done again elsewhere",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "if request.sample_id not in held]",
        "if held or True]",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_a_step_that_fails_part_way_loses_no_sample_and_has_none_twice",
        ),
    ),
    Mutant(
        "slots are emptied before all samples of a chunk are made",
        "fuse_jax/rollout/batcher.py",
        "                finished[slot] = owner.sample(self.engine.stop_tokens)",
        "                self._slots[slot] = None\n"
        "                finished[slot] = owner.sample(self.engine.stop_tokens)",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_a_step_that_fails_part_way_loses_no_sample_and_has_none_twice",
        ),
    ),
    Mutant(
        "streaming does not wait for the weights",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "if lane.batches or not lane.weights_here:",
        "if lane.batches or not lane.has_weights:",
        ("tests/fusion/inter_stage/test_runtime.py::test_streaming_waits_for_the_weights",),
    ),
    Mutant(
        "an instance that generates is taken for idle",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "            self._idle.discard(lane.index)\n            return\n        self._idle.add",
        "            pass\n        self._idle.add",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_an_instance_scores_once_it_has_nothing_to_generate",
        ),
    ),
    Mutant(
        "an instance is not asked what is due after its scores",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "        self._changed[lane.index] = lane\n        unit",
        "        unit",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_every_plan_gives_the_serial_bits[serial]",
        ),
    ),
    Mutant(
        "idle instances are not offered what a busy one finishes",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "        if self._more_due:",
        "        if False:",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_a_finished_sample_is_scored_within_a_chunk",
        ),
    ),
    Mutant(
        "an instance that leaves is not asked to",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "if one.leaving and one.alive and not one.in_flight]:",
        "if False]:",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_the_tail_moves_as_soon_as_its_last_chunk_is_read",
        ),
    ),
    Mutant(
        "instances that were given samples are not asked to go on",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "            lanes = self.lanes  # any may have been given samples",
        "            pass",
        (
            "tests/fusion/inter_stage/test_runtime.py::test_what_an_idle_instance_is_given_it_starts_at_once",
        ),
    ),
    Mutant(
        "what the knee rule gives is left out by the budget",
        "fuse_jax/fusion/inter_stage/choose.py",
        '"simulated": ("simulated", "knee")}',
        '"simulated": ("simulated",)}',
        (
            "tests/fusion/inter_stage/test_inter_choose.py::test_a_budget_leaves_the_pairs_of_the_knee_rule_in",
        ),
    ),
    Mutant(
        "all objects are gone through for garbage while instances wait",
        "fuse_jax/fusion/inter_stage/runtime.py",
        "    gc.freeze()",
        "    pass",
        (
            "tests/fusion/inter_stage/test_overhead.py::test_garbage_is_looked_for_among_new_objects_only",
        ),
    ),
    Mutant(
        "streaming looks at instances after every chunk",
        "fuse_jax/fusion/inter_stage/lateness.py",
        "if finished or self._chunks[index] >= CHUNKS:",
        "if True:",
        (
            "tests/fusion/inter_stage/test_inter_policy.py::test_an_instance_is_looked_at_when_its_prospects_may_have_changed",
        ),
    ),
    Mutant(
        "a sample that finished changes no prospects",
        "fuse_jax/fusion/inter_stage/lateness.py",
        "if finished or self._chunks[index] >= CHUNKS:",
        "if self._chunks[index] >= CHUNKS:",
        (
            "tests/fusion/inter_stage/test_inter_policy.py::test_an_instance_is_looked_at_when_its_prospects_may_have_changed",
        ),
    ),
    Mutant(
        "calls that dispatch count as the host's work around them",
        "fuse_jax/fusion/inter_stage/stopwatch.py",
        "watch.running, watch.since = self._before.pop(), now",
        "watch.running = self._before.pop()",
        ("tests/fusion/inter_stage/test_overhead.py::test_a_watch_runs_for_one_thing_at_a_time",),
    ),
    Mutant(
        "what comes back waits behind all others",
        "fuse_jax/fusion/inter_stage/readiness.py",
        "extendleft(reversed(samples))",
        "extend(samples)",
        ("tests/fusion/inter_stage/test_readiness.py::test_what_is_given_back_comes_first_again",),
    ),
]

INTRA_STAGE = [
    Mutant(
        "what a stage does not want is computed all the same",
        "fuse_jax/fusion/intra_stage/control.py",
        "carried, read, _ = lax.optimization_barrier((carried, given, number))",
        "read = given",
        (
            "tests/fusion/intra_stage/test_stages.py::test_what_is_only_read_is_not_computed_before_it_is_known_to_be_wanted",
        ),
    ),
    Mutant(
        "every stage computes the head",
        "fuse_jax/fusion/intra_stage/stages.py",
        "when(last, loss_part, ends, metrics, dy, given=(y,))",
        "when(last, lambda *s: loss_part(*s, y), ends, metrics, dy)",
        (
            "tests/training/test_pipeline_gradients.py::test_a_device_computes_nothing_that_is_not_its_own",
        ),
    ),
    Mutant(
        "a stage forgets the gradients it had",
        "fuse_jax/fusion/intra_stage/stages.py",
        "Sums(Weights(_add(blocks, by_blocks), ends), metrics)",
        "Sums(Weights(by_blocks, ends), metrics)",
        (
            "tests/fusion/intra_stage/test_dispatch.py::test_two_schedules_give_the_same_bits_close_to_the_serial_path",
        ),
    ),
    Mutant(
        "a tied embedding is counted twice",
        "fuse_jax/fusion/intra_stage/stages.py",
        ".add(dx.astype(table.dtype))",
        ".add(2 * dx.astype(table.dtype))",
        ("tests/fusion/intra_stage/test_stages.py::test_stages_give_the_whole_models_gradient",),
    ),
    Mutant(
        "each stage's gradient is clipped by itself",
        "fuse_jax/fusion/intra_stage/executor.py",
        "lambda leaf: leaf.sum(axis=0), ends)",
        "lambda leaf: jnp.clip(leaf, -0.01, 0.01).sum(axis=0), ends)",
        (
            "tests/fusion/intra_stage/test_dispatch.py::test_two_schedules_give_the_same_bits_close_to_the_serial_path",
        ),
    ),
    Mutant(
        "a slot is dealt again in the step that still reads it",
        "fuse_jax/fusion/intra_stage/tables.py",
        "if until < first]",
        "if until <= first]",
        ("tests/fusion/intra_stage/test_tables.py::test_every_task_runs_once_on_its_own_messages",),
    ),
    Mutant(
        "a device runs its tasks in the order of their ids",
        "fuse_jax/fusion/intra_stage/tables.py",
        "for at, task in enumerate(row)}",
        "for at, task in enumerate(sorted(row))}",
        ("tests/fusion/intra_stage/test_tables.py::test_every_task_runs_once_on_its_own_messages",),
    ),
    Mutant(
        "empty micro-batches are run",
        "fuse_jax/fusion/intra_stage/tables.py",
        "[[task for task in row if self.place(task)[0] >= 0] for row in orders]",
        "[list(row) for row in orders]",
        (
            "tests/fusion/intra_stage/test_tables.py::test_a_model_alone_and_empty_micro_batches_in_the_middle",
        ),
    ),
    Mutant(
        "a device that waits is blamed",
        "fuse_jax/fusion/intra_stage/flight.py",
        'key=lambda p: (p.state == "running" and p.task >= 0, p.seconds)',
        "key=lambda p: p.seconds",
        (
            "tests/fusion/intra_stage/test_flight.py::test_a_device_that_waits_for_another_is_not_blamed",
        ),
    ),
    Mutant(
        "a device that has no task yet is blamed",
        "fuse_jax/fusion/intra_stage/flight.py",
        'p.state == "running" and p.task >= 0',
        'p.state == "running"',
        (
            "tests/fusion/intra_stage/test_flight.py::test_a_device_that_has_no_task_yet_is_not_blamed",
        ),
    ),
    Mutant(
        "a task that never ends leaves a process that never ends",
        "fuse_jax/fusion/intra_stage/flight.py",
        'leave(f"{STEP_FAILED} in {name}", f"{reason}, and {hung} does not come back")',
        "break",
        (
            "tests/fusion/intra_stage/test_flight.py::test_a_dispatched_task_that_never_ends_ends_the_process",
        ),
    ),
    Mutant(
        "pair is planned as if all its devices waited, and ring as if two did",
        "fuse_jax/training/pipeline_plan.py",
        '"pair": "rendezvous",\n    "ring": "lockstep",',
        '"pair": "lockstep",\n    "ring": "rendezvous",',
        (
            "tests/fusion/intra_stage/test_pipeline_transport.py::test_a_transport_is_planned_as_it_waits",
        ),
    ),
    Mutant(
        "equals are taken in the order of what is available",
        "fuse_jax/training/pipeline_plan.py",
        "[n for n in COSTS if not available[n]]",
        "[n for n in available if not available[n]]",
        (
            "tests/training/test_pipeline_plan.py::test_equals_are_taken_in_the_order_of_preference_and_said_to_be_equal",
        ),
    ),
    Mutant(
        "an update that ends in its call is not timed",
        "fuse_jax/training/pipeline_step.py",
        "if started is not None and flight.ended():",
        "if started is None and flight.ended():",
        (
            "tests/training/test_pipeline_in_flight.py::test_an_update_that_ends_in_its_call_took_as_long_as_that",
        ),
    ),
]

MUTANTS = [*RL, *ROLLOUT, *SCORING, *TRAINING, *INTER_STAGE, *INTRA_STAGE]
