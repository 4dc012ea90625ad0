"""Pipelines over everything that may be varied, every pair of choices once; by hand.

No setting freezes single layers; a model that is frozen as a whole (the actor while the critic
warms up) leaves the other one its serial pipeline, and those are the cases of one model.

The tolerance is near what float32 gives: against float64 the serial gradients of the deepest cases
are up to 1.1e-6 of the largest off, the pipeline's 1.0e-6, and the two up to 9.7e-7 apart.
"""

import itertools
from functools import partial

import jax
import numpy as np
import pipeline_toy as toy
import pytest

from fuse_jax.config import MeshConfig, OptimizerConfig
from fuse_jax.placement.mesh import make_mesh, single_device_mesh
from fuse_jax.training.gradients import serial_gradients
from fuse_jax.training.ppo_step import create_ppo_state, ppo_step

pytestmark = pytest.mark.slow
CHOICES = {
    "stages": ((4, 4), (4, 2), (8, 8), (2, 4)),
    "micro_batches": (1, 2, 4),  # times the devices
    "unequal": (False, True),
    "empty": (False, True),
    "tied": (False, True),
    "transport": ("mailbox", "dispatch", "pair", "ring"),
    "split": (False, True),
}


def pairwise(choices):
    """Few cases in which every pair of values of two choices stands together somewhere."""
    names = list(choices)
    open_pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in choices[a]
        for y in choices[b]
    }

    def covers(case):
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)} & open_pairs

    every = [dict(zip(names, values)) for values in itertools.product(*choices.values())]
    cases = []
    while open_pairs:
        cases.append(max(every, key=lambda case: len(covers(case))))
        open_pairs -= covers(cases[-1])
    return cases


CASES = pairwise(CHOICES)
ALONE = (  # stages, micro-batches, transport, who trains
    ((4, 4), 4, "mailbox", "critic"),
    ((4, 2), 5, "dispatch", "actor"),
    ((2, 4), 6, "pair", "actor"),
    ((4, 2), 8, "ring", "critic"),
)


def test_the_cases_are_few():
    assert len(CASES) + len(ALONE) <= 24


def make_case(stages, batch, hp, transport, **more):
    if transport == "dispatch":
        return toy.Dispatched(stages, batch, hp, **more)
    return toy.Case(stages, batch, hp, transport=transport, **more)


@pytest.mark.parametrize("chosen", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_gradients_of_every_pair_of_choices(chosen):
    stages, layers = chosen["stages"], chosen["stages"]
    count = chosen["micro_batches"] * max(stages)
    hp = toy.hyper_parameters(layers, tied=chosen["tied"])
    params = toy.parameters(hp)
    real = count - 1 if chosen["empty"] else count
    batch = toy.minibatch(real, toy.TWO if chosen["unequal"] else toy.ONE, room=count)
    case = make_case(stages, batch, hp, chosen["transport"], split=chosen["split"])
    expected, _ = toy.serial(params, batch, hp=hp)
    fused, serial = (case(params, schedule) for schedule in ("fused", "serial"))
    found = toy.error(fused[0], expected)
    print(f"error {found:.1e}")
    assert found < 1e-6
    assert toy.bits(fused) == toy.bits(serial)
    assert toy.bits(case(params, "fused", toy.spoiled(batch))) == toy.bits(fused)
    assert chosen["transport"] == "dispatch" or case.function._cache_size() == 1


@pytest.mark.parametrize(("stages", "count", "transport", "trained"), ALONE)
def test_gradients_of_the_model_that_is_not_frozen(stages, count, transport, trained):
    hp = toy.hyper_parameters(stages)
    params, batch = toy.parameters(hp), toy.minibatch(count - 1, toy.TWO, room=count)
    case = make_case(stages, batch, hp, transport, train=(trained,))
    expected, _ = toy.serial(params, batch, hp=hp, train=(trained,))
    grads, _ = case(params, "serial")
    found = toy.error(grads, expected)
    print(f"error {found:.1e}")
    assert grads.keys() == {trained} and found < 1e-6


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_parameters_after_ten_updates_on_recorded_experience(kind):
    """Through the pipeline, its state cut over the same devices, and on one device without it."""
    optimizer = OptimizerConfig(learning_rate=1e-4, eps=1e-5)
    hp = toy.hyper_parameters((4, 4), actor_optimizer=optimizer, critic_optimizer=optimizer)
    params = toy.parameters(hp)
    batches = [toy.minibatch(8, toy.TWO, seed=seed) for seed in range(10)]
    case = toy.Case((4, 4), batches[0], hp, transport="pair")

    def sgd(state, batch, gradients):
        grads, _ = gradients(state.params, batch)
        moved = jax.tree.map(lambda p, g: p - 1e-4 * g, state.params, grads)
        return state.replace(params=moved)

    def adam(state, batch, gradients):
        return ppo_step(state, batch, hp=hp, gradients=gradients)[0]

    ends = []
    for gradients, mesh, place in (
        (partial(serial_gradients, hp=hp), single_device_mesh(), lambda batch: batch),
        (
            partial(case.pipeline, hp=hp),
            make_mesh(MeshConfig(data=1, fsdp=4, tensor=1), jax.devices()[:4]),
            partial(case.planned, "fused"),
        ),
    ):
        state = create_ppo_state(params, hp, mesh)
        step = jax.jit(partial(sgd if kind == "sgd" else adam, gradients=gradients))
        for batch in batches:
            state = step(state, place(batch))
        ends.append(jax.tree.map(np.asarray, state.params))
    difference = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), *ends)
    print(f"difference {max(jax.tree.leaves(difference)):.1e}")
    assert max(jax.tree.leaves(difference)) < 1e-5
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ends[0], params)
    assert max(jax.tree.leaves(moved)) > 1e-4  # ten times the tolerance


def test_temporary_memory_does_not_grow_with_micro_batches():
    sizes = []
    for count in (8, 32):
        hp = toy.hyper_parameters((4, 4))
        case = toy.Case((4, 4), toy.minibatch(count), hp, transport="pair")
        shapes = jax.eval_shape(lambda hp=hp: toy.parameters(hp))
        memory = case.function.lower(shapes, case.planned()).compile().memory_analysis()
        sizes.append(memory.temp_size_in_bytes)
    assert sizes[1] <= 1.05 * sizes[0]
