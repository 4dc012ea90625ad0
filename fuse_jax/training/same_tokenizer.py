"""All models of a run read the same token ids: a directory with another tokenizer is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuse_jax.config import Config
from fuse_jax.config_read import ConfigError
from fuse_jax.data.tokenizer import TextTokenizer, Vocabulary, load_tokenizer

ROLES = ("actor", "reference", "reward_model", "critic")
FILES = ("tokenizer.json", "tokenizer_config.json")


def check_same_tokenizer(
    config: Config, vocabulary: Vocabulary, own: str, say: Callable[[str], None]
) -> None:
    """Refuse a model directory whose tokenizer gives an id of `vocabulary` to another token.

    A table of the right size would take the ids and score nonsense without a word. `own` is the
    directory `vocabulary` was read from. Tokens that only one side has are said, not refused
    (reward models are often given a padding token of their own).

    Raises:
      ConfigError: naming the key, an id and its two tokens.
    """
    if not isinstance(vocabulary, TextTokenizer):
        return
    ours = {index: token for token, index in vocabulary.hf.get_vocab().items()}
    for role in ROLES:
        path = getattr(config, role).path
        if not path or Path(path).resolve() == Path(own).resolve():
            continue
        if not any((Path(path) / name).is_file() for name in FILES):
            say(f"{role}.path={path!r} has no tokenizer: taken to read the ids of {own!r}")
            continue
        theirs = {index: token for token, index in load_tokenizer(path).hf.get_vocab().items()}
        for index in sorted(ours.keys() & theirs.keys()):
            if ours[index] != theirs[index]:
                raise ConfigError(
                    f"{role}.path={path!r}: its tokenizer reads id {index} as {theirs[index]!r}, "
                    f"the run's ({own!r}) as {ours[index]!r}: use a model with the same tokenizer"
                )
        if alone := len(ours.keys() ^ theirs.keys()):
            say(f"{role}.path={path!r}: {alone} token ids are known to one tokenizer only")
