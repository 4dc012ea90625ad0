"""Tensors of a Hugging Face directory, by name: read slice by slice, written in shards.

A file is mapped for the time of one read only. Its pages count as resident while it is mapped, so
a file kept open would in the end be in memory whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
READABLE = ("BF16", "F16", "F32")
Bounds = tuple[tuple[int, int], ...]  # start and stop along every axis


class Stored(NamedTuple):
    """Where a tensor is and what it looks like."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: BF16, F16, F32


def find_tensors(directory: str | Path) -> dict[str, Stored]:
    """Every tensor of `model.safetensors`, or of the files its index names.

    Raises FileNotFoundError if there are none (pickled `.bin` weights are not read), ValueError for
    a file that does not hold what the index says or a dtype other than bfloat16, float16, float32.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory: give a local Hugging Face directory")
    index = directory / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = [name for name in weight_map.values() if Path(name).name != name]
        if outside:
            raise ValueError(f"{index} names a file outside its directory: {outside[0]!r}")
        found: dict[str, Stored] = {}
        for name in sorted(set(weight_map.values())):
            found.update(_tensors_of(directory / name))
        for name, file in weight_map.items():
            if name not in found or found[name].file.name != file:
                raise ValueError(
                    f"tensor {name!r} is not in {directory / file}, where {index} says"
                )
    elif (directory / SINGLE).is_file():
        found = _tensors_of(directory / SINGLE)
    else:
        raise FileNotFoundError(_why_no_weights(directory))
    for name, stored in found.items():
        if stored.dtype not in READABLE:
            raise ValueError(
                f"tensor {name!r} in {stored.file} has dtype {stored.dtype}: only {READABLE} are "
                "read; save the model unquantised"
            )
    return found


def _tensors_of(file: Path) -> dict[str, Stored]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: the directory's index names it")
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Stored(file, tuple(s.get_shape()), s.get_dtype())
                for name, s in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{file} is no valid safetensors file: {error}") from error


def _why_no_weights(directory: Path) -> str:
    pickled = sorted(p.name for p in directory.glob("*.bin"))
    if pickled:
        return (
            f"{directory} holds only pickled weights ({pickled[0]}), which can run code and are "
            "never read: convert them to safetensors where you trust them (load in transformers, "
            "then save_pretrained)"
        )
    return f"{directory} holds neither {SINGLE} nor {INDEX}"


def read(stored: Stored, name: str, bounds: Bounds) -> np.ndarray:
    """The part of tensor `name` between `bounds`, in the dtype of the file; copied, not mapped."""
    with safe_open(stored.file, framework="numpy") as opened:
        return opened.get_slice(name)[tuple(slice(*b) for b in bounds)]


@contextlib.contextmanager
def new_directory(directory: str | Path) -> Iterator[Path]:
    """A directory to fill, which gets its name at the end: it appears whole or not at all.

    Raises FileExistsError if there is something under that name already.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not empty: choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    half_made = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        half_made.chmod(0o755)
        yield half_made
        os.replace(half_made, directory)
    except BaseException:
        shutil.rmtree(half_made, ignore_errors=True)
        raise


class Planned(NamedTuple):
    """A tensor to be written: made only when its file is."""

    name: str
    nbytes: int
    make: Callable[[], np.ndarray]


def write(directory: Path, tensors: Iterable[Planned], max_shard_bytes: int) -> None:
    """Write `tensors` in the given order to files of at most `max_shard_bytes` (or one tensor).

    One file is named `model.safetensors`; several get the usual numbered names and an index.
    """
    groups = _group(list(tensors), max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = SINGLE
        if len(groups) > 1:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # transformers refuses a file that does not say which framework's layout it has.
        save_file({t.name: t.make() for t in group}, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # safetensors makes it readable by its owner alone
        weight_map.update({t.name: file for t in group})
    if len(groups) > 1:
        total = sum(t.nbytes for group in groups for t in group)
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _group(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    groups: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def write_json(path: Path, content: Any) -> None:
    """Indented JSON with a closing newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))
