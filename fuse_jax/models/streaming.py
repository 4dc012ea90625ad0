"""Parameters filled in place from the tensors of a directory, piece by piece.

All shards of a parameter advance together: one compiled, collective-free program a parameter
writes one piece into each of them, whatever the number of devices, and in parallel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from fuse_jax.models import safetensors_io
from fuse_jax.models.families import Leaf
from fuse_jax.models.safetensors_io import Bounds, Stored

PIECE_BYTES = 2 << 20  # on the way into the shards of this process, together


def fill(stored: Mapping[str, Stored], leaf: Leaf, sharding: Sharding | None, dtype: Any) -> Array:
    """The parameter `leaf`, in `dtype`, laid out as `sharding` (None: default device, uncommitted).

    Tensors that are not in `stored` stay 0. Raises TypeError for a sharding that is neither a
    NamedSharding nor a SingleDeviceSharding.
    """
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        shards: dict[Bounds, list[Any]] = {tuple((0, n) for n in leaf.shape): [sharding]}
    elif isinstance(sharding, NamedSharding):
        shards = _bounds_of(leaf.shape, sharding)
    else:
        raise TypeError(f"{type(sharding).__name__}: give a NamedSharding or SingleDeviceSharding")
    shape = [stop - start for start, stop in next(iter(shards))]
    if 4 * math.prod(shape) * len(shards) <= PIECE_BYTES:
        return _small(stored, leaf, shards, sharding, shape, dtype)
    target = jnp.zeros(leaf.shape, dtype, device=sharding)
    walks = [_pieces(stored, leaf, bounds, len(shards)) for bounds in shards]
    for pieces in zip(*walks, strict=True):
        start = np.array(pieces[0][1], np.int32)  # the same in every shard
        values = [value for value, _ in pieces]
        named = sharding if isinstance(sharding, NamedSharding) else None
        value = values[0] if named is None else _spread(values, leaf, shards, named)
        target = _write(target, value, start, leaf.transposed, named)
        target.block_until_ready()  # else pieces pile up behind the asynchronous writes
    return target


def _bounds_of(shape: tuple[int, ...], sharding: NamedSharding) -> dict[Bounds, list[Any]]:
    """Which part of an array lies where: bounds -> this process's devices that hold them."""
    held: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        held.setdefault(bounds, []).append(device)
    return held


def _small(
    stored: Mapping[str, Stored],
    leaf: Leaf,
    shards: Mapping[Bounds, list[Any]],
    sharding: Sharding | None,
    shape: list[int],
    dtype: Any,
) -> Array:
    """Shards made on the host: nothing to compile."""
    placed = {}
    for bounds, devices in shards.items():
        made = np.zeros(shape, dtype)
        for value, start in _pieces(stored, leaf, bounds, len(shards)):
            value = value.T if leaf.transposed else value
            inner = start[1:] if leaf.stacked else start
            place = tuple(slice(a, a + n) for a, n in zip(inner, value.shape, strict=True))
            made[(start[0], *place) if leaf.stacked else place] = value
        placed.update({device: jnp.array(made, device=device) for device in devices})
    if not isinstance(sharding, NamedSharding):
        return placed[sharding]
    order = sharding.addressable_devices_indices_map(leaf.shape)
    return jax.make_array_from_single_device_arrays(
        leaf.shape, sharding, [placed[device] for device in order]
    )


def _pieces(
    stored: Mapping[str, Stored], leaf: Leaf, bounds: Bounds, shards: int
) -> Iterator[tuple[np.ndarray, list[int]]]:
    """What lies between `bounds`, in their layout, and where each piece starts there, in ours."""
    inner = bounds[1:] if leaf.stacked else bounds
    (first, last), *others = inner[::-1] if leaf.transposed else inner
    row = 4 * math.prod(stop - start for start, stop in others) * shards
    step = max(1, PIECE_BYTES // row)
    for layer in range(*bounds[0]) if leaf.stacked else (0,):
        name = leaf.names[layer]
        if name not in stored:
            continue
        for begin in range(first, last, step):
            piece = ((begin, min(begin + step, last)), *others)
            start = [begin - first, *(0 for _ in others)]
            start = start[::-1] if leaf.transposed else start
            if leaf.stacked:
                start = [layer - bounds[0][0], *start]
            yield safetensors_io.read(stored[name], name, piece), start


def _value_spec(leaf_rank: int, value_rank: int, spec: P, transposed: bool) -> P:
    """Spec of a piece in their layout, given the parameter's."""
    axes = (*spec, *(None for _ in range(leaf_rank - len(spec))))[leaf_rank - value_rank :]
    return P(*(axes[::-1] if transposed else axes))


def _spread(
    values: list[np.ndarray],
    leaf: Leaf,
    shards: Mapping[Bounds, list[Any]],
    sharding: NamedSharding,
) -> Array:
    """One global array whose shards are `values`, on the devices of `shards`."""
    spec = _value_spec(len(leaf.shape), values[0].ndim, sharding.spec, leaf.transposed)
    piece = NamedSharding(sharding.mesh, spec)
    cut = sharding.shard_shape(leaf.shape)
    times = [whole // part for whole, part in zip(leaf.shape, cut)][-values[0].ndim :]
    times = times[::-1] if leaf.transposed else times
    shape = tuple(n * k for n, k in zip(values[0].shape, times, strict=True))
    placed = {
        device: jax.device_put(value, device)
        for value, devices in zip(values, shards.values(), strict=True)
        for device in devices
    }
    order = piece.addressable_devices_indices_map(shape)
    return jax.make_array_from_single_device_arrays(shape, piece, [placed[d] for d in order])


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _write(
    target: Array, value: Array, start: Array, transposed: bool, sharding: NamedSharding | None
) -> Array:
    """`target` with `value`, cast, at `start` of every shard; in place, as `target` is donated."""

    def local(target: Array, value: Array, start: Array) -> Array:
        value = value.T if transposed else value
        value = value.astype(target.dtype).reshape((1,) * (target.ndim - value.ndim) + value.shape)
        return jax.lax.dynamic_update_slice(target, value, tuple(start))

    if sharding is None:
        return local(target, value, start)
    spec = sharding.spec
    specs = (spec, _value_spec(target.ndim, value.ndim, spec, transposed), P())
    return jax.shard_map(
        local, mesh=sharding.mesh, in_specs=specs, out_specs=spec, check_vma=False
    )(target, value, start)
