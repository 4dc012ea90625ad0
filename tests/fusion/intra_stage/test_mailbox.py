"""The mailbox inside compiled programs: payloads, order, and every way to end a step early."""

import subprocess
import sys
import time

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fuse_jax.benchmarks.pacing import pace
from fuse_jax.fusion.intra_stage import mailbox, native

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
COUNT = 6  # messages from each device to the next
NO_FAULT = jnp.array([-1, -1, 0], jnp.int32)


def mesh(devices=4, lanes=1):
    array = np.array(jax.devices()[: devices * lanes]).reshape(devices, lanes)
    return Mesh(array, ("pipe", "lane"))


def chain(program, payload_of, devices=4, lanes=1):
    """Device 0 makes COUNT payloads, everyone adds 1 and passes them on; all see all. [D, L, N]

    `trouble` int32 [3]: task that fails, task that sleeps, for how many ms. A task is N * D + d.
    """
    like = jax.eval_shape(payload_of, jnp.int32(0), jnp.int32(0))

    def body(trouble):
        device, lane = lax.axis_index("pipe"), lax.axis_index("lane")
        run = mailbox.begin(program, device, lane)
        at = {"run": run, "device": device, "lane": lane}

        def task(done, number):
            name = number * devices + device
            tag = jnp.where(device > 0, number, -1)
            got = mailbox.recv(program, like, **at, task=name, tag=tag)
            x = jnp.where(device > 0, got, payload_of(number, lane)) + jnp.ones((), like.dtype)
            x = faults.fault(x, name == trouble[0])
            x = pace(x, jnp.where(name == trouble[1], trouble[2], 0))
            to = jnp.where(device < devices - 1, device + 1, -1)
            return done + mailbox.send(program, x, **at, task=name, to=to, tag=number), x

        done, seen = lax.scan(task, jnp.float32(0), jnp.arange(COUNT))
        at["run"] = run + done.astype(jnp.int32)
        zero = lax.psum(mailbox.finish(program, **at), ("pipe", "lane"))
        return (seen + zero.astype(seen.dtype))[None, None]

    where = mesh(devices, lanes)
    spec = P("pipe", "lane")
    return jax.jit(jax.shard_map(body, mesh=where, in_specs=P(), out_specs=spec, check_vma=False))


def floats(number, lane):
    return jnp.arange(15, dtype=jnp.float32).reshape(3, 5) + 100.0 * number + 1e4 * lane


def expected(devices=4, lanes=1):
    passed = np.arange(devices, dtype=np.float32)[:, None, None, None, None] + 1
    return passed + np.asarray([[floats(n, lane) for n in range(COUNT)] for lane in range(lanes)])


def settle(outputs):
    """Errors of each device's part, None where it succeeded."""
    errors = []
    for part in outputs.addressable_shards:
        try:
            part.data.block_until_ready()
            errors.append(None)
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.fixture(scope="module")
def quick():
    """A program that gives up after a second, and its compiled chain."""
    program = mailbox.Program(4, timeout_s=1.0)
    return program, chain(program, floats)


def works(program, step):
    np.testing.assert_array_equal(step(NO_FAULT), expected())
    assert program.failure() is None and program.pending() == 0


def test_payloads_arrive_exactly_in_every_lane():
    program = mailbox.Program(4, 2)
    step = chain(program, floats, lanes=2)
    np.testing.assert_array_equal(step(NO_FAULT), expected(lanes=2))
    assert program.pending() == 0
    assert {p.state for p in program.progress()} == {"done"}


def test_other_dtypes_and_odd_shapes():
    def bits(number, lane):
        return (jnp.arange(7) + number).astype(jnp.bfloat16).reshape(7, 1)

    step = chain(mailbox.Program(4), bits)
    got = np.asarray(step(NO_FAULT).astype(jnp.float32))
    want = np.stack([np.asarray(bits(n, 0).astype(jnp.float32)) for n in range(COUNT)])
    np.testing.assert_array_equal(got[3, 0], want + 4)


