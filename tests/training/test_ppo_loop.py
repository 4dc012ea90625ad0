"""Which samples make a mini-batch, which step takes it, and what is told of an iteration."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fuse_jax.config import PPOConfig
from fuse_jax.fusion.intra_stage.native import NativeError
from fuse_jax.training import ppo_loop
from fuse_jax.training.ppo_state import Progress
from fuse_jax.training.run import REFUSALS

COUNT = 12


class StandIn:
    """Parts whose steps note which of them ran; `kl` is what each actor's update reports."""

    def __init__(self, kl=()):
        self.cuts, self.trained, self.kl = [], [], list(kl)

    def cut(self, experience, indices, kl_coef):
        assert kl_coef == 0.25
        self.cuts.append(np.asarray(indices).tolist())

    def step(self, state, minibatch):
        self.trained.append("both")
        kl = self.kl.pop(0) if self.kl else 0.0
        return state, {"approx_kl": kl, "ratio_max": 1.0 + kl, "actor_skipped": 1.0}

    def critic_step(self, state, minibatch):
        self.trained.append("critic")
        return state, {"critic_loss": 2.0}

    def wait(self):
        pass


def update(parts, iteration=0, valid=None, **ppo):
    run = SimpleNamespace(config=SimpleNamespace(ppo=PPOConfig(**ppo), seed=5))
    progress = Progress(iteration=iteration)
    state = SimpleNamespace(train=None, kl_coef=np.float32(0.25), progress=progress)
    valid = np.ones(COUNT, bool) if valid is None else valid
    values = ppo_loop.update(run, parts, state, SimpleNamespace(valid=valid))
    return values, progress


def orders(iteration):
    """The order of the samples in each of three epochs of three mini-batches."""
    parts = StandIn()
    update(parts, iteration, epochs=3, minibatches=3)
    assert [len(cut) for cut in parts.cuts] == [COUNT // 3] * 9
    return [tuple(epoch) for epoch in np.reshape(parts.cuts, (3, COUNT)).tolist()]


def test_every_epoch_and_iteration_takes_each_sample_once_in_an_order_of_its_own():
    found = [*orders(0), *orders(1)]
    assert all(sorted(order) == list(range(COUNT)) for order in found)
    assert len(set(found)) == 6
    assert orders(1) == found[3:]  # as a resumed run must have it


@pytest.mark.parametrize(("iteration", "model"), [(0, "critic"), (1, "critic"), (2, "both")])
def test_the_critic_warms_up_alone(iteration, model):
    parts = StandIn()
    update(parts, iteration, critic_warmup=2, minibatches=2)
    assert parts.trained == [model] * 2


@pytest.mark.parametrize("kl", [0.4, np.nan])
def test_the_actor_stops_early_and_the_critic_goes_on(kl):
    parts = StandIn([0.29, kl])
    values, progress = update(parts, epochs=2, minibatches=3, target_kl=0.2)
    assert parts.trained == ["both"] * 2 + ["critic"] * 4
    assert values["actor_stopped_early"] == 1 and progress.early_stops == 1
    calm = StandIn([0.29] * 6)
    values, progress = update(calm, epochs=2, minibatches=3, target_kl=0.2)
    assert calm.trained == ["both"] * 6
    assert values["actor_stopped_early"] == 0 and progress.early_stops == 0


def test_metrics_are_means_but_for_maxima_and_counts_of_skipped_updates():
    values, _ = update(StandIn([0.1, 0.3]), minibatches=2)
    assert values["approx_kl"] == pytest.approx(0.2)
    assert values["ratio_max"] == pytest.approx(1.3) and values["actor_skipped"] == 2.0


def test_a_minibatch_without_a_valid_sample_moves_nothing_and_is_counted():
    everything = StandIn()
    values, _ = update(everything, minibatches=3, valid=np.zeros(COUNT, bool))
    assert everything.trained == [] and values["minibatches_empty"] == 3
    parts, valid = StandIn(), np.ones(COUNT, bool)
    excluded = orders(0)[0][: COUNT // 3]
    valid[list(excluded)] = False
    values, _ = update(parts, epochs=1, minibatches=3, valid=valid)
    assert parts.trained == ["both"] * 2 and values["minibatches_empty"] == 1
    assert not set(excluded) & {index for cut in parts.cuts for index in cut}


def test_an_iteration_without_a_score_gives_up_and_launchers_say_so_in_one_line():
    config = SimpleNamespace(ppo=PPOConfig(prompts_per_iteration=4))
    state: Any = SimpleNamespace(
        train=SimpleNamespace(skipped={}), progress=SimpleNamespace(iteration=1)
    )
    run: Any = SimpleNamespace(config=config, say=print)
    ppo_loop._watch(run, state, {"kl": 0.0, "excluded": 3.0})
    with pytest.raises(REFUSALS, match=r"iteration 0: every sample was excluded.*mend") as caught:
        ppo_loop._watch(run, state, {"kl": 0.0, "excluded": 4.0})
    assert "\n" not in str(caught.value)
    state.train.skipped["actor"] = 99
    with pytest.raises(REFUSALS, match="max_skipped_updates"):
        ppo_loop._watch(run, state, {"kl": 0.0, "excluded": 0.0})
    with pytest.raises(REFUSALS):
        raise NativeError("no library")
