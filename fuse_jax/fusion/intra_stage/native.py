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
    """$FUSE_JAX_NATIVE, else ~/.cache/fuse_jax/native."""
    return Path(os.environ.get("FUSE_JAX_NATIVE", Path.home() / ".cache" / "fuse_jax" / "native"))


def compiler() -> str | None:
    """Path of the C++ compiler ($CXX, else g++), or None where there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


@functools.lru_cache(maxsize=4)
def _compiler_version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout


def library_path(source: Path, directory: Path | None = None) -> Path:
    """Where the library of `source` is or will be. Raises NativeError without a compiler."""
    path = compiler()
    if path is None:
        raise NativeError(
            f"no C++ compiler ({os.environ.get('CXX') or 'g++'}) to build {source.name}: install "
            "g++, or name one in $CXX"
        )
    parts = (path, _compiler_version(path), *FLAGS, jaxlib_version.__version__, platform.machine())
    digest = hashlib.sha256("\n".join(parts).encode() + source.read_bytes()).hexdigest()[:24]
    return (directory or default_directory()) / f"{source.stem}-{digest}.so"


def build(source: Path, directory: Path | None = None) -> Path:
    """The library of `source`, compiled if it is not there yet.

    Processes that build at once each compile to a file of their own; the rename is atomic, so
    none ever loads half a library.

    Raises:
      NativeError: there is no compiler, or it failed (its messages are in the error).
    """
    library = library_path(source, directory)
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        command = [str(compiler()), *FLAGS, f"-I{jax.ffi.include_dir()}", str(source), "-o"]
        result = subprocess.run([*command, str(made)], capture_output=True, text=True)
        if result.returncode:
            raise NativeError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")
        os.replace(made, library)
    return library


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The loaded library of `source`, built if need be. Raises NativeError as `build` does."""
    try:
        return ctypes.CDLL(str(build(source)))
    except OSError as error:
        raise NativeError(f"the library of {source.name} does not load: {error}") from error


def register(library: ctypes.CDLL, targets: dict[str, str]) -> None:
    """Make `library`'s handlers known to XLA on CPU: target name -> symbol."""
    for name, symbol in targets.items():
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
