"""Waiting for a step whose devices end one by one, badly, or never."""

import types

import jax
import numpy as np
import pipeline_toy as toy
import pytest

from fuse_jax.fusion.intra_stage import flight, mailbox


class Part:
    """A device's part of an output: there after `polls` looks; None = never."""

    def __init__(self, polls, error=None):
        self.polls, self.error = polls, error

    def is_ready(self):
        if self.polls is None:
            return False
        self.polls -= 1
        return self.polls < 0

    def block_until_ready(self):
        if self.error:
            raise jax.errors.JaxRuntimeError(self.error)


def outputs(*parts):
    devices = [f"device {i}" for i in range(len(parts))]
    mesh = types.SimpleNamespace(devices=np.array(devices))
    shards = [types.SimpleNamespace(device=d, data=p) for d, p in zip(devices, parts)]
    sharding = types.SimpleNamespace(mesh=mesh)
    return types.SimpleNamespace(sharding=sharding, addressable_shards=shards)


class Program:
    """Mailboxes of which the test says what they know."""

    lanes = 1

    def __init__(self, seconds=(0.0,), states=(), tasks=()):
        self.blamed, self.drained, self.seconds = None, 0, seconds
        self.states = states or ("running",) * len(seconds)
        self.tasks = tasks or tuple(5 + device for device in range(len(seconds)))

    def blame(self, device, lane, reason):
        self.blamed = self.blamed or mailbox.Failure(device, lane, 3, reason)

    def failure(self):
        return self.blamed

    def drain(self, timeout_s):
        self.drained += 1

    def progress(self):
        each = zip(self.tasks, self.states, self.seconds, strict=True)
        return [mailbox.Progress(d, 0, *of) for d, of in enumerate(each)]


SCHEDULE = toy.concatenated_1f1b(toy.problem((2, 2), toy.minibatch(3)))


def test_a_step_that_ends_well_is_only_waited_for():
    program = Program()
    flight.MailboxFlight(SCHEDULE, outputs(Part(3), Part(0)), program).wait()
    assert program.blamed is None and program.drained == 0


def test_the_first_device_that_fails_is_blamed_and_all_are_drained():
    program = Program()
    parts = outputs(Part(40, "ABORTED: step given up"), Part(1, "INTERNAL: burnt\nstack"))
    with pytest.raises(flight.StepError, match=r"INTERNAL: burnt$") as caught:
        flight.MailboxFlight(SCHEDULE, parts, program).wait()
    assert caught.value.device == 1 and program.drained == 1
    assert caught.value.task == flight.named(SCHEDULE, 3)


def test_a_flight_has_ended_when_all_its_parts_have():
    for last, ended in ((0, True), (None, False)):
        parts, program = outputs(Part(0), Part(last)), Program()
        started = [flight.Started(2, Part(0)), flight.Started(3, Part(last))]
        assert flight.DispatchFlight(SCHEDULE, started, 1.0).ended() == ended
        assert flight.MailboxFlight(SCHEDULE, parts, program).ended() == ended
        parts = outputs(Part(0), Part(last))
        assert flight.CollectiveFlight(SCHEDULE, parts, program, 1.0).ended() == ended


class EndedError(Exception):
    """In place of the end of the process."""


@pytest.fixture
def ending(monkeypatch):
    def leave(status):
        raise EndedError(status)

    monkeypatch.setattr(flight.os, "_exit", leave)
    monkeypatch.setattr(flight, "DRAIN_S", 0.05)


def test_a_device_that_never_comes_back_ends_the_process(ending, capsys):
    parts = outputs(Part(None), Part(1, "INTERNAL: burnt"))
    with pytest.raises(EndedError, match=str(flight.EXIT_STATUS)):
        flight.MailboxFlight(SCHEDULE, parts, Program()).wait()
    told = capsys.readouterr().err
    hung = flight.named(SCHEDULE, 5)  # on device 0, and not what failed
    assert f"INTERNAL: burnt, and {hung} does not come back" in told and "--resume" in told
    assert f"failed in {flight.named(SCHEDULE, 3)}: " in told


