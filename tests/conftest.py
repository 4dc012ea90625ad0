"""Every test sees 8 virtual CPU devices and a compilation cache that survives between runs.

What is in tests/oracle may be imported by its name, as in `import ppo_numpy`.
"""

import os
import sys
from pathlib import Path

import pytest

# Before jax is imported anywhere: the device count is read once, at start-up.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
os.environ.setdefault("PJRT_NPROC", "24")  # as placement.mesh.use_cpu_devices: 3 a device
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "oracle"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Files that take long, first: else one process ends with them while the others have nothing to do.
DEAREST = (
    "training/test_run.py",
    "training/test_pipeline_gradients.py",
    "training/test_gradients.py",
    "training/test_ppo_step.py",
    "training/test_pipeline_step.py",
    "rollout/test_engine.py",
    "rollout/test_batcher.py",
    "inter_stage/test_runtime.py",
    "inter_stage/test_fused_training.py",
    "intra_stage/test_dispatch.py",
    "scoring/test_scorer.py",
    "launch/test_evaluate.py",
    "launch/test_recipes.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = f"{item.path.parent.name}/{item.path.name}"
        return DEAREST.index(name) if name in DEAREST else len(DEAREST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Directory with real data (HH-RLHF, GSM8K); tests that need it skip where it is absent."""
    path = Path(os.environ.get("FUSE_JAX_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no real data at {path}: set FUSE_JAX_TEST_DATA to a directory that has it")
    return path
