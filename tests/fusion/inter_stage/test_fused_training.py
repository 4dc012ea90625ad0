"""Inter-stage fusion inside training: what is refused, what it gives, what it leaves behind."""

from __future__ import annotations

import json

import jax
import pytest

from fuse_jax.config_read import ConfigError, default_config, read_config
from fuse_jax.data.order import sample_ids
from fuse_jax.fusion.inter_stage.costs import Costs, DecodeTable
from fuse_jax.fusion.inter_stage.policy import Plan, admission
from fuse_jax.placement.host import to_host
from fuse_jax.rollout.warmup import count_compilations
from fuse_jax.scoring.columns import Model
from fuse_jax.training import fused_rollout
from fuse_jax.training.config_check import check_config
from fuse_jax.training.context import open_run
from fuse_jax.training.fused_rollout import FusedRollout
from fuse_jax.training.run import train

COLUMNS = ("ref_log_probs",)


def settings(policy="serial", instances=2, **inter):
    config = default_config()
    config.mesh.data = instances
    config.model.vocab_size = 72
    config.model.hidden_size = 16
    config.model.intermediate_size = 16
    config.model.num_layers = 1
    config.model.num_heads = 1
    config.model.num_kv_heads = 1
    config.model.head_dim = 16
    config.rollout.slots = 4 * instances
    config.rollout.prefill_rows = 4 * instances
    config.rollout.max_prompt_length = 3
    config.rollout.max_new_tokens = 24
    config.compute.sequence_buckets = "32"
    config.compute.scoring_tokens = 128 * instances
    config.fusion.inter_stage.policy = policy
    config.fusion.inter_stage.instances = instances
    for key, value in inter.items():
        config.fusion.inter_stage[key] = value
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instances": 3}, r"inter_stage.instances=3: does not divide mesh.data=4"),
        ({"instances": 0}, r"inter_stage.instances=0"),
        ({"threshold": 5}, r"inter_stage.threshold=5: is read with .*policy=fixed or knee only"),
        ({"policy": "knee", "keep": 1}, r"inter_stage.keep=1: is read with .*policy=fixed only"),
        ({"policy": "knee", "threshold": -1}, r"inter_stage.threshold=-1"),
        ({"policy": "fixed", "keep": 1}, r"inter_stage.keep=1: without a threshold"),
        (
            {"policy": "fixed", "threshold": 4, "keep": 4},
            r"keep=4: must be from 1 to 3",
        ),
        ({"policy": "fixed", "threshold": 9, "keep": 2}, r"inter_stage.threshold=9: .* to 8"),
        ({"policy": "knees"}, r"inter_stage.policy='knees': use one of"),
    ],
)
def test_what_cannot_run_is_refused_at_start(change, message):
    config = settings(instances=4)
    for key, value in change.items():
        config.fusion.inter_stage[key] = value
    with pytest.raises(ConfigError, match=message):
        check_config(read_config(config), device_count=4)


def test_shares_of_slots_and_rows_must_be_whole():
    config = settings(instances=4)
    config.mesh.data = 4
    check_config(read_config(config), device_count=4)
    config.rollout.slots = 18
    with pytest.raises(ConfigError, match=r"rollout.slots=18"):
        check_config(read_config(config), device_count=4)


def test_the_knee_takes_a_threshold(tmp_path):
    """From the settings of a run to its plan, without and with lengths seen."""
    config = settings("knee", instances=4, threshold=3)
    check_config(read_config(config), device_count=4)
    run = open_run(read_config(config), tmp_path / "run", resume=False, say=lambda line: None)
    fused = FusedRollout(run, COLUMNS)
    costs = Costs(
        DecodeTable((1,), (16,), ((1.0,),)),
        dict.fromkeys(fused.instances[0].engine.prompt_buckets, 1.0),
        {"ref_log_probs": [1.0] * len(fused.geometry.buckets)},
        move_ms=1.0,
    )
    assert fused._plan(costs, [3] * 16, ())[0].threshold == 3
    fused.history = fused.history.extend([4, 20] * 8)
    plan, _ = fused._plan(costs, [3] * 16, ())
    assert (plan.policy, plan.threshold, plan.way) == ("knee", 3, "kv")
    assert plan.predicted_ms is not None


def test_a_plan_is_made_anew_once_lengths_are_predicted(tmp_path, monkeypatch):
    """Else alike lengths are packed together only if lengths happen to drift."""
    asked = []

    def choose(*args, predicted, ratios, **options):
        asked.append((predicted, ratios))
        return Plan("simulated")

    monkeypatch.setattr(fused_rollout, "choose", choose)
    run = open_run(
        read_config(settings("simulated")), tmp_path / "run", resume=False, say=lambda line: None
    )
    fused = FusedRollout(run, COLUMNS)
    prompts, responses = [b"one", b"two"] * 8, [4, 20] * 8
    for _ in range(4):
        predicted = fused.prompts.trusted(prompts)
        fused._plan(None, [3] * 16, predicted)
        fused.prompts.observe(prompts, responses)
    # Predictions are trusted from the third on: in the second it is seen how far.
    assert len(asked) == 2
    assert not asked[0][0] and asked[1][0] and asked[1][1]


