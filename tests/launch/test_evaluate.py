"""Generate and score a prompt file: every prompt answered, meta handed on, refusals by name."""

import json

import numpy as np
import pytest

from fuse_jax.config_read import ConfigError
from fuse_jax.training.evaluate_files import evaluate_files, table_text

QUESTIONS = [
    {"question": f"There are {n} ducks; how many?", "answer": f"Count.\n#### {n}"}
    for n in range(1, 4)
] + [{"question": "how many eggs " * 40, "answer": "#### 0"}]
# Says what it was given: the row's answer must reach a reward function, and its own errors count.
REWARD = """
def reward(prompt, response, meta):
    assert isinstance(response, str)
    number = float(meta["answer"].split("####")[1])
    assert f"There are {number:.0f} ducks" in prompt and "<|assistant|>" in prompt
    if number == 2:
        raise RuntimeError("on purpose")
    return number
"""


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


def settings(model, **changed):
    small = {
        "actor.path": str(model),
        "data.task": "files",
        "rollout.max_prompt_length": 64,
        "rollout.max_new_tokens": 8,
        "rollout.slots": 8,
        "rollout.prefill_rows": 8,
        "rollout.prompt_buckets": "64",
        "compute.sequence_buckets": "72",
    }
    return small | {key.replace("__", "."): value for key, value in changed.items()}


def rows(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_reward_function_gets_prompt_response_and_the_rows_other_fields(
    chat_model, prompts, tmp_path
):
    (tmp_path / "rules.py").write_text(REWARD)
    said = []
    values = evaluate_files(
        settings(
            chat_model, data__prompts=str(prompts), reward__function=f"{tmp_path}/rules.py:reward"
        ),
        tmp_path / "out",
        say=said.append,
    )
    assert values["prompts"] == 3 and values["excluded"] == 1
    assert (values["score"], values["score_min"], values["score_max"]) == (2.0, 1.0, 3.0)
    assert [row["score"] for row in rows(tmp_path / "out")] == [1.0, None, 3.0]
    assert any("1 prompt longer than 64 tokens" in line for line in said)
    assert any("1 of 3 samples excluded (exception 1)" in line for line in said)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["score"] == 2.0
    table = table_text(tmp_path / "out", rows=2)
    assert table.count("score") == 2 and "score None" in table


def test_reward_model_scores_what_was_said(chat_model, chat_reward_model, prompts, tmp_path):
    given = settings(
        chat_model, data__prompts=str(prompts), reward_model__path=str(chat_reward_model)
    )
    several = {"evaluation.samples_per_prompt": 2}
    values = evaluate_files(given | several, tmp_path / "a", say=print)
    scores = [row["score"] for row in rows(tmp_path / "a")]
    assert len(scores) == 6 and np.isfinite(scores).all() and len(set(scores)) > 1
    assert values["score_min"] <= values["score"] <= values["score_max"]
    # A sample's own id seeds it: the same again, whatever else is asked for.
    evaluate_files(given | several | {"rollout.slots": 16}, tmp_path / "b")
    assert [row["response"] for row in rows(tmp_path / "b")] == [
        row["response"] for row in rows(tmp_path / "a")
    ]


def test_greedy_needs_no_luck(chat_model, prompts, tmp_path):
    given = settings(chat_model, data__prompts=str(prompts))
    for name, seed in (("a", 0), ("b", 1)):
        values = evaluate_files(given | {"seed": seed}, tmp_path / name, greedy=True)
        assert "score" not in values and "excluded" not in values
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_countdown_needs_no_tokenizer_and_has_gold(countdown_model, tmp_path):
    given = settings(countdown_model, **{"data.task": "countdown", "data.limit": 20})
    values = evaluate_files(given, tmp_path / "out")
    assert values["prompts"] == 20 and 0 <= values["gold"] <= 1
    assert all(row["gold"] in (True, False) for row in rows(tmp_path / "out"))


REFUSED = {
    "no model": ({"actor.path": ""}, "actor.path='': name the Hugging Face directory"),
    "no prompts": ({}, "data.prompts='': name a file"),
    "missing file": ({"data.prompts": "nowhere.jsonl"}, "data.prompts='nowhere.jsonl': no file at"),
    "no such key": ({"rollout.slts": 4}, "rollout.slts: no such key; did you mean rollout.slots"),
    "temperature": (
        {"data.prompts": "FILE", "rollout.temperature": -1.0},
        "rollout.temperature=-1.0: must not be negative",
    ),
    "no head": ({"data.prompts": "FILE", "reward_model.path": "MODEL"}, "a plain language model"),
    "two rewards": (
        {"data.prompts": "FILE", "reward_model.path": "MODEL", "reward.function": "a:b"},
        "give one of the two",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_by_key(case, chat_model, prompts, tmp_path):
    changed, message = REFUSED[case]
    names = {"FILE": str(prompts), "MODEL": str(chat_model)}
    changed = {key: names.get(value, value) for key, value in changed.items()}
    with pytest.raises(ConfigError, match=message):
        evaluate_files(settings(chat_model) | changed, tmp_path / "out")
    assert not (tmp_path / "out" / "samples.jsonl").exists()


def test_samples_are_not_written_over(chat_model, prompts, tmp_path):
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds samples already"):
        evaluate_files(settings(chat_model, data__prompts=str(prompts)), tmp_path)


def test_command(countdown_model, tmp_path, launch):
    out = tmp_path / "out"
    flags = ["--task=countdown", "--limit=3", "--max_prompt_length=3", "--max_new_tokens=4"]
    code, said = launch("evaluate.py", "--model", countdown_model, "--out", out, *flags)
    assert code == 0 and "gold" in said and "length_mean" in said
    assert len(rows(out)) == 3
    again, _ = launch("evaluate.py", "--model", countdown_model, "--out", out, *flags)
    assert again.startswith("error: --out=")
