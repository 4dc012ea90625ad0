"""The directory that a study or a plan is written to, looked at before the work."""

from __future__ import annotations

import os
from pathlib import Path


class OutputError(ValueError):
    """A directory that cannot be written; the message names the option, the path and the fix."""


def output_directory(path: str | Path, option: str) -> Path:
    """Make a directory and see that files can be written in it. Raises OutputError."""
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError("not writable")
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{option}={path}: {reason}: name a directory to write in") from None
    return directory
