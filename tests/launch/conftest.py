"""Tiny models as Hugging Face directories, and a work directory as a run leaves it."""

import importlib.util
from pathlib import Path

import drawn
import jax
import pytest
from absl import flags

from fuse_jax.config import MeshConfig, OptimizerConfig
from fuse_jax.config_read import default_config, read_config
from fuse_jax.data.countdown import Countdown
from fuse_jax.data.tokenizer import load_tokenizer
from fuse_jax.models.architecture import Architecture
from fuse_jax.placement.mesh import make_mesh
from fuse_jax.training import models
from fuse_jax.training.checkpoint import Checkpoints
from fuse_jax.training.context import architectures, claim
from fuse_jax.training.optimizers import make_optimizer
from fuse_jax.training.state import create_state

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "max_position": 256,
}


def load(path):
    """A file that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_model(directory, role, arch, vocabulary, tokenizer_path="", seed=0):
    """Random weights of `arch`; a scalar head that is not 0."""
    head = models.HEADS[role]
    params = drawn.parameters(arch, seed, head)
    if head == "scalar":
        params["head"] = {
            "kernel": jax.random.normal(jax.random.key(seed + 1), (arch.hidden_size, 1)),
            "bias": params["head"]["bias"],
        }
    models.write(
        directory,
        role,
        arch,
        params,
        dtype="float32",
        vocabulary=vocabulary,
        tokenizer_path=str(tokenizer_path),
    )
    return directory


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A language model with a tokenizer that has a chat template."""
    tokenizer = load(ROOT / "tests" / "data" / "conftest.py").build_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), chat=True
    )
    arch = Architecture(vocab_size=384, **SIZES)
    out = tmp_path_factory.mktemp("models") / "chat"
    return write_model(out, "actor", arch, load_tokenizer(tokenizer), tokenizer)


@pytest.fixture(scope="session")
def chat_reward_model(tmp_path_factory, chat_model):
    """A reward model of the same vocabulary."""
    arch = Architecture(vocab_size=384, tie_embeddings=False, **SIZES)
    out = tmp_path_factory.mktemp("models") / "reward"
    return write_model(out, "reward_model", arch, load_tokenizer(chat_model), seed=5)


@pytest.fixture(scope="session")
def countdown_model(tmp_path_factory):
    """A language model over the built-in task's tokens; it has no tokenizer."""
    task = Countdown()
    arch = Architecture(vocab_size=task.vocab_size, **SIZES)
    return write_model(tmp_path_factory.mktemp("models") / "countdown", "actor", arch, task)


@pytest.fixture(scope="session")
def workdir(tmp_path_factory):
    """Checkpoints of ppo (steps 1, 2), best (1) and reward_model (7), and the runs' params."""
    directory = tmp_path_factory.mktemp("run")
    settings = default_config()
    for key, value in {"vocab_size": 72, **SIZES}.items():
        settings.model[key] = value
    settings.compute.sequence_buckets = "16,40"
    config = read_config(settings)
    claim(config, directory, resume=False)
    archs, mesh = architectures(config), make_mesh(MeshConfig(data=1))
    optimizer = make_optimizer(OptimizerConfig(), 10)

    def state(seed, **heads):
        roles = {role: archs[role] for role in heads}
        params = {
            role: drawn.parameters(archs[role], seed + i, head)
            for i, (role, head) in enumerate(heads.items())
        }
        return create_state(params, dict.fromkeys(roles, optimizer), roles, mesh)

    saved = {}
    ppo = Checkpoints(directory / "checkpoints" / "ppo", keep=2)
    for step in (1, 2):
        train = state(10 * step, actor="lm", critic="scalar")
        saved["ppo", step] = train.params
        ppo.save(step, {"train": train, "kl_coef": jax.numpy.float32(0.1)}, {})
    ppo.close()
    best = Checkpoints(directory / "checkpoints" / "best", keep=1)
    saved["best", 1] = {"actor": saved["ppo", 1]["actor"]}
    best.save(1, saved["best", 1], {})
    best.close()
    reward = Checkpoints(directory / "checkpoints" / "reward_model", keep=1)
    train = state(70, reward_model="scalar")
    saved["reward_model", 7] = train.params
    reward.save(7, train, {})
    reward.close()
    return directory, config, saved


@pytest.fixture
def launch(capsys):
    """`launch(script, *arguments)`: (what main exits with, stdout), as from a command line."""

    def run(script, *arguments):
        before = set(flags.FLAGS)
        module = load(ROOT / "launch" / script)
        try:
            rest = flags.FLAGS([script, *map(str, arguments)])
            module.main(rest)
            code = 0
        except SystemExit as stop:
            code = stop.code
        finally:  # two scripts may have flags of one name
            for name in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, name)
        return code, capsys.readouterr().out

    return run