def test_a_receiver_picks_by_tag_and_runs_in_flight_do_not_mix():
    program = mailbox.Program(2)
    like = jax.ShapeDtypeStruct((), jnp.float32)

    def body(order, offset):
        device = lax.axis_index("pipe")
        at = {"run": mailbox.begin(program, device), "device": device}

        def post(done, n):
            to = jnp.where(device == 0, 1, -1)
            x = n.astype(jnp.float32) + offset
            return done + mailbox.send(program, x, **at, task=n, to=to, tag=n), 0

        done, _ = lax.scan(post, jnp.float32(0), jnp.arange(5))
        at["run"] += done.astype(jnp.int32)

        def fetch(done, n):
            done = pace(done, jnp.where(device == 1, 1.0, 0.0))  # the sender is runs ahead
            at["run"] += done.astype(jnp.int32)
            tag = jnp.where(device == 1, n, -1)
            return done, mailbox.recv(program, like, **at, task=n, tag=tag)

        return lax.scan(fetch, done, order)[1][None]

    step = jax.jit(
        jax.shard_map(body, mesh=mesh(2), in_specs=P(), out_specs=P("pipe"), check_vma=False)
    )
    order = jnp.array([3, 0, 4, 2, 1])
    flying = [step(order, jnp.float32(10 * number)) for number in range(8)]
    for number, out in enumerate(flying):
        np.testing.assert_array_equal(out[1], np.asarray(order) + np.float32(10 * number))


@pytest.mark.parametrize(("number", "device"), [(2, 1), (COUNT - 1, 3), (0, 0), (COUNT - 1, 0)])
def test_a_failing_task_is_named_and_the_next_run_works(quick, number, device):
    program, step = quick
    task = number * 4 + device
    errors = settle(step(jnp.array([task, -1, 0], jnp.int32)))
    assert "injected fault" in errors[device]
    assert all("step given up" in e for d, e in enumerate(errors) if d != device)
    failure = program.failure()
    assert (failure.device, failure.task) == (device, task)
    program.drain()
    works(program, step)


@pytest.mark.parametrize("task", [9, COUNT * 4 - 1])  # others wait for messages, or at the end
def test_a_hung_device_is_named_and_refused_when_it_comes_back(quick, task):
    program, step = quick
    device = task % 4
    hung = step(jnp.array([-1, task, 4000], jnp.int32))
    parts = [shard.data for shard in hung.addressable_shards]
    sleeper = parts.pop(device)
    for part in parts:
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"device {device} task {task}"):
            part.block_until_ready()
    failure = program.failure()
    assert (failure.device, failure.task) == (device, task) and "waited too" in failure.reason
    program.drain()
    assert not sleeper.is_ready()  # nobody had to wait for it
    again = step(NO_FAULT)
    with pytest.raises(jax.errors.JaxRuntimeError, match="was given up earlier"):
        sleeper.block_until_ready()
    if any(settle(again)):  # the sleeper held up the new run too long as well: that is an end too
        program.drain()
    works(program, step)


def test_the_host_ends_a_wait():
    program = mailbox.Program(4, timeout_s=60.0)
    step = chain(program, floats)
    works(program, step)
    out = step(jnp.array([6, -1, 0], jnp.int32))
    broken = out.addressable_shards[2].data
    while not broken.is_ready():
        time.sleep(0.01)
    started = time.monotonic()
    program.blame(2, 0, "its step failed")
    assert all(settle(out)) and time.monotonic() - started < 5.0
    assert program.failure() == (2, 0, 6, "its step failed")
    with pytest.raises(jax.errors.JaxRuntimeError, match="its step failed"):
        step(NO_FAULT).block_until_ready()  # nothing runs until it is drained
    program.drain()
    works(program, step)


def test_a_message_of_the_wrong_size_ends_the_run():
    program = mailbox.Program(2, timeout_s=1.0)

    def body():
        device = lax.axis_index("pipe")
        at = {"run": mailbox.begin(program, device), "device": device, "task": 7}
        to = jnp.where(device == 0, 1, -1)
        zero = mailbox.send(program, jnp.ones(3), **at, to=to, tag=0)
        at["run"] += zero.astype(jnp.int32)
        tag = jnp.where(device == 1, 0, -1)
        return mailbox.recv(program, jax.ShapeDtypeStruct((4,), jnp.float32), **at, tag=tag)[None]

    step = jax.jit(
        jax.shard_map(body, mesh=mesh(2), in_specs=(), out_specs=P("pipe"), check_vma=False)
    )
    errors = settle(step())
    assert "has 12 bytes, not 16" in errors[1]


