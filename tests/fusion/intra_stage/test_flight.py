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

    def __init__(self, seconds=(0.0,)):
        self.blamed, self.drained, self.seconds = None, 0, seconds

    def blame(self, device, lane, reason):
        self.blamed = self.blamed or mailbox.Failure(device, lane, 3, reason)

    def failure(self):
        return self.blamed

    def drain(self, timeout_s):
        self.drained += 1

    def progress(self):
        return [mailbox.Progress(d, 0, 5, "running", s) for d, s in enumerate(self.seconds)]


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


def test_a_device_that_never_comes_back_is_named_too(monkeypatch):
    monkeypatch.setattr(flight, "DRAIN_S", 0.05)
    parts = outputs(Part(None), Part(1, "INTERNAL: burnt"))
    with pytest.raises(mailbox.DrainError, match="does not come back"):
        flight.MailboxFlight(SCHEDULE, parts, Program()).wait()


class EndedError(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((Part(None), Part(1, "INTERNAL: burnt")), "INTERNAL: burnt"),
        ((Part(None), Part(1)), "no device has begun a task for 0.05 s"),
    ],
)
def test_collectives_end_the_process_with_the_last_task(monkeypatch, capsys, parts, words):
    def leave(status):
        raise EndedError(status)

    monkeypatch.setattr(flight.os, "_exit", leave)
    made = flight.CollectiveFlight(SCHEDULE, outputs(*parts), Program((9.0, 8.0)), 0.05)
    with pytest.raises(EndedError, match=str(flight.EXIT_STATUS)):
        made.wait()
    told = capsys.readouterr().err
    assert words in told and str(flight.named(SCHEDULE, 5)) in told and "--resume" in told


def test_a_step_may_be_long_while_devices_begin_tasks():
    busy = Program((9.0, 0.0))  # device 1 has just begun one
    flight.CollectiveFlight(SCHEDULE, outputs(Part(200), Part(1)), busy, 0.02).wait()
