"""With tables cut over fsdp, no stage may make XLA repeat every row's work on every device."""

import drawn
import jax
import numpy as np
import pytest
from program_text import compile_for_its_text

from fuse_jax.buckets import Bucket
from fuse_jax.config import ComputeConfig, MeshConfig, OptimizerConfig
from fuse_jax.data.packing import pack_demonstrations, pack_preferences
from fuse_jax.data.records import Demonstration, Preference
from fuse_jax.models.architecture import Architecture
from fuse_jax.models.transformer import init
from fuse_jax.placement.mesh import make_mesh, single_device_mesh
from fuse_jax.placement.sharding import parameter_specs
from fuse_jax.scoring.columns import Model
from fuse_jax.scoring.scorer import Scorer
from fuse_jax.training import reward_model, sft
from fuse_jax.training.optimizers import make_optimizer
from fuse_jax.training.state import CompiledStep, create_state

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
ARCH = Architecture("llama", 64, 64, 72, 1, 8, 8, 8)
ROWS, LENGTH = 8, 24
COMPUTE = ComputeConfig(micro_batch_tokens=ROWS * LENGTH)
ITEMS = [np.arange(1, 9, dtype=np.int32)] * ROWS


def scoring(mesh, monkeypatch):
    del monkeypatch
    flops = 0.0
    for column, role, head in (
        ("ref_log_probs", "reference", "lm"),
        ("values", "critic", "scalar"),
        ("scores", "reward_model", "scalar"),
    ):
        shapes = jax.eval_shape(lambda head=head: init(ARCH, jax.random.key(0), head=head))
        placed = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            parameter_specs(ARCH, shapes, mesh),
        )
        scorer = Scorer(mesh, (Bucket(LENGTH, ROWS),), [column], max_response=12)
        scorer.precompile({role: Model(ARCH, placed)})
        (executable,) = scorer._executables.values()
        flops += executable.cost_analysis()["flops"]
    return flops


def step_flops(module, make, role, head, batch, mesh, monkeypatch):
    made = []

    def kept(*args):
        made.append(CompiledStep(*args))
        return made[0]

    monkeypatch.setattr(module, "CompiledStep", kept)
    optimizer = make_optimizer(OptimizerConfig(), 2)
    step = make(mesh, ARCH, COMPUTE, optimizer)
    params = {role: drawn.parameters(ARCH, 0, head)}
    step(create_state(params, {role: optimizer}, {role: ARCH}, mesh), batch)
    return made[0]._executable.cost_analysis()["flops"]


def supervised(mesh, monkeypatch):
    batch = pack_demonstrations([Demonstration(x, x) for x in ITEMS], ROWS, LENGTH)
    return step_flops(sft, sft.make_sft_step, "actor", "lm", batch, mesh, monkeypatch)


def ranking(mesh, monkeypatch):
    pairs = [Preference(x[:4], x, x) for x in ITEMS]
    batch = pack_preferences(pairs, ROWS, LENGTH, max_pairs=ROWS)
    make = reward_model.make_reward_step
    return step_flops(reward_model, make, "reward_model", "scalar", batch, mesh, monkeypatch)


@pytest.mark.parametrize(
    "work",
    [
        supervised,
        pytest.param(scoring, marks=pytest.mark.slow),
        pytest.param(ranking, marks=pytest.mark.slow),
    ],
)
def test_eight_devices_do_an_eighth_each(work, monkeypatch):
    compile_for_its_text(monkeypatch)
    whole = work(single_device_mesh(), monkeypatch)
    each = work(make_mesh(MeshConfig(1, 8, 1)), monkeypatch)
    assert each < whole / 8 * 1.5
