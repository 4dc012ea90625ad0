"""The device mesh of a run: data x fsdp x tensor. One device is a 1x1x1 mesh."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import AxisType, Mesh

from fuse_jax.config import MeshConfig

Device = Any  # jax.Device, which type checkers take for a variable
AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")  # a batch's rows are cut over both
CPU_DEVICES_FLAG = "xla_force_host_platform_device_count"
# XLA's CPU client has a thread a device if nobody says otherwise. Three kinds of work hold one
# while they wait: a program at its collective, a program for its turn to be enqueued (32 may be
# under way on a device), a copy for its source. With one thread a device the first kind can wait
# forever for a participant that the others leave no thread, and XLA ends the process.
THREADS_PER_CPU_DEVICE = 3


def mesh_sizes(config: MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """Sizes of (data, fsdp, tensor) on `num_devices` devices; one of them may be -1: what is left.

    Raises ValueError naming the `mesh.*` key if they cannot be laid over the devices.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise ValueError(f"mesh.{axis}={size} must be at least 1, or -1 for what is left")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        keys = " and ".join(f"mesh.{axis}" for axis in free)
        raise ValueError(f"{keys} are both -1: only one axis can take what is left")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % fixed:
        product = " * ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != -1)
        raise ValueError(
            f"{product} = {fixed} does not divide the {num_devices} devices: choose sizes whose "
            f"product is a divisor of {num_devices}"
        )
    if free:
        sizes[free[0]] = num_devices // fixed
    return sizes["data"], sizes["fsdp"], sizes["tensor"]


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """Mesh with axes `data`, `fsdp`, `tensor` over `devices` (default: all of the run's).

    If every size is given and their product is a proper divisor of the device count, the first
    devices are used and the idle ones are logged. Raises ValueError as `mesh_sizes` does.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_sizes(config, len(devices))
    used = math.prod(shape)
    if used < len(devices):
        logging.warning(
            "mesh %s uses %d of %d devices: the others stay idle (mesh.data=-1 takes them all)",
            "x".join(map(str, shape)),
            used,
            len(devices),
        )
    # Auto, not make_mesh's default Explicit: there, a gather over a sharded axis is an error.
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:used])


def use_cpu_devices(count: int = 0) -> None:
    """Split the host CPU into `count` devices (0: as XLA_FLAGS say, or one), with enough threads.

    To be called before JAX is used: it reads both once. Where JAX has started with other devices,
    ValueError if they are too few.
    """
    forced = re.search(CPU_DEVICES_FLAG + r"=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = int(forced[1]) if forced else count
    set_before = "PJRT_NPROC" in os.environ
    if devices > 1:
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_CPU_DEVICE * devices))
    if count and not forced:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX has started: it may have enough devices
            if count > 1 and not set_before:
                logging.warning(
                    "JAX runs already: set PJRT_NPROC=%s before it starts, or programs on %d CPU "
                    "devices may wait for each other's threads forever",
                    os.environ["PJRT_NPROC"],
                    count,
                )
    if jax.default_backend() == "cpu" and jax.device_count() < count:
        raise ValueError(
            f"mesh.cpu_devices={count}: JAX runs with {jax.device_count()} CPU devices already; "
            f"set XLA_FLAGS=--{CPU_DEVICES_FLAG}={count} before it starts"
        )


def pipeline_shape(mesh: Mesh, pipe: int) -> tuple[int, int, int]:
    """(pipe, data, tensor) over the devices of a run's mesh, in their order."""
    return pipe, mesh.shape["data"] // pipe, mesh.shape["tensor"]


def single_device_mesh(device: Device | None = None) -> Mesh:
    """The 1x1x1 mesh on `device` (default: the first)."""
    device = jax.devices()[0] if device is None else device
    return Mesh(np.array([[[device]]]), AXES, axis_types=(AxisType.Auto,) * 3)


def row_shards(mesh: Mesh) -> int:
    """Over how many shards a batch's rows are cut: data * fsdp. Row counts must be multiples."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)
