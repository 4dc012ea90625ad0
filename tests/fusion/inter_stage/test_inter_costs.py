"""Cost tables, length histories, fitting and figures, by hand."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse_jax.buckets import Bucket
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable, Geometry
from fuse_jax.fusion.inter_stage.fitting import DecodeTime, fit_costs, fit_decode
from fuse_jax.fusion.inter_stage.lengths import LengthHistory, PromptLengths
from fuse_jax.fusion.inter_stage.spans import Span, figures

TABLE = DecodeTable((2, 4), (10, 20), ((1.0, 2.0), (3.0, 6.0)))


@pytest.mark.parametrize(
    ("live", "context", "ms"),
    [
        (2, 10, 1.0),
        (2, 15, 1.5),
        (3, 10, 2.0),
        (3, 15, 3.0),
        (4, 30, 9.0),  # linear beyond the last context
        (1, 5, 1.0),  # constant below the first
        (9, 20, 6.0),  # constant beyond the last live count
    ],
)
def test_decode_table(live, context, ms):
    assert TABLE(live, context) == pytest.approx(ms)


def test_saturation():
    table = DecodeTable((1, 8, 16), (100,), ((8.0,), (10.0,), (20.0,)))
    assert table.saturation(16) == 8  # 10 ms are 1.25 x 8 ms
    assert table.saturation(4) == 4
    assert table.saturation(16, factor=1.0) == 1
    assert DecodeTable((1,), (1,), ((5.0,),)).saturation(32) == 32
    # Half-way between the contexts 8 live slots take 12 ms for one's 9, at the shorter one 8 for 8.
    steep = DecodeTable((1, 8), (0, 100), ((8.0, 10.0), (8.0, 16.0)))
    assert [steep(n, 50) for n in (1, 6)] == [9.0, 9.0 + 3 * 5 / 7]
    assert steep.saturation(8) == 6


def test_moving_costs():
    costs = Costs(TABLE, {8: 3.0, 16: 5.0}, {}, move_ms=1.0, move_token_ms=0.5)
    assert costs.move_by_cache([4, 6]) == 6.0
    assert costs.move_by_prefill([4, 6, 8], rows=2) == 6.0  # three of one bucket: two prefills
    assert costs.move_by_prefill([4, 9], rows=2) == 8.0
    assert costs.move_by_prefill([17], rows=2) == math.inf
    assert [costs.prefill_bucket(n) for n in (1, 8, 9)] == [8, 8, 16]
    with pytest.raises(ValueError, match="17"):
        costs.prefill_bucket(17)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: DecodeTable((2, 1), (1,), ((1.0,), (1.0,))), "live"),
        (lambda: DecodeTable((1,), (), ((),)), "context"),
        (lambda: DecodeTable((1,), (1, 2), ((1.0,),)), "step_ms"),
        (lambda: DecodeTable((1,), (1,), ((0.0,),)), "step_ms"),
        (lambda: DecodeTable((1,), (1,), ((1.0,),), "median"), "statistic"),  # type: ignore
        (lambda: Costs(TABLE, {}, {}), "prefill_ms"),
        (lambda: Costs(TABLE, {8: -1.0}, {}), r"prefill_ms\[8\]"),
        (lambda: Costs(TABLE, {8: 1.0}, {"a": [math.nan]}), "score_ms"),
        (lambda: Costs(TABLE, {8: 1.0}, {}, weights_ms=math.inf), "weights_ms"),
        (lambda: Geometry(0, 1, 1, 1, (Bucket(8, 1),), ("a",)), "instances"),
        (lambda: Geometry(1, 1, 1, 1, (), ("a",)), "buckets"),
        (lambda: Geometry(1, 1, 1, 1, (Bucket(8, 1), Bucket(8, 2)), ("a",)), "buckets"),
        (lambda: Geometry(1, 1, 1, 1, (Bucket(8, 1),), ("a", "a")), "columns"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_costs_must_cover_the_geometry():
    geometry = Geometry(1, 1, 1, 1, (Bucket(8, 1), Bucket(16, 1)), ("a",))
    with pytest.raises(ValueError, match="score_ms"):
        Costs(TABLE, {8: 1.0}, {"a": [1.0]}).check(geometry)
    Costs(TABLE, {8: 1.0}, {"a": [1.0, 2.0]}).check(geometry)


# ------------------------------------------------------------------ lengths


def test_remaining_is_the_mean_of_what_is_left():
    history = LengthHistory((9, 1, 5, 3))
    assert history.remaining(0, 100) == 4.5
    assert history.remaining(3, 100) == 4.0  # 5 and 9
    assert history.remaining(3, 6) == 2.5  # 5, and 9 cut at 6
    assert history.remaining(9, 15) == 3.0  # never seen so long: half way to the cap
    assert LengthHistory().remaining(4, 10) == 3.0


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(0, 60), st.integers(1, 60))
def test_remaining_against_its_definition(lengths, generated, cap):
    longer = [min(length, cap) - generated for length in lengths if length > generated]
    expected = max(np.mean(longer), 0.0) if longer else max((cap - generated) / 2, 0.0)
    assert LengthHistory(tuple(lengths)).remaining(generated, cap) == pytest.approx(expected)


LENGTHS = st.integers(1, 40)


@given(
    st.lists(LENGTHS, max_size=12),
    st.lists(st.integers(0, 45), min_size=1, max_size=6),
    st.one_of(st.integers(0, 50), st.floats(0, 50)),
)
def test_what_is_left_is_counted_from_the_lengths_themselves(known, generated, more):
    cap, history = 48, LengthHistory(tuple(known))
    ends, outlast = [], 0.0
    for age in generated:
        longer = sorted(length for length in known if length > age)
        share = len(generated) / (len(generated) + 1)
        if longer:
            ends.append(longer[min(int(share * len(longer)), len(longer) - 1)] - age)
            later = [length for length in longer if length >= age + max(more - 0.5, 0.5)]
            outlast += len(later) / len(longer)
        else:
            ends.append(share * (cap - age))
            outlast += min(max(1 - more / (cap - age), 0.0), 1.0)
    assert history.longest_remaining(generated, cap) == pytest.approx(max(ends))
    assert history.outlasting(generated, more, cap) == pytest.approx(outlast)


def test_longest_remaining_and_outlasting():
    history = LengthHistory((2, 4, 6, 8))
    assert history.longest_remaining([], 10) == 0.0
    assert history.longest_remaining([0], 10) == 6.0  # the median of four: the upper one
    assert history.longest_remaining([0, 4], 10) == 6.0  # two thirds of four: 6; of two beyond 4: 8
    assert history.longest_remaining([8], 10) == 1.0
    assert LengthHistory().longest_remaining([0, 0, 0], 8) == 6.0
    assert history.outlasting([0, 4], 3, 10) == 0.75 + 0.5
    assert history.outlasting([8], 1, 10) == 0.5
    assert history.outlasting([], 1, 10) == 0.0


def test_history_keeps_a_window():
    assert LengthHistory((1, 2)).extend([3, 4], window=3).lengths == (2, 3, 4)


def test_prompts_asked_again_are_predicted():
    known = PromptLengths()
    assert known.predict(["a", "b"]) == ()
    known.observe(["a", "b"], [10, 20])
    assert known.ratios == ()
    # The mean is 15: (10 + 15) / 2 for the one seen, 15 for the other.
    assert known.predict(["a", "new"]) == (12.5, 15.0)
    known.observe(["a", "new"], [25, 5])
    assert known.ratios == (2.0,)
    assert known.predict(["a"]) == ((35 + 15) / 3,)
    known.observe(["b"] * 3, [1, 2, 3], window=2)
    assert len(known.ratios) == 2


def test_drift():
    assert LengthHistory((1, 2, 3)).drift(LengthHistory((3, 1, 2))) == 0.0
    assert LengthHistory((1, 2)).drift(LengthHistory((3, 4))) == 1.0
    assert LengthHistory((1, 2, 3, 4)).drift(LengthHistory((3, 4))) == 0.5
    assert LengthHistory().drift(LengthHistory((1,))) == 1.0
    assert LengthHistory().drift(LengthHistory()) == 0.0


# ------------------------------------------------------------------ fitting and figures


def test_fitting_finds_the_table_behind_the_times():
    true = DecodeTable((1, 5), (10, 50), ((2.0, 4.0), (3.0, 9.0)))
    times = [
        DecodeTime(live, context, 4, 4 * true(live, context) * noise)
        for live in (1, 5)
        for context in (10, 50)
        for noise in (1.0, 1.0, 7.0)  # a stray slow one each
    ]
    found = fit_decode(times, points=2)
    assert (found.live, found.context) == (true.live, true.context)
    assert found.step_ms == true.step_ms


def test_few_points_are_kept_as_they_were_measured():
    """Three live counts and contexts are what a run measures; not evenly spaced, as here."""
    times = [
        DecodeTime(live, context, 4, 4.0 * live * context)
        for live in (1, 2, 8)
        for context in (100, 133, 1100)
    ]
    found = fit_decode(times)
    assert (found.live, found.context) == ((1, 2, 8), (100, 133, 1100))
    for time in times:
        assert found(time.live, time.context) == pytest.approx(time.ms / time.steps)


def test_fitting_never_says_that_more_is_faster():
    found = fit_decode([DecodeTime(1, 10, 1, 5.0), DecodeTime(4, 10, 1, 3.0)])
    assert found(4, 10) >= found(1, 10) >= 3.0
    sparse = fit_decode([DecodeTime(1, 10, 1, 5.0), DecodeTime(4, 40, 2, 12.0)])
    assert sparse(4, 40) == 6.0 and sparse(1, 10) == 5.0


def test_fitting_costs():
    costs = fit_costs(
        [DecodeTime(2, 8, 0, 9.0), DecodeTime(2, 8, 2, 6.0)],
        {8: [2.0, 1.0, 30.0], 16: []},
        {"a": [[4.0], [], [8.0, 8.0]]},
        move=[3.0],
        host=[0.5],
    )
    assert costs.decode(2, 8) == 3.0
    assert costs.prefill_ms == {8: 2.0, 16: 4.0}
    assert costs.score_ms == {"a": (4.0, 4.0, 8.0)}
    assert (costs.move_ms, costs.weights_ms, costs.host_ms) == (3.0, 0.0, 0.5)
    with pytest.raises(ValueError, match="decode"):
        fit_costs([], {8: [1.0]}, {})
    with pytest.raises(ValueError, match="score"):
        fit_costs([DecodeTime(1, 1, 1, 1.0)], {8: [1.0]}, {"a": [[]]})


def test_figures_of_a_timeline():
    spans = [
        Span(0, "prefill", 0.0, 1.0, 1),
        Span(0, "decode", 1.0, 5.0, 1),
        Span(1, "decode", 0.0, 3.0, 1),
        Span(1, "weights", 0.0, 9.0),
        Span(1, "score", 3.0, 7.0, 2, "a"),
        Span(0, "decode", 7.0, 7.0, 0),  # launched ahead, nothing was left
    ]
    seen = figures(spans, 2)
    assert (seen.total_ms, seen.generation_ms, seen.scoring_hidden) == (7.0, 5.0, 0.5)
    assert seen.utilisation == pytest.approx(12 / 14)
    assert figures([], 2) == (0.0, 0.0, 0.0, 0.0)


def test_no_jax():
    names = "bound choose costs fitting lengths plot policy simulator spans study sweep workload"
    script = ";".join(f"import fuse_jax.fusion.inter_stage.{name}" for name in names.split())
    check = "import sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", f"{script};{check}"]).returncode == 0
