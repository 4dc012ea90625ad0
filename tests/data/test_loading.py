"""Layouts, filters and their counts, and the real HH-RLHF and GSM8K files."""

import json

import pytest

from fuse_jax.data.loading import load_demonstrations, load_preferences, load_prompts
from fuse_jax.data.records import DataError

STOP = 2
HH = "\n\nHuman: hello\n\nAssistant: hi\n\nHuman: {}\n\nAssistant:"


def hh(question, chosen, rejected, other=None):
    left, right = HH.format(question), HH.format(other or question)
    return {"chosen": left + chosen, "rejected": right + rejected}


@pytest.fixture
def file(tmp_path):
    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def pairs(path, tokenizer, **kwargs):
    kwargs = {"max_prompt_tokens": 200, "max_response_tokens": 50, "log": lambda _: None} | kwargs
    return load_preferences(path, tokenizer, **kwargs)


def shown(tokenizer, tokens):
    return tokenizer.hf.decode(tokens.tolist())


def test_hh_pair_plain_and_chat(file, plain_tokenizer, chat_tokenizer):
    path = file(hh("why?", " because", " no"))
    (pair,), _ = pairs(path, plain_tokenizer)
    assert shown(plain_tokenizer, pair.prompt_tokens) == "<s>" + HH.format("why?")
    assert shown(plain_tokenizer, pair.chosen_tokens) == " because</s>"
    assert shown(plain_tokenizer, pair.rejected_tokens) == " no</s>"
    (pair,), _ = pairs(path, chat_tokenizer)
    assert shown(chat_tokenizer, pair.prompt_tokens) == (
        "<s><|user|>hello<|end|><|assistant|>hi<|end|><|user|>why?<|end|><|assistant|>"
    )
    assert shown(chat_tokenizer, pair.chosen_tokens) == "because</s>"
    (same,), _ = pairs(path, chat_tokenizer, chat=False)
    assert shown(chat_tokenizer, same.prompt_tokens) == "<s>" + HH.format("why?")


def test_every_layout_of_pairs_reads_alike(file, chat_tokenizer):
    user, yes, no = (
        {"role": r, "content": c} for r, c in (("user", "q"), *[("assistant", "y")] * 2)
    )
    no = no | {"content": "n"}
    rows = [
        {"prompt": "q", "chosen": "y", "rejected": "n"},
        {"prompt": [user], "chosen": "y", "rejected": "n"},
        {"prompt": [user], "chosen": [yes], "rejected": [no]},
        {"prompt": "q", "chosen": [yes], "rejected": [no]},
        {"prompt": "q", "chosen": [user, yes], "rejected": [user, no], "messages": [user, yes]},
        {"chosen": "\n\nHuman: q\n\nAssistant: y", "rejected": "\n\nHuman: q\n\nAssistant: n"},
    ]
    loaded, counts = pairs(file(*rows), chat_tokenizer)
    assert counts.kept == len(rows)
    texts = {
        tuple(
            shown(chat_tokenizer, t) for t in (p.prompt_tokens, p.chosen_tokens, p.rejected_tokens)
        )
        for p in loaded
    }
    assert texts == {("<s><|user|>q<|end|><|assistant|>", "y</s>", "n</s>")}


def test_margin(file, plain_tokenizer):
    row = {"prompt": "q", "chosen": "y", "rejected": "n"}
    loaded, _ = pairs(file(row, row | {"margin": 1.5}, row | {"margin": None}), plain_tokenizer)
    assert [pair.margin for pair in loaded] == [0.0, 1.5, 0.0]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 'margin' must be a number >= 0"):
        pairs(file(row | {"margin": "big"}), plain_tokenizer)


