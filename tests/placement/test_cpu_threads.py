"""Many programs with collectives in flight over virtual CPU devices: none waits forever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# More programs at once than XLA lets run on a device (32): the others wait for their turn.
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from fuse_jax.placement.mesh import use_cpu_devices
use_cpu_devices({count})
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
x = jax.device_put(jnp.ones((64 * jax.device_count(), 256)), rows)

@jax.jit
def step(x):
    for _ in range(4):
        y = jnp.tanh(x @ jnp.full((256, 256), 0.01))
        gathered = jax.lax.with_sharding_constraint(y, whole)
        x = jax.lax.with_sharding_constraint(y + gathered.mean(0), rows)
    return jax.lax.with_sharding_constraint(x.sum(1), whole)

jax.block_until_ready(step(x))
for _ in range(3):
    outs = [step(x) for _ in range(96)]
    for out in outs:
        out.copy_to_host_async()
    jax.block_until_ready(outs)
print("went", jax.device_count())
"""


@pytest.mark.parametrize(("forced", "count"), [("", 4), ("4", 0), ("4", 2)])
def test_a_hundred_collective_programs_in_flight_end(forced, count):
    environment = {**os.environ, "XLA_FLAGS": ""}
    environment.pop("PJRT_NPROC", None)
    if forced:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={forced}"
    command = [sys.executable, "-c", SCRIPT.format(root=str(ROOT), count=count)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "went 4", ended.stderr[-3000:]


def test_what_the_user_says_stays(monkeypatch):
    from fuse_jax.placement.mesh import use_cpu_devices

    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("PJRT_NPROC", "11")
    use_cpu_devices(8)
    assert os.environ["PJRT_NPROC"] == "11"
