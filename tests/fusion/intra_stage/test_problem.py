"""Every kind of bad problem gets its named error; the page's arithmetic is what the arrays hold."""

import numpy as np
import pytest

from fuse_jax.fusion.intra_stage import problem as pb
from fuse_jax.fusion.intra_stage.graph import build_graph, reverse
from fuse_jax.fusion.intra_stage.problem import Problem


def content(**changes):
    """A small valid problem; keys as actor__stages=3."""
    plain = {
        "actor": {
            "stages": 4,
            "micro_batches": 4,
            "forward": 5,
            "backward": 10,
            "activation": 1.95,
        },
        "critic": {"stages": 2, "micro_batches": 2, "forward": 4, "backward": 8, "activation": 2},
    }
    for key, value in changes.items():
        *where, last = key.split("__")
        target = plain
        for part in where:
            target = target[part]
        target[last] = value
    return plain


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"devices": 6}, pb.DivisibilityError, "actor.stages=4"),
        ({"actor__stages": 0}, pb.CountError, "stages=0"),
        ({"actor__stages": 2.5}, pb.CountError, "stages"),
        ({"actor__chunks": 0}, pb.CountError, "chunks"),
        ({"actor__micro_batches": -1}, pb.CountError, "micro_batches"),
        ({"actor__micro_batches": 0, "critic__micro_batches": 0}, pb.CountError, "nothing"),
        ({"actor__forward": [5, 5, 5]}, pb.TimeError, "3 values"),
        ({"actor__forward": -1}, pb.TimeError, "forward"),
        ({"actor__backward": float("nan")}, pb.TimeError, "backward"),
        ({"critic__lag": float("inf")}, pb.TimeError, "lag"),
        ({"critic__tail": "long"}, pb.TimeError, "tail"),
        ({"actor__weight_grad": [1, 2]}, pb.TimeError, "weight_grad"),
        ({"actor__activation": -2}, pb.ActivationError, "activation"),
        ({"actor__lengths": [1, 2, 3]}, pb.LengthsError, "micro_batches=4"),
        ({"actor__lengths": [1, 2, 3, -4]}, pb.LengthsError, "-4"),
        ({"critic__lengths": [[1, 2], [1, 2], [2, 2]]}, pb.LengthsError, "2 replicas"),
        ({"actor__direction": "left"}, pb.LayoutError, "direction"),
        ({"actor__placement": "zigzag"}, pb.LayoutError, "placement"),
        ({"memory_cap": 1.99}, pb.MemoryCapError, "critic on device"),
        ({"memory_cap": -1}, pb.MemoryCapError, "memory_cap"),
        ({"actor__colour": 1}, pb.UnknownKeyError, "colour"),
        ({"speed": 1}, pb.UnknownKeyError, "speed"),
    ],
)
def test_bad_problems_are_named(changes, error, words):
    with pytest.raises(error, match=words):
        Problem.from_dict(content(**changes))


def test_missing_keys_are_named():
    with pytest.raises(pb.UnknownKeyError, match="critic"):
        Problem.from_dict({"actor": content()["actor"]})
    plain = content()
    del plain["actor"]["forward"]
    with pytest.raises(pb.UnknownKeyError, match="forward"):
        Problem.from_dict(plain)


def test_json_round_trip_keeps_identity_and_digest():
    problem = Problem.from_dict(content(memory_cap=8.0, critic__lengths=[[1, 2], [0, 1.5]]))
    again = Problem.from_json(problem.to_json())
    assert again == problem
    assert again.digest == problem.digest
    assert Problem.from_dict(content(name="x")).digest == Problem.from_dict(content()).digest
    assert Problem.from_dict(content(actor__lag=1)).digest != Problem.from_dict(content()).digest


def test_numpy_values_are_taken():
    problem = Problem.from_dict(content(actor__forward=np.full(4, 5), actor__stages=np.int64(4)))
    assert problem == Problem.from_dict(content())


def test_layout_of_replicas_and_directions():
    graph = build_graph(Problem.from_dict(content()))
    critic_first = np.flatnonzero((graph.model == 1) & (graph.stage == 0) & (graph.kind == 0))
    assert set(zip(graph.replica[critic_first], graph.device[critic_first])) == {(0, 1), (1, 3)}
    actor = np.flatnonzero((graph.model == 0) & (graph.kind == 0))
    assert (graph.device[actor] == graph.stage[actor]).all()


def test_vee_and_loop_placement():
    for placement, expected in (
        ("loop", [0, 1, 2, 3, 0, 1, 2, 3]),
        ("vee", [0, 1, 2, 3, 3, 2, 1, 0]),
    ):
        problem = Problem.from_dict(content(actor__chunks=2, actor__placement=placement))
        assert [problem.actor.device(0, g) for g in range(8)] == expected
        graph = build_graph(problem)
        turn = np.flatnonzero((graph.model == 0) & (graph.stage == 4) & (graph.kind == 0))
        assert (graph.device[turn] == expected[4]).all()


def test_durations_lags_memory_and_extras():
    problem = Problem.from_dict(
        content(
            actor__lengths=[1, 0, 0.5, 2],
            actor__lag=0.25,
            actor__weight_grad=3,
            actor__first_extra=[1, 2],
            actor__last_extra=[0, 0, 7],
            actor__tail=4,
        )
    )
    graph = build_graph(problem)
    named = {
        (graph.stage[t], graph.kind[t], graph.micro_batch[t]): t
        for t in np.flatnonzero(graph.model == 0)
    }
    assert graph.duration[named[0, 0, 2]] == 3000
    assert graph.duration[named[0, 1, 3]] == 24000
    assert graph.duration[named[3, 2, 0]] == 10000
    assert graph.duration[named[2, 0, 1]] == 0
    assert graph.take[named[1, 0, 3]] == 3_900_000
    assert graph.give[named[1, 2, 3]] == 3_900_000
    assert graph.give[named[1, 1, 3]] == 0
    assert graph.tail[named[1, 2, 0]] == 4000
    assert graph.tail[named[1, 1, 0]] == 0
    assert graph.pred[named[2, 0, 0], 0] == named[1, 0, 0]
    assert graph.pred_lag[named[2, 0, 0], 0] == 250
    assert graph.pred[named[3, 1, 0], 0] == named[3, 0, 0]
    assert graph.pred_lag[named[3, 1, 0], 0] == 0
    assert graph.pred[named[1, 2, 0], 0] == named[1, 1, 0]


def test_reversed_graph_swaps_edges_and_memory():
    graph = build_graph(Problem.from_dict(content(actor__weight_grad=3)))
    back = reverse(graph)
    assert (back.pred == graph.succ).all()
    assert (back.take == graph.give).all()
    for cls, count in enumerate(graph.size):
        assert (back.ids[:, cls, :count] == graph.ids[:, cls, :count][:, ::-1]).all()
    for task, before in enumerate(graph.pred[:, 0]):
        assert before < 0 or task in graph.succ[before]
