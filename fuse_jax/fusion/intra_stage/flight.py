"""A step that has been dispatched: waiting for its end, and naming the task in which it failed.

Devices of a pipeline wait for each other, so one that fails or hangs stops all. What can be done
then depends on the transport: with the mailbox and with dispatch the step ends in an error, every
device is free again and the next step works. A collective cannot be left once it is entered, nor
can a task that never ends, which would keep the process from ending by itself: then it is ended
(exit status 70), and a training run goes on from its last save with --resume.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import jax

from fuse_jax.fusion.intra_stage import mailbox
from fuse_jax.fusion.intra_stage.schedule import Schedule, Task, task_of

POLL_S = 0.0005
DRAIN_S = 30.0  # what a hung task gets to come back, before the process is ended
EXIT_STATUS = 70  # EX_SOFTWARE
STEP_FAILED = "the pipeline's step failed"


class StepError(RuntimeError):
    """A step that did not end well. `device`: where; `task`: the one that failed or hung there, if
    it is known.
    """

    def __init__(self, device: int, task: Task | None, reason: str) -> None:
        self.device, self.task = device, task
        where = f"in {task}" if task else f"on device {device}, before its first task"
        super().__init__(f"{STEP_FAILED} {where}: {reason}")


class Flight(Protocol):
    """One dispatched step."""

    def wait(self) -> None:
        """Return when all devices have ended it. Raises StepError."""
        ...

    def ended(self) -> bool:
        """Whether there is nothing to wait for any more."""
        ...


class Started(NamedTuple):
    """A task that the host has dispatched, and an array that is there when it has run."""

    task: int
    token: Any


@dataclass
class DispatchFlight:
    """Tasks in the order of their dispatch: each comes after all that it needs."""

    schedule: Schedule
    started: list[Started]
    timeout_s: float

    def wait(self) -> None:
        """See Flight. A failed task spoils those that need it: the first in order is to blame."""
        for task, token in self.started:
            if not ready_within(token, self.timeout_s):
                self._fail(task, f"no end after {self.timeout_s:g} s")
            try:
                token.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                self._fail(task, first_line(error))
        self.started.clear()

    def ended(self) -> bool:
        """See Flight."""
        return all(token.is_ready() for _, token in self.started)

    def _fail(self, task: int, reason: str) -> NoReturn:
        """Let what was dispatched run out, so that the next step finds idle devices."""
        name = task_of(self.schedule.graph, task)
        for other, token in self.started:
            if not ready_within(token, DRAIN_S):
                hung = "it" if other == task else str(task_of(self.schedule.graph, other))
                leave(f"{STEP_FAILED} in {name}", f"{reason}, and {hung} does not come back")
        self.started.clear()
        raise StepError(name.device, name, reason)


@dataclass
class MailboxFlight:
    """outputs: an array of the step that has a part on every device of the mesh."""

    schedule: Schedule
    outputs: jax.Array
    program: mailbox.Program

    def wait(self) -> None:
        """See Flight. A hung device is noticed by those that wait for it, after their timeout."""

        ended: list[float] = []

        def stop_others(place: int, error: Exception) -> None:
            device, lane = divmod(place, self.program.lanes)
            self.program.blame(device, lane, first_line(error))
            ended.append(time.monotonic())

        def give_up(awaited: list[int]) -> None:
            failure = self.program.failure()
            if ended and failure is not None and time.monotonic() > ended[0] + DRAIN_S:
                hung = self._hung(failure, awaited)
                leave(self._where(failure), f"{failure.reason}, and {hung} does not come back")

        errors = settle(self.outputs, stop_others, give_up)
        if not errors:
            return
        failure = self.program.failure()
        assert failure is not None  # set by whoever stopped it
        try:
            self.program.drain(DRAIN_S)
        except mailbox.DrainError as error:
            leave(self._where(failure), f"{failure.reason}; {error}")
        raise StepError(failure.device, named(self.schedule, failure.task), failure.reason)

    def ended(self) -> bool:
        """See Flight."""
        return all_ready(self.outputs)

    def _where(self, failure: mailbox.Failure) -> str:
        task = named(self.schedule, failure.task)
        return f"{STEP_FAILED} " + (f"in {task}" if task else f"on device {failure.device}")

    def _hung(self, failure: mailbox.Failure, awaited: list[int]) -> str:
        """What keeps the step from ending: what failed, or another task, by the mesh's places."""
        if failure.device * self.program.lanes + failure.lane in awaited:
            return "it"
        at = self.program.progress()[awaited[0]]
        return str(named(self.schedule, at.task) or f"device {at.device}")