def test_a_message_that_is_never_sent_ends_its_wait_and_the_next_run_works():
    program = mailbox.Program(2, timeout_s=1.5)

    def body(sends):
        device = lax.axis_index("pipe")
        at = {"run": mailbox.begin(program, device), "device": device}
        to = jnp.where((device == 0) & sends, 1, -1)
        zero = mailbox.send(program, jnp.ones(3), **at, task=6, to=to, tag=0)
        zero = pace(zero, jnp.where(device == 1, 100.0, 0.0))  # the other notices first
        at["run"] += zero.astype(jnp.int32)
        like, tag = jax.ShapeDtypeStruct((3,), jnp.float32), jnp.where(device == 1, 0, -1)
        got = mailbox.recv(program, like, **at, task=7, tag=tag)
        at["run"] += (0.0 * got[0]).astype(jnp.int32)
        return got[None] + mailbox.finish(program, **at)

    step = jax.jit(
        jax.shard_map(body, mesh=mesh(2), in_specs=P(), out_specs=P("pipe"), check_vma=False)
    )
    errors = settle(step(jnp.asarray(False)))
    assert all("device 1 task 7" in error for error in errors), errors
    assert program.failure()[:3] == (1, 0, 7)
    program.drain()
    np.testing.assert_array_equal(step(jnp.asarray(True)), [[0.0] * 3, [1.0] * 3])


def test_spans_tell_when_tasks_ran():
    program = mailbox.Program(4)
    step = chain(program, floats)
    step(NO_FAULT).block_until_ready()
    program.record(True)
    step(jnp.array([-1, 5, 40], jnp.int32)).block_until_ready()
    program.record(False)
    step(NO_FAULT).block_until_ready()
    spans = program.spans()
    assert len(spans) == 4 * COUNT and set(spans[:, 2]) == set(range(4 * COUNT))
    (slept,) = spans[spans[:, 2] == 5]
    assert slept[1] == 1 and 0.04 <= slept[4] - slept[3] < 1.0


def test_processes_may_build_at_once(tmp_path):
    source = tmp_path / "tiny.cc"
    source.write_text('extern "C" int answer() { return 42; }\n')
    script = (
        "import sys, ctypes; from pathlib import Path\n"
        "from fuse_jax.fusion.intra_stage import native\n"
        "library = native.build(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "assert ctypes.CDLL(str(library)).answer() == 42"
    )
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "cache")]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


def test_a_changed_source_is_another_library(tmp_path):
    source = tmp_path / "tiny.cc"
    source.write_text("int a;")
    before = native.library_path(source)
    source.write_text("int b;")
    assert native.library_path(source) != before


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not mailbox.available() and "g++" in mailbox.unavailable_because()
    with pytest.raises(native.NativeError, match="no-such-compiler"):
        native.build(mailbox.SOURCE, tmp_path)


def test_a_source_that_does_not_compile_shows_why(tmp_path):
    source = tmp_path / "broken.cc"
    source.write_text("int main( {")
    with pytest.raises(native.NativeError, match=r"broken\.cc"):
        native.build(source, tmp_path)
    assert list(tmp_path.glob("*.so")) == []


@pytest.mark.parametrize("how", ["leave", "send"])
def test_a_task_ends_when_all_that_it_makes_is_there(how):
    program = mailbox.Program(1)

    def body(x):
        at = {"run": mailbox.begin(program, 0), "device": 0, "task": 7}
        at["run"] += mailbox.mark(program, **at).astype(jnp.int32)
        made = pace(x + at["run"], 40.0)
        if how == "leave":
            noted = mailbox.leave(program, jnp.ones(1), **at, after=[made])
        else:
            noted = mailbox.send(program, jnp.ones(1), **at, to=-1, tag=0, after=[made])
        return made, noted[None]

    step = jax.jit(
        jax.shard_map(body, mesh=mesh(1), in_specs=P(), out_specs=(P(), P("pipe")), check_vma=False)
    )
    program.record(True)
    jax.block_until_ready(step(jnp.ones(3)))
    ((*_, task, start, end),) = program.spans()
    assert task == 7 and end - start >= 0.04
