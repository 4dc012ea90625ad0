"""A machine where the native library cannot be had: why, what to do, and what works without it."""

import warnings

import pytest

from fuse_jax.config import Config, FusionConfig, IntraStageConfig, MeshConfig
from fuse_jax.config_read import ConfigError
from fuse_jax.fusion.intra_stage import mailbox, native
from fuse_jax.fusion.intra_stage.transport import make_transport
from fuse_jax.models.architecture import Architecture
from fuse_jax.training.pipeline_check import check_pipeline, transports

compiled = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def unwritable(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSE_JAX_NATIVE", str(tmp_path / "file" / "below"))
    return "FUSE_JAX_NATIVE=", "below cannot be written (Not a directory)", "to a directory that"


def silent(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", script(tmp_path / "silent", "exit 3"))
    return "CXX=", "silent does not tell its version (exit status 3; it said nothing)", "unset"


def talkative(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSE_JAX_NATIVE", str(tmp_path / "cache"))
    says = '[ "$1" = --version ] || { echo "one: error: disk full" >&2; echo "  ^" >&2; exit 1; }'
    monkeypatch.setenv("CXX", script(tmp_path / "talkative", says))
    return "talkative does not compile mailbox.cc (exit status 1; one: error: disk full)", "CXX"


def unloadable(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSE_JAX_NATIVE", str(tmp_path / "cache"))
    says = 'while [ $# -gt 1 ]; do shift; done; echo junk > "$1"'
    monkeypatch.setenv("CXX", script(tmp_path / "junk", f'[ "$1" = --version ] || {{ {says}; }}'))
    return "mailbox.cc does not load", "remove it"


BROKEN = [pytest.param(unwritable, marks=compiled), silent, talkative, unloadable]


@pytest.mark.parametrize("broken", BROKEN)
def test_without_its_library_the_mailbox_is_refused_and_ticks_go_on(broken, monkeypatch, tmp_path):
    words = broken(monkeypatch, tmp_path)
    why = mailbox.unavailable_because()
    assert all(word in why for word in words) and "\n" not in why, why
    with pytest.raises(native.NativeError) as caught:
        native.load(mailbox.SOURCE)
    assert str(caught.value) == why

    with pytest.warns(UserWarning, match="tasks are not noted") as told:
        pair = make_transport("pair", 2)
    assert getattr(pair, "program", 0) is None and why in str(told[0].message)
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        assert getattr(make_transport("ring", 2), "program", 0) is None

    assert transports(2) == {"mailbox": why, "dispatch": "", "pair": "", "ring": ""}
    settings = IntraStageConfig(transport="mailbox")
    config = Config(
        model=Architecture(num_layers=2),
        mesh=MeshConfig(1, 1, 1, 2),
        fusion=FusionConfig(intra_stage=settings),
    )
    with pytest.raises(ConfigError) as refused:
        check_pipeline(config)
    assert why in str(refused.value) and "or use 'auto'" in str(refused.value)


def test_a_failure_is_not_tried_again(monkeypatch, tmp_path):
    count = tmp_path / "count"
    monkeypatch.setenv("CXX", script(tmp_path / "counting", f"echo >> {count}; exit 1"))
    assert mailbox.unavailable_because() == mailbox.unavailable_because() != ""
    assert len(count.read_text().splitlines()) == 1


def test_what_the_compiler_said_is_on_the_error(monkeypatch, tmp_path):
    talkative(monkeypatch, tmp_path)
    with pytest.raises(native.NativeError) as caught:
        native.build(mailbox.SOURCE)
    assert "  ^" in caught.value.__notes__[0]


def test_without_a_home_it_asks_for_a_directory(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native.Path, "home", homeless)
    monkeypatch.delenv("FUSE_JAX_NATIVE", raising=False)
    with pytest.raises(native.NativeError, match="FUSE_JAX_NATIVE"):
        native.default_directory()
    monkeypatch.setenv("FUSE_JAX_NATIVE", "elsewhere")
    assert str(native.default_directory()) == "elsewhere"
