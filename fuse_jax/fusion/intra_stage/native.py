"""C++ operations for XLA on CPU, compiled at their first use and kept in a user cache.

A library is named by everything its bits follow from (source, compiler, flags, jaxlib, machine),
so a new version of any of them is compiled anew and an old one is never loaded by mistake.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
from jaxlib import version as jaxlib_version

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread")


class NativeError(RuntimeError):
    """A native library could not be built or loaded; the message says what to do."""


def default_directory() -> Path:
    """$FUSE_JAX_NATIVE, else ~/.cache/fuse_jax/native. Raises NativeError without a home."""
    named = os.environ.get("FUSE_JAX_NATIVE")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "fuse_jax" / "native"
    except RuntimeError as error:
        raise NativeError(f"{error}: set FUSE_JAX_NATIVE to a directory for libraries") from error


def compiler() -> str | None:
    """Path of the C++ compiler ($CXX, else g++), or None where there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def unavailable_because(source: Path) -> str:
    """Why the library of `source` cannot be had here, in one line; empty where it can.

    Builds and loads it, so this is what will happen; tried once a process.
    """
    outcome = _outcome(source, os.environ.get("FUSE_JAX_NATIVE"), os.environ.get("CXX"))
    return str(outcome) if isinstance(outcome, NativeError) else ""


def library_path(source: Path, directory: Path | None = None) -> Path:
    """Where the library of `source` is or will be. Raises NativeError without a compiler."""
    path = compiler()
    if path is None:
        raise NativeError(
            f"no C++ compiler ({os.environ.get('CXX') or 'g++'}) to build {source.name}: install "
            "g++, or name one in CXX"
        )
    parts = (path, _compiler_version(path), *FLAGS, jaxlib_version.__version__, platform.machine())
    digest = hashlib.sha256("\n".join(parts).encode() + source.read_bytes()).hexdigest()[:24]
    return (directory or default_directory()) / f"{source.stem}-{digest}.so"


def build(source: Path, directory: Path | None = None) -> Path:
    """The library of `source`, compiled if it is not there yet.

    Processes that build at once each compile to a file of their own; the rename is atomic, so
    none ever loads half a library.

    Raises:
      NativeError: there is no compiler, or it failed (all it said is a note on the error); or the
        directory cannot be written.
    """
    library = library_path(source, directory)
    try:
        if library.exists():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            _compile(source, made)
            os.replace(made, library)
    except OSError as error:
        raise NativeError(
            f"{source.name} needs a place for its library, and {_cache(library.parent)} cannot be "
            f"written ({error.strerror or error}): set FUSE_JAX_NATIVE to a directory that can"
        ) from error
    return library


def load(source: Path) -> ctypes.CDLL:
    """The loaded library of `source`, built if need be. Raises NativeError as `build` does, and
    where it does not load.
    """
    outcome = _outcome(source, os.environ.get("FUSE_JAX_NATIVE"), os.environ.get("CXX"))
    if isinstance(outcome, NativeError):
        raise NativeError(str(outcome)) from outcome
    return outcome


@functools.cache
def _outcome(source: Path, directory: str | None, cxx: str | None) -> ctypes.CDLL | NativeError:
    """The loaded library or why there is none: a failure is not tried again, for that compiles."""
    del directory, cxx  # what the outcome hangs on besides
    try:
        library = build(source)
        return ctypes.CDLL(str(library))
    except NativeError as error:
        return error
    except OSError as error:
        return NativeError(
            f"the library of {source.name} does not load ({error}): remove it, or set "
            "FUSE_JAX_NATIVE to a directory whose files may be executed"
        )


def _compile(source: Path, made: Path) -> None:
    command = [str(compiler()), *FLAGS, f"-I{jax.ffi.include_dir()}", str(source), "-o", str(made)]
    _run(command, f"compile {source.name}")


@functools.lru_cache(maxsize=4)
def _compiler_version(path: str) -> str:
    return _run([path, "--version"], "tell its version")


def _run(command: list[str], what: str) -> str:
    """What the compiler prints. Raises NativeError."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise _compiler_error(command[0], what, str(error)) from error
    if result.returncode:
        said = result.stderr.strip().splitlines()
        # g++ ends with a picture of the place; the error itself is above it.
        last = [line for line in said if "error" in line] or said or ["it said nothing"]
        error = _compiler_error(command[0], what, f"exit status {result.returncode}; {last[-1]}")
        error.add_note("\n".join([" ".join(command), *said]))
        raise error
    return result.stdout


def _compiler_error(path: str, what: str, why: str) -> NativeError:
    named = os.environ.get("CXX")
    fix = "name another in CXX, or unset it for g++" if named else "name another in CXX"
    name = f"CXX={named}" if named else path
    return NativeError(f"the C++ compiler {name} does not {what} ({why}): {fix}")


def _cache(directory: Path) -> str:
    named = os.environ.get("FUSE_JAX_NATIVE")
    return f"FUSE_JAX_NATIVE={named}" if named and directory == Path(named) else str(directory)


def register(library: ctypes.CDLL, targets: dict[str, str]) -> None:
    """Make `library`'s handlers known to XLA on CPU: target name -> symbol."""
    for name, symbol in targets.items():
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
