"""Whole runs with pipelined updates: the same parameters whatever the schedule, and a bad end."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuse_jax.config_read import default_config
from fuse_jax.fusion.intra_stage import native
from fuse_jax.fusion.intra_stage.flight import EXIT_STATUS
from fuse_jax.training.metrics import read_lines
from fuse_jax.training.run import train

pytestmark = [
    pytest.mark.slow,  # half a minute to a minute of CPU each
    pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler"),
]
ROOT = Path(__file__).resolve().parents[2]


def tiny(transport="mailbox", schedule="fused"):
    """The quickstart's task and stages, two of everything, on two pipeline devices."""
    config = default_config()
    model = config.model
    model.vocab_size, model.hidden_size, model.intermediate_size = 72, 16, 24
    model.num_layers, model.head_dim = 2, 8
    config.rollout.max_prompt_length = 3
    config.rollout.slots = config.rollout.prefill_rows = 8
    config.compute.sequence_buckets = "40"
    config.compute.micro_batch_tokens = config.compute.scoring_tokens = 160
    config.sft.steps, config.sft.rows = 4, 8
    config.reward_training.steps, config.reward_training.rows = 4, 8
    config.reward_training.max_pairs = 32
    config.ppo.iterations, config.ppo.prompts_per_iteration = 4, 32
    config.ppo.minibatches, config.ppo.critic_warmup = 2, 1
    config.evaluation.prompts, config.evaluation.every = 16, 0
    config.checkpoint.every = 1
    config.data.limit = 400
    config.mesh.data = config.mesh.pipe = 2
    config.fusion.intra_stage.transport = transport
    config.fusion.intra_stage.schedule = schedule
    config.fusion.intra_stage.drift = 0.0
    return config


def parameters(workdir):
    return {
        str(path.relative_to(workdir)): path.read_bytes()
        for path in sorted((workdir / "models").rglob("*.safetensors"))
    }


def test_fused_and_serial_runs_export_the_same_bits(tmp_path):
    for schedule in ("fused", "serial"):
        train(tiny(schedule=schedule), tmp_path / schedule)
    fused, serial = (parameters(tmp_path / name) for name in ("fused", "serial"))
    assert fused and fused == serial
    kinds = {}
    for schedule in ("fused", "serial"):
        rows = read_lines(tmp_path / schedule / "metrics.jsonl")
        ppo = [row for row in rows if row["stage"] == "ppo"]
        kinds[schedule] = [
            next(kind for kind in ("fused", "serial", "alone") if row[f"pipeline_{kind}"] == 1)
            for row in ppo
        ]
    assert kinds == {"fused": ["alone"] + ["fused"] * 3, "serial": ["alone"] + ["serial"] * 3}
    assert (tmp_path / "fused" / "pipeline.png").exists()


SCRIPT = """
import sys
sys.path[:0] = [{root!r}, {oracle!r}, {here!r}]
import numpy as np
import faulty_stages, test_pipeline_runs
from fuse_jax.training import pipeline_shared, ppo_parts
from fuse_jax.training.run import train
broken, resume = sys.argv[1] == "yes", sys.argv[3] == "yes"
plain, cuts = pipeline_shared.model_stages, []
pipeline_shared.model_stages = lambda *of: {{
    name: faulty_stages.wrap(name, stages) for name, stages in plain(*of).items()
}}
cut = ppo_parts.PPOParts.cut

def breaking(self, *of):
    cuts.append(1)
    batch = cut(self, *of)
    fail = broken and len(cuts) == 6  # the second update of the third iteration
    return batch._replace(kl_coef=np.float32(faulty_stages.FAIL)) if fail else batch

ppo_parts.PPOParts.cut = breaking
train(test_pipeline_runs.tiny(sys.argv[4]), sys.argv[2], resume=resume)
"""


@pytest.mark.parametrize("transport", ["pair", "ring"])
def test_a_failure_under_collectives_ends_the_process_and_resume_goes_on(tmp_path, transport):
    script = tmp_path / "run.py"
    oracle = ROOT / "tests" / "oracle"
    script.write_text(
        SCRIPT.format(root=str(ROOT), oracle=str(oracle), here=str(Path(__file__).parent))
    )

    def run(broken, workdir, resume):
        command = [sys.executable, str(script), broken, str(tmp_path / workdir), resume, transport]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    ended = run("yes", "a", "no")
    assert ended.returncode == EXIT_STATUS, ended.stderr[-3000:]
    assert "actor[0] B0 on device 1" in ended.stderr and "--resume" in ended.stderr
    resumed = run("no", "a", "yes")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    # 2, or 1 if the save of 2, which is written meanwhile, ended with the process.
    assert re.search("resumed after iteration [12]", resumed.stdout)
    undisturbed = run("no", "b", "no")
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    assert parameters(tmp_path / "a") == parameters(tmp_path / "b")


HUNG = """
import sys
sys.path[:0] = [{root!r}, {oracle!r}, {here!r}]
from fuse_jax.placement.mesh import use_cpu_devices
use_cpu_devices(4)
import numpy as np
import faulty_stages
from fuse_jax.fusion.intra_stage import flight
flight.DRAIN_S, faulty_stages.HANG_MS = 1.0, 1e9
import test_pipeline_step as steps
shared = steps.pipelines(transport=sys.argv[1])
step = steps.PipelineStep(shared, steps.BOTH)
steps.run(step, shared, 1)
print("one went well", flush=True)
steps.run(step, shared, 1, steps.BATCH._replace(kl_coef=np.float32(faulty_stages.HANG)))
"""


@pytest.mark.parametrize("transport", ["mailbox", "dispatch", "pair", "ring"])
def test_a_task_that_never_ends_is_named_and_the_process_ends(tmp_path, transport):
    """It would not end by itself: XLA waits for all of its threads, and one is in that task."""
    script = tmp_path / "hung.py"
    oracle = ROOT / "tests" / "oracle"
    script.write_text(
        HUNG.format(root=str(ROOT), oracle=str(oracle), here=str(Path(__file__).parent))
    )
    command = [sys.executable, str(script), transport]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "one went well" in ended.stdout, ended.stderr[-3000:]
    assert ended.returncode == EXIT_STATUS, ended.stderr[-3000:]
    assert "actor[0] B0 on device 1" in ended.stderr and "--resume" in ended.stderr


def test_a_search_that_is_made_again_changes_no_bit(tmp_path, capsys):
    """Any difference counts as drift: every second look measures and searches anew."""
    for drift in (1e-9, 0.0):
        config = tiny()
        config.ppo.iterations = 12  # 22 updates of both models
        config.fusion.intra_stage.drift = drift
        train(config, tmp_path / str(drift))
        told = capsys.readouterr().out
        assert ("schedules searched again" in told) == (drift > 0)
    assert parameters(tmp_path / "1e-09") == parameters(tmp_path / "0.0")
