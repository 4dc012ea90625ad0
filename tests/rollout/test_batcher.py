"""Continuous batching: everything comes out once, the same whatever the order, and in time."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fuse_jax.rollout.batcher import Batcher, Request, RolloutStats, generate_samples
from fuse_jax.rollout.warmup import count_compilations, precompile


def generate(setup, engine, ids, **options):
    """Samples by id, and the counts."""
    stats = RolloutStats()
    prompts = [setup.prompts[i] for i in ids]
    made = generate_samples(
        engine,
        setup.params,
        prompts,
        seed_key=options.pop("seed_key", setup.seed_key),
        sample_ids=options.pop("sample_ids", ids),
        stats=stats,
        **options,
    )
    samples = list(made)
    assert len({s.sample_id for s in samples}) == len(samples) == len(ids)
    return {s.sample_id: s for s in samples}, stats


def assert_same(left, right):
    assert left.keys() == right.keys()
    for i, sample in left.items():
        for name in ("prompt_tokens", "response_tokens", "log_probs", "gaps"):
            np.testing.assert_array_equal(
                getattr(sample, name), getattr(right[i], name), err_msg=f"{name} of {i}"
            )
        assert sample.truncated == right[i].truncated


@pytest.fixture(scope="module")
def all_samples(setup):
    return generate(setup, setup.engine, list(range(len(setup.prompts))))


def test_every_prompt_comes_out_once_with_consistent_arrays(setup, all_samples):
    samples, stats = all_samples
    assert sorted(samples) == list(range(len(setup.prompts)))
    for i, sample in samples.items():
        np.testing.assert_array_equal(sample.prompt_tokens, setup.prompts[i])
        length = len(sample.response_tokens)
        assert 1 <= length <= 50 and len(sample.log_probs) == len(sample.gaps) == length
        assert sample.response_tokens.dtype == np.int32 and sample.log_probs.dtype == np.float32
        assert sample.response_tokens.max() < 37 and (sample.log_probs < 0).all()
        stops = np.isin(sample.response_tokens, (3, 11))
        assert not stops[:-1].any()
        assert sample.truncated == (not stops[-1])
        assert not sample.truncated or length == 50
    lengths = [len(s.response_tokens) for s in samples.values()]
    assert stats.generated_tokens == sum(lengths) and stats.samples == len(samples)
    assert stats.occupied_slot_steps == sum(lengths) - len(lengths)  # the first is prefill's
    assert stats.truncated == sum(s.truncated for s in samples.values())
    assert stats.prompt_tokens == sum(map(len, setup.prompts))
    assert stats.slot_steps == 8 * stats.decode_steps
    assert len(set(lengths)) > 5 and max(lengths) > 16


def test_order_of_arrival_changes_nothing(setup, all_samples):
    ids = np.random.default_rng(2).permutation(len(setup.prompts)).tolist()
    shuffled, _ = generate(setup, setup.engine, ids)
    assert_same(all_samples[0], shuffled)


def test_fewer_prompts_than_slots_and_one_prompt(setup, all_samples):
    for ids in ([2, 7, 13], [9]):
        few, stats = generate(setup, setup.engine, ids)
        assert_same({i: all_samples[0][i] for i in ids}, few)
        assert stats.prefill_rows == len(ids)
    assert generate(setup, setup.engine, [])[0] == {}


def test_seeds_and_ids_give_other_samples_and_the_same_again(setup, all_samples):
    ids = list(range(8))
    other, _ = generate(setup, setup.engine, ids, seed_key=jax.random.key(6))
    different = [
        not np.array_equal(other[i].response_tokens, all_samples[0][i].response_tokens) for i in ids
    ]
    assert sum(different) >= 6
    prompts = [setup.prompts[0]] * 4
    twins = list(generate_samples(setup.engine, setup.params, prompts, seed_key=setup.seed_key))
    assert len({s.response_tokens.tobytes() for s in twins}) == 4


def test_all_at_the_cap_and_all_of_length_one(setup, uncapped):
    ids = list(range(12))
    capped, stats = generate(setup, uncapped, ids, max_new_tokens=10)
    assert all(len(s.response_tokens) == 10 and s.truncated for s in capped.values())
    assert stats.truncated == 12
    ones, stats = generate(setup, uncapped, ids, max_new_tokens=1)
    assert all(len(s.response_tokens) == 1 for s in ones.values())
    assert stats.decode_steps == 0
    for i in ids:
        assert ones[i].response_tokens[0] == capped[i].response_tokens[0]


def test_a_stop_token_drawn_first_is_a_response_of_one_token(setup):
    prompts = [setup.prompts[0]] * 64
    draw = {"seed_key": setup.seed_key, "stats": (stats := RolloutStats())}
    ones = list(generate_samples(setup.engine, setup.params, prompts, max_new_tokens=1, **draw))
    stopped = {s.sample_id for s in ones if s.response_tokens[0] in (3, 11)}
    assert 1 <= len(stopped) < 20
    assert all(s.truncated == (s.sample_id not in stopped) for s in ones)
    assert stats.decode_steps == 0
    free = list(generate_samples(setup.engine, setup.params, prompts, **draw))
    assert {s.sample_id for s in free if len(s.response_tokens) == 1} == stopped


def test_a_shorter_cap_cuts_the_same_response(setup, uncapped):
    caps = [1 + 5 * i for i in range(10)]
    cut, _ = generate(setup, uncapped, list(range(10)), max_new_tokens=caps)
    whole, _ = generate(setup, uncapped, list(range(10)))
    for i, cap in enumerate(caps):
        assert len(cut[i].response_tokens) == cap
        np.testing.assert_array_equal(cut[i].response_tokens, whole[i].response_tokens[:cap])
        np.testing.assert_array_equal(cut[i].log_probs, whole[i].log_probs[:cap])


def test_a_finished_slot_is_refilled_before_the_next_chunk(setup, uncapped):
    """One response of 17 beside 25 of 5: seven slots turn over every chunk, four times."""
    ids = list(range(26))
    _, stats = generate(setup, uncapped, ids, max_new_tokens=[17] + [5] * 25)
    assert stats.decode_steps == 16
    # Two buckets: at most one group of each has padding rows.
    assert stats.prefill_padding_rows <= 2 * 7
    assert stats.prefill_rows == 26


def test_samples_come_out_while_others_still_run(setup, uncapped):
    caps = [49, 5, 49, 5]
    made = generate_samples(
        uncapped,
        setup.params,
        setup.prompts[:4],
        seed_key=setup.seed_key,
        max_new_tokens=caps,
        stats=(stats := RolloutStats()),
    )
    first = next(made)
    assert first.sample_id in (1, 3) and stats.decode_steps == 4
    assert [s.sample_id for s in made][1:] == [0, 2]


def test_nothing_compiles_after_precompile(setup, single_steps):
    engine = single_steps
    compiled = precompile(engine, setup.params, setup.seed_key, migration=True)
    shapes = list(engine.shapes(migration=True))
    assert compiled.count == len(shapes) == len(set(shapes))
    with count_compilations() as late:
        generate(setup, engine, [0, 1], max_new_tokens=3)
        # The longest prompts and the longest responses come last.
        generate(setup, engine, list(range(20)), max_new_tokens=[50 - i for i in range(20)])
        _migrate_everything(setup, engine, engine)
        bound = jax.device_put(setup.params, jax.devices()[0])  # as an update step returns them
        generate(setup._replace(params=bound), engine, [2], max_new_tokens=5)
    assert late.count == 0


def _migrate_everything(setup, source_engine, target_engine):
    """Run 8 samples, move each slot to another batcher after two chunks, finish there."""
    caps = [50, 30, 20, 7, 44, 50, 13, 25, 40]
    source = Batcher(source_engine, setup.params, setup.seed_key)
    target = Batcher(target_engine, setup.params, setup.seed_key)
    source.submit(Request(i, setup.prompts[i], caps[i], {"row": i}) for i in range(8))
    target.submit([Request(8, setup.prompts[8], caps[8], {"row": 8})])
    target.launch()
    samples = target.collect()
    for _ in range(2):
        source.launch()
        samples += source.collect()
    live = sorted(source.live)
    while live:
        room = 7 - len(target.live)
        some, live = live[: min(4, room)], live[min(4, room) :]
        if some:
            target.attach(*source.detach(some))
        target.launch()
        samples += target.collect()
    assert source.unfinished == 0 and not source.launch()
    assert np.asarray(source.state.done).all()
    samples += target.run()
    assert all(s.meta["row"] == s.sample_id for s in samples)
    return {s.sample_id: s for s in samples}


def test_migrated_samples_are_bit_equal(setup, uncapped, elsewhere):
    moved = _migrate_everything(setup, uncapped, elsewhere)
    caps = [len(moved[i].response_tokens) for i in range(9)]
    assert caps == [50, 30, 20, 7, 44, 50, 13, 25, 40]
    assert_same(generate(setup, uncapped, list(range(9)), max_new_tokens=caps)[0], moved)


def test_detaching_is_refused_while_tokens_are_unread(setup):
    batcher = Batcher(setup.engine, setup.params, setup.seed_key)
    batcher.submit([Request(0, setup.prompts[0], 50)])
    batcher.launch()
    with pytest.raises(RuntimeError, match="unread"):
        batcher.detach([0])
    batcher.collect()
    with pytest.raises(ValueError, match=r"\[5\]"):
        batcher.detach([5])


def test_what_cannot_be_held_is_refused_before_anything_runs(setup):
    def start(prompts, **options):
        generate_samples(setup.engine, setup.params, prompts, seed_key=setup.seed_key, **options)

    ok = [np.array([1, 2])] * 2
    with pytest.raises(ValueError, match="max_prompt_length"):
        start([np.arange(21)])
    with pytest.raises(ValueError, match="max_prompt_length"):
        start([np.array([], np.int32)])
    with pytest.raises(ValueError, match="max_new_tokens=50"):
        start(ok, max_new_tokens=51)
    with pytest.raises(ValueError, match="distinct"):
        start(ok, sample_ids=[4, 4])
    with pytest.raises(ValueError, match="sample_id=-1"):
        start(ok, sample_ids=[-1, 0])
