"""Rows from files of every kind, and the errors that name file and line."""

import builtins
import gzip
import json
from pathlib import Path

import pytest

from fuse_jax.data.files import find_files, read_rows
from fuse_jax.data.records import DataError

ROWS = [{"prompt": "one", "n": 1}, {"prompt": "zwei – zwei", "n": 2}, {"prompt": "3", "n": None}]


def write(path, rows=ROWS):
    name = path.name
    if name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    text = json.dumps(rows) if ".json" in name and ".jsonl" not in name else lines
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet"])
def test_every_kind_gives_the_same_rows(tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    rows = list(read_rows(write(tmp_path / name)))
    assert [row.fields for row in rows] == ROWS
    assert rows[1].where.startswith(str(tmp_path / name) + ":") and rows[1].where.endswith("2")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_blank_lines_and_byte_order_mark(tmp_path, name):
    data = b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": 2}'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    rows = [(row.where[-2:], row.fields["a"]) for row in read_rows(tmp_path / name)]
    assert rows == [(":1", 1), (":4", 2)]


def test_directories_globs_and_lists_are_sorted(tmp_path, monkeypatch):
    for name in ("b.jsonl", "a.json", "deep/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name)
    (tmp_path / "LICENSE").write_text("words")
    listed = sorted(tmp_path.rglob("*"), reverse=True)
    monkeypatch.setattr(Path, "rglob", lambda *_: iter(listed))  # as another file system may
    names = [f.name for f in find_files(tmp_path)]
    assert names == ["a.json", "b.jsonl", "c.jsonl"]
    assert [f.name for f in find_files(str(tmp_path / "**" / "*.jsonl"))] == ["b.jsonl", "c.jsonl"]
    both = [tmp_path / "deep" / "c.jsonl", tmp_path / "a.json"]
    assert find_files(both) == both  # entries keep their order
    assert len(list(read_rows(both))) == 6


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"a": 1}\n{"a": \n', r"bad\.jsonl:2: not JSON"),
        (b'{"a": 1}\n[1, 2]\n', r"bad\.jsonl:2: expected an object with fields, got a list"),
        (b'{"a": "\xff\xfe"}\n', r"bad\.jsonl: unreadable"),
    ],
)
def test_malformed_jsonl(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / "bad.jsonl"))


def test_damaged_compressed_files(tmp_path):
    whole = write(tmp_path / "a.jsonl.gz", ROWS * 200).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no gzip at all"):
        (tmp_path / "a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.jsonl\.gz: unreadable"):
            list(read_rows(tmp_path / "a.jsonl.gz"))


def test_malformed_json_and_parquet(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}\n{"a": 2}')
    with pytest.raises(DataError, match=r"a\.json:2: not JSON .*one object a line"):
        list(read_rows(tmp_path / "a.json"))
    (tmp_path / "a.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match="expected a list of objects at the top, got an object"):
        list(read_rows(tmp_path / "a.json"))
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match="not a readable parquet file"):
        list(read_rows(tmp_path / "a.parquet"))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "a.parquet").write_text("")
    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        list(read_rows(tmp_path / "a.parquet"))


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(DataError, match="no file at"):
        find_files(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="no file at"):
        find_files(str(tmp_path / "*.jsonl"))
    with pytest.raises(DataError, match="has no data file in it"):
        find_files(tmp_path)
    with pytest.raises(DataError, match="no data path given"):
        find_files([])
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(DataError, match=r"a\.csv: unknown kind of file; known suffixes: \.jsonl"):
        find_files(tmp_path / "a.csv")
    file = write(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="is named twice"):
        find_files([file, tmp_path])
