"""Prompt building, stop ids and decoding of text tokenizers."""

import contextlib
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuse_jax.data.records import DataError
from fuse_jax.data.tokenizer import ChatRefused, load_tokenizer

BOS, EOS, USER, ASSISTANT, END = 1, 2, 3, 4, 5


def test_ids_of_several_configs(chat_tokenizer):
    assert chat_tokenizer.stop_token_ids == (EOS, END)  # the tokenizer's own first
    assert chat_tokenizer.pad_token_id == 0
    assert chat_tokenizer.vocab_size == len(chat_tokenizer.hf) < 384  # the table's padding is out


def test_plain_prompt_has_one_bos_and_no_eos(plain_tokenizer):
    added = plain_tokenizer.hf("hi").input_ids
    assert added[0] == BOS and added[-1] == EOS  # what the tokenizer does on its own
    (ids,) = plain_tokenizer.encode_prompts(["hi"], templated=False)
    assert ids == added[:-1]
    (doubled,) = plain_tokenizer.encode_prompts(["<s>hi</s>"], templated=False)
    assert doubled == ids


def test_templated_prompt_has_one_bos_and_no_eos(chat_tokenizer):
    text = chat_tokenizer.render_chat([{"role": "user", "content": "hi"}])
    (ids,) = chat_tokenizer.encode_prompts([text], templated=True)
    assert ids[:2] == [BOS, USER] and ids[-2:] == [END, ASSISTANT]
    assert ids.count(BOS) == 1 and EOS not in ids
    (twice,) = chat_tokenizer.encode_prompts(["<s>" + text], templated=True)
    assert twice == ids
    (as_written,) = chat_tokenizer.encode_prompts(["<|user|>hi"], templated=True)
    assert as_written[0] == USER  # a template without BOS gets none: the model never saw one


def test_prompt_may_end_in_another_stop_id(chat_tokenizer):
    (ids,) = chat_tokenizer.encode_prompts(["<s>hi<|end|>"], templated=True)
    assert ids[-1] == END


def test_no_bos_where_the_tokenizer_adds_none(tmp_path, make_tokenizer):

    tokenizer = load_tokenizer(make_tokenizer(tmp_path, chat=False, adds="$A"))
    (ids,) = tokenizer.encode_prompts(["hi"], templated=False)
    assert BOS not in ids and tokenizer.decode(ids) == "hi"


def test_responses_end_in_one_stop_id(chat_tokenizer):
    plain, own, other = chat_tokenizer.encode_responses(["so", "so</s>", "so<|end|>"])
    assert plain == own and plain[-1] == EOS and plain.count(EOS) == 1
    assert other[-1] == END


@given(text=st.text(max_size=40))
def test_round_trip(chat_tokenizer, text):
    (ids,) = chat_tokenizer.encode([text])
    assert all(0 <= i < chat_tokenizer.vocab_size for i in ids)
    if "<" not in text:
        assert chat_tokenizer.decode(ids) == text


def test_decode_leaves_special_tokens_out(chat_tokenizer):
    (ids,) = chat_tokenizer.encode(["<|user|> a , b<|end|>"])
    assert chat_tokenizer.decode(ids) == " a , b"


def test_chat_refused(chat_tokenizer):
    with pytest.raises(ChatRefused, match="alternate"):
        chat_tokenizer.render_chat([{"role": "user", "content": c} for c in "ab"])


def test_pad_falls_back_to_the_stop_id(tmp_path, plain_tokenizer):
    directory = shutil.copytree(plain_tokenizer.hf.name_or_path, tmp_path / "t")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(directory).pad_token_id == EOS


def test_no_stop_token_at_all(tmp_path, plain_tokenizer):
    directory = shutil.copytree(plain_tokenizer.hf.name_or_path, tmp_path / "t")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("config.json", "generation_config.json"):
        (directory / name).unlink()
    with pytest.raises(DataError, match="no stop token: set eos_token"):
        load_tokenizer(directory)


def test_config_of_another_model(tmp_path, plain_tokenizer):
    directory = shutil.copytree(plain_tokenizer.hf.name_or_path, tmp_path / "t")
    (directory / "generation_config.json").write_text('{"eos_token_id": [128009]}')
    with pytest.raises(DataError, match=r"\[128009\] are outside the vocabulary"):
        load_tokenizer(directory)


def test_missing_and_broken_directories(tmp_path):
    with pytest.raises(DataError, match="no directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"neither tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="can't load this tokenizer"):
        load_tokenizer(tmp_path)


def test_remote_code_is_not_run(tmp_path, plain_tokenizer):
    directory = shutil.copytree(plain_tokenizer.hf.name_or_path, tmp_path / "t")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Evil"
    settings["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    ran = tmp_path / "ran"
    (directory / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    # Whether transformers refuses or takes a class of its own is its matter; the code stays put.
    with contextlib.suppress(DataError):
        load_tokenizer(directory)
    assert not ran.exists()
