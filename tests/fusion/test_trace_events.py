"""The trace writer: what ui.perfetto.dev needs to draw rows in order."""

import json

import pytest

from fuse_jax.fusion.trace import Trace


def test_rows_and_groups_keep_the_order_of_first_use(tmp_path):
    trace = Trace()
    trace.span("b", "second", "x", 1.0, 2.5, why="because")
    trace.span("a", "first", "y", 0.0, 0.0)
    trace.span("b", "third", "x", 0.0, 1.0)
    trace.counter("a", "memory", 1.5, {"actor": 2.0})
    trace.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert names["process_name", 1, 0] == {"name": "b"}
    assert names["process_name", 2, 0] == {"name": "a"}
    rows = [names["thread_name", *place]["name"] for place in ((1, 1), (2, 2), (1, 3))]
    assert rows == ["second", "first", "third"]
    assert [names["thread_sort_index", 1, tid]["sort_index"] for tid in (1, 3)] == [1, 3]
    first, *_, counter = (e for e in events if e["ph"] != "M")
    assert first == {
        "ph": "X", "pid": 1, "tid": 1, "name": "x", "ts": 1000.0, "dur": 1500.0,
        "args": {"why": "because"},
    }  # fmt: skip
    assert counter == {"ph": "C", "pid": 2, "name": "memory", "ts": 1500.0, "args": {"actor": 2.0}}


def test_boxes_that_touch_touch_in_the_file_too():
    trace = Trace()
    trace.span("g", "r", "x", 0.1, 0.3)
    trace.span("g", "r", "x", 0.3, 0.7)
    first, second = (e for e in trace.to_dict()["traceEvents"] if e["ph"] == "X")
    assert first["ts"] + first["dur"] == second["ts"] == 300.0


def test_a_box_that_ends_before_it_starts_is_refused():
    with pytest.raises(ValueError, match=r"'x' on 'r' ends at 1.0 ms, before its start 2.0"):
        Trace().span("g", "r", "x", 2.0, 1.0)
