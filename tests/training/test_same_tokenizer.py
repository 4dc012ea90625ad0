"""Models of other tokenizers are refused by name, even where table sizes fit."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuse_jax.config_read import ConfigError
from fuse_jax.data.countdown import Countdown
from fuse_jax.data.tokenizer import load_tokenizer
from fuse_jax.training.same_tokenizer import check_same_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    import importlib.util

    path = Path(__file__).resolve().parents[1] / "data" / "conftest.py"
    spec = importlib.util.spec_from_file_location("data_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.build_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat=True))


def changed(tokenizer, out, edit):
    shutil.copytree(tokenizer, out)
    content = json.loads((out / "tokenizer.json").read_text())
    edit(content["model"]["vocab"])
    (out / "tokenizer.json").write_text(json.dumps(content))
    return out


def config(**paths):
    roles = ("actor", "reference", "reward_model", "critic")
    return SimpleNamespace(**{r: SimpleNamespace(path=str(paths.get(r, ""))) for r in roles})


def check(tokenizer, vocabulary=None, **paths):
    said = []
    vocabulary = vocabulary or load_tokenizer(tokenizer)
    check_same_tokenizer(config(**paths), vocabulary, str(tokenizer), said.append)
    return said


def swap(vocab):
    first, second = [token for token in vocab if len(token) == 1][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]


@pytest.mark.parametrize("role", ["actor", "reference", "reward_model", "critic"])
def test_two_tokens_swapped_are_refused(tokenizer, tmp_path, role):
    other = changed(tokenizer, tmp_path / "other", swap)
    with pytest.raises(ConfigError, match=f"{role}.path=.*reads id .* as .*same tokenizer"):
        check(tokenizer, **{role: other})


def test_the_same_tokenizer_elsewhere_is_taken(tokenizer, tmp_path):
    shutil.copytree(tokenizer, tmp_path / "copy")
    assert check(tokenizer, actor=tokenizer, reward_model=tmp_path / "copy") == []


def test_what_cannot_be_compared_or_is_known_to_one_is_said(tokenizer, tmp_path):
    (tmp_path / "bare").mkdir()
    more = changed(tokenizer, tmp_path / "more", lambda vocab: vocab.update({"zzz": 5000}))
    first, second = check(tokenizer, reference=tmp_path / "bare", critic=more)
    assert "has no tokenizer" in first and "1 token ids" in second
    assert check("", Countdown(), actor=tmp_path / "bare") == []