def test_noisy_pairs_are_counted(file, plain_tokenizer):
    printed = []
    path = file(
        hh("a", " yes", " no"),
        hh("a", " yes", " no", other="b"),
        hh("a", " yes", " yes"),
        hh("a", " ", " no"),
        {"chosen": HH.format("a") + " yes\n\nHuman: more", "rejected": HH.format("a") + " no"},
        hh("a " * 300, " yes", " no"),
        hh("a", " yes" * 60, " no"),
    )
    loaded, counts = pairs(path, plain_tokenizer, log=printed.append)
    assert len(loaded) == counts.kept == 1 and counts.rows == 7
    assert counts.dropped == {
        "pair with different prompts": 1,
        "pair with equal answers": 1,
        "pair with an empty answer": 1,
        "transcript without a last answer": 1,
        "prompt longer than 200 tokens": 1,
        "response longer than 50 tokens": 1,
    }
    assert printed == [str(counts)] and "7 rows read, 1 kept; dropped: 1 pair with" in printed[0]


def test_truncation_is_counted_and_never_makes_equals(file, plain_tokenizer):
    path = file(hh("a", "x" * 60, "y" * 60), hh("a", "x" * 60, "x" * 70), hh("a", " yes", " no"))
    loaded, counts = pairs(path, plain_tokenizer, max_response_tokens=10, long_responses="truncate")
    assert len(loaded[0].chosen_tokens) == len(loaded[0].rejected_tokens) == 10
    assert STOP not in loaded[0].chosen_tokens and loaded[1].chosen_tokens[-1] == STOP
    assert counts.dropped == {"pair with answers equal once cut": 1}
    assert counts.changed == {"pair cut to the first 10 tokens": 1}
    assert counts.rows == counts.kept + sum(counts.dropped.values())


def test_prompts_keep_ids_text_and_other_fields(file, plain_tokenizer):
    path = file({"prompt": "a " * 99}, {"prompt": "short", "answer": "7"}, {"question": "Q ?"})
    loaded, counts = load_prompts(path, plain_tokenizer, max_prompt_tokens=20, log=lambda _: None)
    assert [p.id for p in loaded] == [1, 2]
    assert loaded[0].text == "short" and loaded[0].meta == {"answer": "7"}
    assert loaded[1].text == "Question: Q ?\nAnswer:"
    assert counts.dropped == {"prompt longer than 20 tokens": 1}
    assert loaded[0].tokens.dtype == "int32" and not loaded[0].tokens.flags.writeable


def test_limit_boundary_is_kept(file, plain_tokenizer):
    """A prompt of exactly the limit stays; one more token and it goes."""
    path = file({"prompt": "abc"})
    (prompt,), _ = load_prompts(path, plain_tokenizer, max_prompt_tokens=50)
    n = len(prompt.tokens)
    assert load_prompts(path, plain_tokenizer, max_prompt_tokens=n)[1].kept == 1
    with pytest.raises(DataError, match="nothing left"):
        load_prompts(path, plain_tokenizer, max_prompt_tokens=n - 1)


def test_limit(file, plain_tokenizer):
    path = file(*({"prompt": str(i)} for i in range(9)))
    loaded, counts = load_prompts(path, plain_tokenizer, max_prompt_tokens=20, limit=4)
    assert [p.text for p in loaded] == list("0123") and "stopped at the limit" in str(counts)


def test_refused_conversations_are_counted(file, chat_tokenizer):
    user = {"role": "user", "content": "a"}
    path = file({"messages": [user, user]}, {"messages": [user]})
    _, counts = load_prompts(path, chat_tokenizer, max_prompt_tokens=50)
    assert list(counts.dropped) == [
        "conversation refused by the chat template (roles must alternate)"
    ]


