"""The table of what is due: nothing lost, nothing twice."""

import pytest

from fuse_jax.fusion.inter_stage.readiness import Readiness


def table() -> Readiness:
    made = Readiness(4, ("ref_log_probs", "values"), 2)
    for sample, bucket in ((2, 0), (0, 0), (1, 1), (3, 0)):
        made.finish(sample, bucket)
    return made


def test_samples_are_taken_in_the_order_they_finished():
    made = table()
    assert made.due == {"ref_log_probs": [3, 1], "values": [3, 1]}
    assert made.take("values", 0, 2) == (2, 0)
    assert made.due == {"ref_log_probs": [3, 1], "values": [1, 1]}
    assert made.take("values", 0, 2) == (3,)


def test_what_is_given_back_comes_first_again():
    made = table()
    made.give_back("values", 0, made.take("values", 0, 2))
    assert made.due["values"] == [3, 1]
    assert made.take("values", 0, 3) == (2, 0, 3)


def test_done_when_every_column_of_every_sample_is():
    made = table()
    for column in ("ref_log_probs", "values"):
        for bucket in (0, 1):
            assert not made.done
            made.complete(column, made.take(column, bucket, 4))
    assert made.done


def test_nothing_is_finished_or_completed_twice():
    made = table()
    with pytest.raises(RuntimeError, match="should be generating"):
        made.finish(1, 1)
    taken = made.take("values", 1, 1)
    made.complete("values", taken)
    with pytest.raises(RuntimeError, match="should be dispatched"):
        made.complete("values", taken)
    with pytest.raises(RuntimeError, match="should be dispatched"):
        made.give_back("ref_log_probs", 1, (1,))
