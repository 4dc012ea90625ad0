"""`launch/simulate.py inter-stage`: options that cannot be are named, before the work."""

import argparse

import pytest

from fuse_jax.fusion.inter_stage import study


def run(*words):
    parser = argparse.ArgumentParser()
    study.add_options(parser)
    return study.run(parser.parse_args(list(words)))


@pytest.mark.parametrize(
    "words, named",
    [
        (["--seed=-1"], "--seed -1: give a whole number"),
        (["--policy=auto", "--keep=2"], "--keep 2: it goes with --policy fixed only"),
        (["--policy=stream", "--threshold=2"], "--threshold 2: it goes with --policy fixed or"),
        (["--policy=knee", "--threshold=-4"], "--threshold -4: give 0 to 128"),
        (["--policy=knee", "--threshold=400"], "--threshold 400: give 0 to 128"),
        (["--policy=fixed", "--keep=1", "--instances=1"], "give --instances 2 or more"),
    ],
)
def test_options_that_cannot_be_are_named(words, named, tmp_path):
    with pytest.raises(study.StudyError) as refused:
        run("--samples=8", *words, f"--out={tmp_path}")
    assert named in str(refused.value)


@pytest.mark.parametrize("text", ["[1e400]", "[true]", "[2.7]", "[1" + "0" * 30 + "]", "0", "x"])
def test_files_of_impossible_lengths_are_refused(text, tmp_path):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(study.StudyError, match=r"--lengths .*lengths"):
        run(f"--lengths={tmp_path / 'lengths'}", f"--out={tmp_path}")
    (tmp_path / "lengths").write_bytes(bytes([255, 254, 0]))
    with pytest.raises(study.StudyError, match=r"--lengths .*lengths"):
        run(f"--lengths={tmp_path / 'lengths'}", f"--out={tmp_path}")


def test_an_unwritable_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(study.StudyError, match=r"--out=.*file: "):
        run("--samples=8", f"--out={tmp_path / 'file'}")
