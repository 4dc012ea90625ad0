"""The built-in task: right answers by hand, corruption, the split, the tail, determinism."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse_jax.data.countdown import PAD, STOP, Countdown, Problem
from fuse_jax.data.records import DataError

TASK = Countdown()
SMALL = Countdown(top=12, max_step=3, held_out=40, max_response=16)
LONGER_PROMPTS = Countdown(max_given=4)


def problem_in(task):
    return st.integers(0, len(task.problems()) - 1).map(lambda i: task.problems()[i])


def test_example_by_hand():
    prompt = TASK.prompt_tokens(Problem(start=31, step=7 - 1, floor=3))
    assert TASK.decode(prompt) == "-6 >=3 31"
    assert TASK.decode(TASK.clean(prompt)) == "25 19 13 7"
    assert TASK.clean(prompt) == [27, 21, 15, 9, STOP]
    wide = Countdown(max_step=7)
    assert wide.decode(wide.clean(wide.prompt_tokens(Problem(31, 7, 3)))) == "24 17 10 3"


def test_given_terms_lengthen_the_prompt_and_shorten_the_answer():
    prompt = TASK.prompt_tokens(Problem(start=31, step=6, floor=3, given=2))
    assert TASK.decode(prompt) == "-6 >=3 31 25 19"
    assert TASK.decode(TASK.clean(prompt)) == "13 7"
    lengths = {len(p.tokens) for p in LONGER_PROMPTS.train_prompts()}
    assert lengths == {3, 4, 5, 6, 7}
    assert {len(p.tokens) for p in TASK.train_prompts()} == {3}


@given(problem=problem_in(LONGER_PROMPTS))
def test_clean_is_gold_and_states_its_problem(problem):
    prompt = LONGER_PROMPTS.prompt_tokens(problem)
    clean = LONGER_PROMPTS.clean(prompt)
    assert LONGER_PROMPTS.problem_of(prompt) == problem
    assert LONGER_PROMPTS.gold(prompt, clean) and len(clean) >= 2
    assert not LONGER_PROMPTS.gold(prompt, clean[:-1])  # no stop token: the length cap cut it
    assert not LONGER_PROMPTS.gold(prompt, [*clean, PAD])
    assert not LONGER_PROMPTS.gold(prompt, [])
    said = [token - 2 for token in clean[:-1]]
    last_given = problem.start - problem.given * problem.step
    assert np.all(np.diff([last_given, *said]) == -problem.step)
    assert said[-1] >= problem.floor > said[-1] - problem.step


@given(problem=problem_in(TASK), seed=st.integers(0, 2**31))
def test_corrupted_is_never_right_and_always_fits(problem, seed):
    prompt = TASK.prompt_tokens(problem)
    for task in (TASK, LONGER_PROMPTS):
        bad = task.corrupted(prompt, np.random.default_rng(seed))
        assert not task.gold(prompt, bad)
        assert bad[-1] == STOP and STOP not in bad[:-1] and len(bad) <= task.max_response
        assert all(2 <= token < 2 + task.top for token in bad[:-1])


def test_every_kind_of_corruption_occurs():
    prompt = TASK.prompt_tokens(Problem(start=31, step=3, floor=1))
    # No slip is a multiple of 3, so none looks like an omission.
    good, rng = TASK.clean(prompt)[:-1], np.random.default_rng(0)
    bads = [TASK.corrupted(prompt, rng)[:-1] for _ in range(600)]
    early = sum(bad == good[: len(bad)] for bad in bads)
    beyond = sum(bad[: len(good)] == good for bad in bads)
    omitted = sum(len(b) == len(good) - 1 and set(b) < set(good) and b != good[:-1] for b in bads)
    carried = sum(len(b) > 2 and b[:1] != good[:1] and b[1] == b[0] - 3 for b in bads)
    for kind, share in ((early, 1 / 6), (beyond, 1 / 12), (omitted, 1 / 12)):
        assert 0.6 * share < kind / len(bads) < 1.8 * share
    assert carried > 10


def test_demonstrations_are_right_about_half_the_time():
    prompts, rng = TASK.train_prompts(), np.random.default_rng(0)
    made = TASK.demonstrations(4000, rng, prompts=prompts)
    right = np.mean([TASK.gold(d.prompt_tokens, d.response_tokens) for d in made])
    assert abs(right - 0.529) < 0.03  # mean over problems of .86^n · .96^(n-1)
    for task in (TASK, LONGER_PROMPTS):
        clean = task.demonstrations(50, rng, slip=0.0, early_stop=0.0)
        assert all(task.gold(d.prompt_tokens, d.response_tokens) for d in clean)
    stopped = TASK.demonstrations(200, rng, slip=0.0, early_stop=0.99)
    assert np.mean([len(d.response_tokens) == 2 for d in stopped]) > 0.95
    assert all(len(d.response_tokens) <= TASK.max_response for d in made)


def test_preferences():
    pairs = TASK.preferences(300, np.random.default_rng(1))
    for pair in pairs:
        assert TASK.gold(pair.prompt_tokens, pair.chosen_tokens)
        assert not TASK.gold(pair.prompt_tokens, pair.rejected_tokens)
        assert pair.margin == 0.0
    # Mean lengths are alike, so length alone does not tell the sides apart.
    lengths = np.array([[len(p.chosen_tokens), len(p.rejected_tokens)] for p in pairs])
    assert abs(np.diff(lengths.mean(0))[0]) < 1.5


def test_split_is_fixed_disjoint_and_whole():
    train, held_out = TASK.train_prompts(), TASK.held_out_prompts()
    assert (len(train), len(held_out)) == (2031, 500)
    ids = [p.id for p in train] + [p.id for p in held_out]
    assert sorted(ids) == list(range(2531))
    assert [p.id for p in held_out[:4]] == [8, 11, 16, 23]
    assert train[0].text == TASK.decode(train[0].tokens)
    problem = TASK.problem_of(train[9].tokens)
    assert train[9].meta == {"terms": len(problem.terms())}
    assert train[9].id == TASK.problems().index(problem)


def test_lengths_have_a_long_tail():
    lengths = [len(problem.terms()) + 1 for problem in TASK.problems()]
    assert np.percentile(lengths, [50, 90, 99, 100]).tolist() == [4, 12, 26, 32]
    assert round(np.mean(lengths), 1) == 5.9


def test_same_rng_same_records():
    for make in (SMALL.demonstrations, SMALL.preferences):
        first, again, other = (make(20, np.random.default_rng([s, 1])) for s in (3, 3, 4))
        answers = [
            [getattr(r, "response_tokens", getattr(r, "rejected_tokens", None)).tolist() for r in x]
            for x in (first, again, other)
        ]
        assert answers[0] == answers[1] != answers[2]


def test_vocabulary():
    assert TASK.vocab_size == 72 and TASK.stop_token_ids == (1,) and TASK.pad_token_id == 0
    largest = max(max(TASK.prompt_tokens(problem)) for problem in TASK.problems())
    assert largest == TASK.vocab_size - 1
    words = {TASK.decode([token]) for token in range(TASK.vocab_size)}
    assert len(words) == TASK.vocab_size  # every token reads differently (stop as nothing)
    with pytest.raises(DataError, match="token 72 is outside the vocabulary of 72"):
        TASK.decode([72])


def test_errors():
    whole = TASK.prompt_tokens(Problem(9, 2, 1))
    nothing_to_say = TASK.prompt_tokens(Problem(9, 2, 8))
    wrong_term = [*whole, whole[-1] - 1]
    for bad in ([2, 3, 4], whole[:2], whole[:1], [], whole[::-1], nothing_to_say, wrong_term):
        with pytest.raises(DataError, match="not a countdown prompt"):
            TASK.problem_of(bad)
    with pytest.raises(DataError, match="held_out=9999 of 2531"):
        Countdown(held_out=9999)
    with pytest.raises(DataError, match="max_response must be at least top"):
        Countdown(max_response=20)
    with pytest.raises(DataError, match="min_step <= max_step"):
        Countdown(min_step=0)
