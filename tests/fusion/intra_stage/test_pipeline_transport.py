"""The exchange of a tick, without a pipeline around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fuse_jax.fusion.intra_stage.executor import pipeline_mesh
from fuse_jax.fusion.intra_stage.tables import Row
from fuse_jax.fusion.intra_stage.transport import Pair, Ring, make_transport
from fuse_jax.training.pipeline_plan import COSTS


def exchanged(transport, devices, even, odd):
    """(below, above) [P, 2] of payloads 10 d, 10 d + 1 of device d."""
    mesh = pipeline_mesh(devices)

    def local(flags):
        blank = dict.fromkeys(Row._fields, jnp.int32(0))
        row = Row(**{**blank, "even": flags[0, 0], "odd": flags[0, 1]})
        payload = 10 * jax.lax.axis_index("pipe") + jnp.arange(2.0)
        return tuple(x[None] for x in transport.exchange(row, payload))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe"), check_vma=False
    )
    flags = np.stack([even, odd], axis=1).astype(np.int32)
    return [np.asarray(x) for x in jax.jit(mapped)(flags)]


def payload(device):
    return [10.0 * device, 10.0 * device + 1]


@pytest.mark.parametrize("devices", [2, 4])
def test_pairs_that_exchange_get_each_others_payload(devices):
    even = np.ones(devices) if devices == 2 else np.array([0, 0, 1, 1])
    odd = np.zeros(devices) if devices == 2 else np.array([0, 1, 1, 0])
    below, above = exchanged(Pair(devices), devices, even, odd)
    for device in range(devices):
        for flags, parity in ((even, 0), (odd, 1)):
            upper = device % 2 != parity
            other = device - 1 if upper else device + 1
            if flags[device]:
                got = below[device] if upper else above[device]
                np.testing.assert_array_equal(got, payload(other))


def test_the_ring_brings_both_neighbours_payload_every_tick():
    zeros = np.zeros(4)
    below, above = exchanged(Ring(4), 4, zeros, zeros)
    for device in range(4):
        if device > 0:
            np.testing.assert_array_equal(below[device], payload(device - 1))
        if device < 3:
            np.testing.assert_array_equal(above[device], payload(device + 1))


def test_transports_by_name_and_what_they_refuse():
    for name, kind in (("pair", Pair), ("ring", Ring)):
        assert isinstance(make_transport(name, 4), kind)
    with pytest.raises(ValueError, match="even number"):
        make_transport("pair", 3)
    with pytest.raises(ValueError, match="'post' is not one of mailbox, pair, ring"):
        make_transport("post", 4)


@pytest.mark.parametrize("name", ["pair", "ring"])
def test_a_transport_is_planned_as_it_waits(name):
    """In a tick, only for the neighbours it has something for; or for all devices of the ring."""
    mesh, row = pipeline_mesh(4), Row(*[0] * len(Row._fields))

    def local(entry):
        given = row._replace(even=entry[0], odd=entry[0])
        return tuple(make_transport(name, 4).exchange(given, jnp.ones(2)))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe"), check_vma=False
    )
    (inside,) = (e.params["jaxpr"] for e in jax.make_jaxpr(mapped)(jnp.zeros(4, jnp.int32)).eqns)
    names = [equation.primitive.name for equation in inside.eqns]
    always = "ppermute" in names
    assert always != ("cond" in names)
    assert COSTS[name] == ("lockstep" if always else "rendezvous")