def test_a_device_that_is_blamed_and_never_comes_back_is_it(ending, capsys):
    program = Program()
    program.blame(0, 0, "waited too long")  # by device 1
    with pytest.raises(EndedError):
        flight.MailboxFlight(SCHEDULE, outputs(Part(None), Part(1, "ABORTED")), program).wait()
    assert "waited too long, and it does not come back" in capsys.readouterr().err


def test_so_does_a_mailbox_in_which_devices_still_wait(ending, monkeypatch, capsys):
    def drain(program, timeout_s):
        raise mailbox.DrainError("operations still wait")

    monkeypatch.setattr(Program, "drain", drain)
    with pytest.raises(EndedError, match=str(flight.EXIT_STATUS)):
        flight.MailboxFlight(SCHEDULE, outputs(Part(1, "INTERNAL: burnt")), Program()).wait()
    told = capsys.readouterr().err
    assert f"failed in {flight.named(SCHEDULE, 3)}: INTERNAL: burnt; operations still wait" in told


def test_a_dispatched_task_that_never_ends_ends_the_process(ending, capsys):
    started = [flight.Started(2, Part(0)), flight.Started(3, Part(None))]
    with pytest.raises(EndedError, match=str(flight.EXIT_STATUS)):
        flight.DispatchFlight(SCHEDULE, started, 0.02).wait()
    told = capsys.readouterr().err
    assert "no end after 0.02 s, and it does not come back" in told and "--resume" in told
    assert str(flight.named(SCHEDULE, 3)) in told


def test_a_dispatched_task_that_hangs_after_another_failed_is_told_apart(ending, capsys):
    started = [flight.Started(2, Part(0, "INTERNAL: burnt")), flight.Started(3, Part(None))]
    with pytest.raises(EndedError):
        flight.DispatchFlight(SCHEDULE, started, 0.02).wait()
    failed, hung = (flight.named(SCHEDULE, task) for task in (2, 3))
    told = capsys.readouterr().err
    assert f"failed in {failed}: INTERNAL: burnt, and {hung} does not come back" in told


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((Part(None), Part(1, "INTERNAL: burnt")), "INTERNAL: burnt"),
        ((Part(None), Part(1)), "no device has begun a task for 0.05 s"),
    ],
)
def test_collectives_end_the_process_with_the_last_task(ending, capsys, parts, words):
    made = flight.CollectiveFlight(SCHEDULE, outputs(*parts), Program((9.0, 8.0)), 0.05)
    with pytest.raises(EndedError, match=str(flight.EXIT_STATUS)):
        made.wait()
    told = capsys.readouterr().err
    task = 6 if "burnt" in words else 5  # the one that failed, or the longest
    assert words in told and str(flight.named(SCHEDULE, task)) in told and "--resume" in told


def test_a_device_that_waits_for_another_is_not_blamed(ending, capsys):
    program = Program((9.0, 8.0), ("done", "running"))
    with pytest.raises(EndedError):
        flight.CollectiveFlight(SCHEDULE, outputs(Part(None), Part(None)), program, 0.05).wait()
    assert str(flight.named(SCHEDULE, 6)) in capsys.readouterr().err


def test_a_device_that_has_no_task_yet_is_not_blamed(ending, capsys):
    """It has entered the step before the one that hangs began its task, and counts as running."""
    program = Program((9.0, 8.0), tasks=(-1, 6))
    made = flight.CollectiveFlight(SCHEDULE, outputs(Part(None), Part(None)), program, 0.05)
    with pytest.raises(EndedError):
        made.wait()
    assert str(flight.named(SCHEDULE, 6)) in capsys.readouterr().err
    program.tasks = (-1, -1)
    with pytest.raises(EndedError):
        made.wait()
    assert "on device 0, before its first task: no device" in capsys.readouterr().err


def test_a_step_may_be_long_while_devices_begin_tasks():
    busy = Program((9.0, 0.0))  # device 1 has just begun one
    flight.CollectiveFlight(SCHEDULE, outputs(Part(200), Part(1)), busy, 0.02).wait()
