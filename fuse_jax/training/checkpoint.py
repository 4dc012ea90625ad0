"""Everything a resumed run needs, saved as one: asynchronous, atomic, the newest few kept.

A save holds `arrays` (a pytree of device arrays: parameters, optimiser states, counters, running
moments) and `host` (JSON: data cursor, iteration, controller, history). Orbax writes to a temporary
directory and renames it, so a process killed during a save leaves the previous one usable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read; the message names it and what to do."""


class Checkpoints:
    """Numbered saves under `directory`, the newest `keep` of them."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory = Path(directory).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """Number of the newest finished save, or None."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: Any, host: dict[str, Any]) -> None:
        """Start saving; device arrays are copied before this returns, so they may be donated."""
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host)
            ),
        )
        if not saved:
            raise CheckpointError(
                f"{self.directory}: save {step} was not made, because {self.latest()} is there"
            )

    def forget_after(self, step: int) -> None:
        """Delete saves that are newer than `step`: a resumed run will make them again."""
        for newer in [found for found in self._manager.all_steps() if found > step]:
            self._manager.delete(newer)

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """The save `step` (newest if None), laid out as the arrays (or structs) `like` are."""
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"{self.directory}: no finished checkpoint here")
        abstract = jax.tree.map(_abstract, like)
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore()
                ),
            )
        except (ValueError, KeyError, FileNotFoundError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"{self.directory}/{step}: does not fit this run ({reason}); it was written with "
                "another model, optimiser or version: use a new --workdir"
            ) from error
        except Exception as error:  # orbax raises no kind of its own for what it cannot read
            others = [found for found in self._manager.all_steps() if found != step]
            raise CheckpointError(
                f"{self.directory}/{step}: damaged ({str(error)[:200]}): delete that directory"
                + (f" and resume from save {max(others)}" if others else ": no other save is left")
            ) from error
        return step, restored["arrays"], restored["host"]

    def wait(self) -> None:
        """Block until every started save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish what was started and let go of the directory."""
        self._manager.wait_until_finished()
        self._manager.close()


def read_part(directory: Path, like: Any, step: int | None = None) -> tuple[int, Any]:
    """Of the save `step` (newest if None) under `directory`, the arrays in `like` and no others.

    `like`: a pytree of dicts and structs with shardings, part of what was saved. Writes nothing.
    """
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(Path(directory).absolute(), options=options) as manager:
        saved = sorted(manager.all_steps())
        if not saved:
            raise CheckpointError(f"{directory}: no finished checkpoint here")
        step = saved[-1] if step is None else step
        if step not in saved:
            raise CheckpointError(f"{directory}: no checkpoint {step} here, only {saved}")
        arrays = ocp.args.PyTreeRestore(
            item=like,
            restore_args=ocp.checkpoint_utils.construct_restore_args(like),
            partial_restore=True,
        )
        try:
            restored = manager.restore(step, args=ocp.args.Composite(arrays=arrays))
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(f"{directory}/{step}: unreadable ({error})") from error
    return step, restored["arrays"]


def _abstract(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