@pytest.mark.parametrize("way", ["auto", "prefill", "kv"])
def test_a_run_says_that_its_last_digits_depend_on_wall_times(tmp_path, way):
    said = []
    config = read_config(settings("auto", migration=way))
    FusedRollout(open_run(config, tmp_path / "run", resume=False, say=said.append), COLUMNS)
    lines = [line for line in said if f"migration={way} measured times" in line]
    assert len(lines) == (way != "kv")


def models_of(run, draw_params):
    """Random models: trained ones on the mesh, frozen ones on the host."""
    found = {}
    for seed, role in enumerate(("actor", "reference")):
        params = draw_params(run.archs[role], seed, "lm")
        whole = jax.sharding.NamedSharding(run.mesh, jax.sharding.PartitionSpec())
        kept = to_host(params) if role == "reference" else jax.device_put(params, whole)
        found[role] = Model(run.archs[role], kept)
    return found


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory, draw_params):
    """Two iterations under a policy that moves samples and under the serial one."""
    found = {}
    for policy, more in (("fixed", {"threshold": 4, "keep": 1}), ("serial", {})):
        said = []
        workdir = tmp_path_factory.mktemp(policy)
        run = open_run(
            read_config(settings(policy, **more)), workdir, resume=False, say=said.append
        )
        fused, models = FusedRollout(run, COLUMNS), models_of(run, draw_params)
        if policy == "fixed":
            fused.precompile(models)
        with count_compilations() as late:
            outcomes = [
                fused(models, run.task.prompts[:16], sample_ids(iteration, 16), None)
                for iteration in range(2)
            ]
        found[policy] = fused, outcomes, late.count, said, workdir
    return found


def test_experience_is_that_of_the_serial_path(rollouts, same):
    for (mine, _), (other, _) in zip(rollouts["fixed"][1], rollouts["serial"][1], strict=True):
        same(mine.samples, mine.scored, (other.samples, other.scored))


def test_nothing_compiles_after_the_warm_up(rollouts):
    assert rollouts["fixed"][2] == 0


def test_an_iteration_tells_what_happened_and_leaves_its_timeline(rollouts):
    fused, outcomes, _, said, workdir = rollouts["fixed"]
    values = outcomes[0][1]
    assert values["fusion_keep"] == 1
    # 4 was asked for; less where decoding was measured to saturate, which is a matter of the hour.
    assert values["fusion_threshold"] == min(4, admission(fused._costs, fused.geometry))
    assert 0 <= values["scoring_hidden"] <= 1 and values["instances_failed"] == 0
    assert values["generation_seconds"] <= values["fusion_seconds"]
    assert any("inter-stage plan, fixed" in line for line in said)
    events = json.loads((workdir / "inter_stage_trace.json").read_text())["traceEvents"]
    assert {"score ref_log_probs", "decode"} <= {event["name"] for event in events}
    assert (workdir / "inter_stage.png").stat().st_size > 1000


def test_lengths_of_prompts_asked_again_are_remembered(rollouts):
    fused, outcomes, *_ = rollouts["fixed"]
    assert len(fused.history.lengths) == 32
    prompts = [sample.prompt_tokens.tobytes() for sample in outcomes[-1][0].samples]
    assert len(fused.prompts.predict(prompts)) == len(prompts)
    assert fused.prompts.ratios  # the second iteration asked again what the first had asked


def test_one_device_says_once_that_it_cannot_overlap(tmp_path):
    said = []
    config = read_config(settings("auto", instances=1))
    run = open_run(config, tmp_path / "run", resume=False, say=said.append)
    assert FusedRollout(run, COLUMNS).ways == ()
    assert sum("no other devices to overlap" in line for line in said) == 1


@pytest.mark.slow
@pytest.mark.parametrize("source", ["model", "function"])
def test_a_run_is_the_same_whatever_the_policy(tmp_path, source):
    def shortened(policy, **inter):
        config = settings(policy, instances=4, **inter)
        config.sft.steps = config.reward_training.steps = 4
        config.ppo.iterations, config.ppo.prompts_per_iteration = 3, 24
        config.ppo.minibatches = 2
        config.evaluation.prompts = 8
        if source == "function":
            config.stages = "sft,ppo"
            config.critic.init = "actor"
            config.reward.source = "function"
            path = tmp_path / "reward.py"
            path.write_text("def reward(prompt, response, meta):\n    return len(response) % 5\n")
            config.reward.function = f"{path}:reward"
        return config

    plans = {"serial": {}, "fixed": {"threshold": 6, "keep": 2}, "auto": {}, "stream": {}}
    rows = {}
    for policy, inter in plans.items():
        train(shortened(policy, **inter), tmp_path / policy)
        lines = (tmp_path / policy / "metrics.jsonl").read_text().splitlines()
        rows[policy] = [r for r in map(json.loads, lines) if r["stage"] == "ppo"]
    timed = ("seconds", "second", "hidden", "utilisation", "fusion", "migrated", "occupancy")
    timed = (*timed, "decode_steps", "time")
    for policy in plans:
        for mine, serial in zip(rows[policy], rows["serial"], strict=True):
            kept = [key for key in serial if not any(word in key for word in timed)]
            assert len(kept) > 10
            assert {key: mine[key] for key in kept} == {key: serial[key] for key in kept}