@dataclass
class CollectiveFlight:
    """The same for a step whose devices meet in collectives.

    program: holds the tasks that devices have begun; None where nothing can note them: then
    timeout_s is that of the whole step, else that in which some device must begin a task.
    """

    schedule: Schedule
    outputs: jax.Array
    program: mailbox.Program | None
    timeout_s: float

    def wait(self) -> None:
        """Return when all devices have ended the step, or end the process, saying where."""

        def leave_for(place: int, error: Exception) -> None:
            leave(self._where(place), first_line(error))

        started = time.monotonic()

        def leave_if_hung(awaited: list[int]) -> None:
            del awaited
            still = time.monotonic() - started
            if self.program is not None:
                still = min(still, *(device.seconds for device in self.program.progress()))
            if still > self.timeout_s:
                leave(self._where(None), f"no device has begun a task for {self.timeout_s:g} s")

        settle(self.outputs, leave_for, leave_if_hung)

    def ended(self) -> bool:
        """See Flight."""
        return all_ready(self.outputs)

    def _where(self, place: int | None) -> str:
        if self.program is None:
            at = "" if place is None else f" on mesh device {place}"
            return f"{STEP_FAILED}{at} (tasks are not noted here)"
        progress = self.program.progress()
        # The device that is in a task the longest holds up the others, which wait for its result.
        # One that has no task yet has entered the step, and is in none.
        slow = max(progress, key=lambda p: (p.state == "running" and p.task >= 0, p.seconds))
        slow = slow if place is None else progress[place]
        task = named(self.schedule, slow.task)
        if task is None:
            return f"{STEP_FAILED} on device {slow.device}, before its first task"
        return f"{STEP_FAILED} in {task} (its last task)"


def leave(where: str, reason: str) -> NoReturn:
    """End the process, saying where and why: some device is in what nothing can end."""
    print(
        f"error: {where}: {reason}\n"
        "error: its devices cannot be called back: this process ends; go on with --resume",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(EXIT_STATUS)


def settle(
    outputs: jax.Array,
    on_error: Callable[[int, Exception], None],
    meanwhile: Callable[[list[int]], None],
) -> dict[int, Exception]:
    """Wait for every device's part of `outputs`; errors by place in the mesh.

    `on_error(place, error)` is called at once for the first device that fails, while others may
    still wait for it; `meanwhile(places)`, of those still awaited, now and then.
    """
    place = {device: i for i, device in enumerate(outputs.sharding.mesh.devices.flat)}  # pyright: ignore
    parts = {place[shard.device]: shard.data for shard in outputs.addressable_shards}
    errors: dict[int, Exception] = {}
    while parts:
        for number in [n for n, part in parts.items() if part.is_ready()]:
            try:
                parts.pop(number).block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                if not errors:
                    on_error(number, error)
                errors[number] = error
        if parts:
            meanwhile(list(parts))
        time.sleep(POLL_S)
    return errors


def all_ready(outputs: jax.Array) -> bool:
    """Whether every device's part of `outputs` is settled."""
    return all(shard.data.is_ready() for shard in outputs.addressable_shards)


def ready_within(array: Any, timeout_s: float) -> bool:
    """Whether `array` is settled (well or not) within that time."""
    deadline = time.monotonic() + timeout_s
    while not array.is_ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def named(schedule: Schedule, task: int) -> Task | None:
    """The task of that id, None for -1."""
    return task_of(schedule.graph, task) if task >= 0 else None


def first_line(error: Any) -> str:
    """What went wrong, without the stack."""
    return str(error).strip().splitlines()[0]