def test_demonstrations(file, chat_tokenizer):
    user, told = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [
        {"messages": [user, told]},
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "completion": "a"},
        {"question": "q", "answer": "a"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "response": " "},
    ]
    limits = {"max_prompt_tokens": 50, "max_response_tokens": 50}
    loaded, counts = load_demonstrations(file(*rows), chat_tokenizer, **limits)
    assert {shown(chat_tokenizer, d.response_tokens) for d in loaded} == {"a</s>"}
    assert len({d.prompt_tokens.tobytes() for d in loaded}) == 1
    assert counts.kept == 5 and counts.dropped == {"empty answer": 1}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no answer to imitate"):
        load_demonstrations(file({"messages": [user]}), chat_tokenizer, **limits)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "a"}, r"fields \['text'\] match no known layout: 'chosen'"),
        ({"prompt": 3}, "'prompt' must be a string, got '3'"),
        ({"messages": []}, "'messages' must be a list of at least one message"),
        ({"messages": [{"role": "user"}]}, "needs 'role' and 'content' strings"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "nothing it answers"),
        ({"chosen": "a"}, "a pair needs 'chosen' and 'rejected'; no 'rejected' here"),
        ({"chosen": "a", "rejected": "b"}, "not an HH-RLHF transcript"),
        (
            {"prompt": "p", "chosen": [{"role": "user", "content": "a"}], "rejected": "b"},
            "last mes",
        ),
        ({"question": "q", "answer": 3}, "'answer' must be a string"),
    ],
)
def test_malformed_rows_name_file_and_line(file, chat_tokenizer, row, message):
    path = file({"prompt": "fine"}, row)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*" + message):
        load_prompts(path, chat_tokenizer, max_prompt_tokens=50)


def test_bad_arguments(file, plain_tokenizer):
    path = file({"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(DataError, match=":1: messages need a chat template"):
        load_prompts(path, plain_tokenizer, max_prompt_tokens=50)
    with pytest.raises(DataError, match="no chat template: set chat=False"):
        load_prompts(path, plain_tokenizer, max_prompt_tokens=50, chat=True)
    with pytest.raises(DataError, match="long_responses must be 'drop' or 'truncate'"):
        pairs(path, plain_tokenizer, long_responses="cut")
    for name in ("max_prompt_tokens", "max_response_tokens", "limit"):
        with pytest.raises(DataError, match=f"{name} must be at least 1"):
            pairs(path, plain_tokenizer, **{name: 0})
    with pytest.raises(DataError, match=":1: no 'chosen' and 'rejected' here"):
        pairs(file({"prompt": "a"}), plain_tokenizer)


def test_real_hh_pairs(data_dir, plain_tokenizer):
    path = data_dir / "hh-rlhf"
    loaded, counts = pairs(path, plain_tokenizer, max_prompt_tokens=9999, max_response_tokens=9999)
    assert (counts.rows, counts.kept) == (2312, 2303)
    assert counts.dropped == {"pair with different prompts": 5, "pair with an empty answer": 4}
    assert all(p.chosen_tokens.tobytes() != p.rejected_tokens.tobytes() for p in loaded)
    text = plain_tokenizer.decode(loaded[0].prompt_tokens)
    assert text.startswith("\n\nHuman: what are some pranks with a pen") and text.endswith(
        "\n\nHuman: okay some of these do not have anything to do with pens\n\nAssistant:"
    )


def test_real_hh_prompts_through_the_chat_template(data_dir, chat_tokenizer):
    _, counts = load_prompts(data_dir / "hh-rlhf", chat_tokenizer, max_prompt_tokens=9999)
    refused = "conversation refused by the chat template (roles must alternate)"
    assert (counts.rows, counts.kept) == (2312, 2303)
    assert counts.dropped == {"pair with different prompts": 5, refused: 4}


def test_real_gsm8k(data_dir, chat_tokenizer):
    from fuse_jax.data.gsm8k import reward

    prompts, counts = load_prompts(
        data_dir / "gsm8k" / "test.jsonl", chat_tokenizer, max_prompt_tokens=9999
    )
    assert counts.rows == counts.kept == 1319 and not counts.dropped
    assert "<|user|>Janet’s ducks lay 16 eggs" in prompts[0].text
    assert sum(reward(p.text, p.meta["answer"], p.meta) for p in prompts) == 1319
    assert sum(reward(p.text, p.meta["answer"] + "1", p.meta) for p in prompts) == 0
