"""Rows (one dict each) from JSONL, gzip, JSON and parquet files, directories and globs."""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fuse_jax.data.records import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


class Row(NamedTuple):
    """One row and where it stands: `path:line` for JSONL, `path:row n` (from 1) otherwise."""

    where: str
    fields: dict[str, Any]


def find_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Data files of a path, a directory (searched through), a glob, or several of them.

    Sorted within each entry, so row numbers do not depend on the file system. In a directory only
    files with a known suffix count (a LICENSE beside the data is no data).

    Raises:
      DataError: nothing there, no file with a known suffix, or one file named twice.
    """
    entries = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not entries or "" in entries:
        raise DataError("no data path given: name a file, a directory or a glob")
    files = [file for entry in entries for file in _expand(str(entry))]
    twice = sorted({str(f) for f in files if files.count(f) > 1})
    if twice:
        raise DataError(f"{twice[0]} is named twice in {entries}: its rows would count double")
    return files


def _expand(entry: str) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_dir():
        found = sorted(f for f in path.rglob("*") if f.is_file() and f.name.endswith(SUFFIXES))
        if not found:
            raise DataError(f"{path} has no data file in it; known suffixes: {', '.join(SUFFIXES)}")
        return found
    if path.is_file():
        found = [path]
    else:
        found = sorted(Path(f) for f in glob.glob(str(path), recursive=True) if Path(f).is_file())
    if not found:
        raise DataError(f"no file at {path}: check the path (relative to {Path.cwd()})")
    for file in found:
        if not file.name.endswith(SUFFIXES):
            raise DataError(f"{file}: unknown kind of file; known suffixes: {', '.join(SUFFIXES)}")
    return found


def read_rows(paths: str | Path | Iterable[str | Path]) -> Iterator[Row]:
    """Rows of all files in order, read as a stream (JSON lists excepted). Blank lines hold none.

    Raises:
      DataError: naming file and line, for bad JSON, bad UTF-8 or gzip, or a row that is no object.
      ImportError: a parquet file where pyarrow is not installed.
    """
    for file in find_files(paths):
        if file.name.endswith(".parquet"):
            rows = _parquet_rows(file)
        elif file.name.endswith((".json", ".json.gz")):
            rows = _json_rows(file)
        else:
            rows = _jsonl_rows(file)
        for where, row in rows:
            if not isinstance(row, dict):
                raise DataError(f"{where}: expected an object with fields, got {_kind(row)}")
            yield Row(where, row)


def _open(file: Path) -> io.TextIOBase:
    # utf-8-sig: a byte order mark at the start of a file is no part of its first row.
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig")  # type: ignore[return-value]
    return open(file, encoding="utf-8-sig")  # type: ignore[return-value]


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with _open(file) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}:{number}", json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{number}: not JSON ({error.msg}, column {error.colno})") from error
    except (UnicodeDecodeError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{file}: unreadable after line {number} ({error})") from error


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with _open(file) as text:
            rows = json.load(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{error.lineno}: not JSON ({error.msg}); one object a line is called .jsonl"
        ) from error
    except (UnicodeDecodeError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{file}: unreadable ({error})") from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: expected a list of objects at the top, got {_kind(rows)}")
    for number, row in enumerate(rows, 1):
        yield f"{file}:row {number}", row


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"{file}: reading parquet needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}:row {number}", row
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a readable parquet file ({error})") from error


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string"}.get(type(value), repr(value))
