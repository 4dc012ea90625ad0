"""The benchmark's arithmetic by hand, and (slow) one run of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fuse_jax.benchmarks.measure import (
    Dot,
    attention_flops,
    floor,
    forward_dots,
    peak_rss,
    with_backward,
)
from fuse_jax.benchmarks.rollout import least_dots, main, make_engine, parser, response_lengths
from fuse_jax.models.architecture import Architecture, parameter_count

ARCH = Architecture(vocab_size=50, hidden_size=16, intermediate_size=24, num_layers=3)


def test_forward_flops_are_two_a_weight_and_token():
    norms, embedding = 3 * 2 * 16 + 16, 50 * 16
    weights = parameter_count(ARCH) - norms - embedding
    assert sum(dot.flops for dot in forward_dots(ARCH, 7)) == 2 * 7 * weights
    headless = sum(dot.flops for dot in forward_dots(ARCH, 7, head="none"))
    assert headless == 2 * 7 * (weights - embedding)
    assert sum(d.flops for d in with_backward(forward_dots(ARCH, 7))) == 3 * 2 * 7 * weights


def test_attention_flops_of_three_queries():
    # Contexts 1, 2, 3: scores and mixing cost 2 FLOPs each a head dimension (2 heads x 32) a key.
    assert attention_flops(ARCH, [1, 2, 3]) == 3 * (1 + 2 + 3) * 64 * 4


def test_least_dots_count_prefill_and_decode_once():
    args = parser().parse_args(["--prompts", "32", "--slots", "16", "--prefill-rows", "8"])
    engine = make_engine(args)
    weights = 4 * (4 * 128 * 128 + 3 * 128 * 512)
    head = 128 * 1024
    flops = sum(dot.flops for dot in least_dots(engine, 32, 32 * 64))
    assert flops == 2 * (32 * 32 * weights + 32 * head + 32 * 63 * (weights + head))


def test_lengths_follow_the_flags():
    fixed = parser().parse_args(["--prompts", "5", "--new-tokens", "9"])
    assert response_lengths(fixed) == [9] * 5
    drawn = parser().parse_args(
        ["--prompts", "4000", "--new-tokens", "512", "--lengths", "lognormal", "--median", "50"]
    )
    lengths = np.array(response_lengths(drawn))
    assert 45 < np.median(lengths) < 55 and lengths.min() >= 1 and lengths.max() == 512
    assert response_lengths(drawn) == lengths.tolist()


def test_floor_is_a_positive_time_and_adds_up():
    one = floor([Dot(8, 16, 16, 10.0)], extra_flops=0.0)
    assert one.flops == 2 * 8 * 16 * 16 * 10 and one.cpu_s > 0 and one.wall_s > 0
    assert floor([Dot(8, 16, 16, 10.0)], extra_flops=one.flops).flops == 2 * one.flops
    assert peak_rss() > 50 * 2**20


@pytest.mark.slow
def test_the_command_prints_one_json_line(capsys):
    flags = "--hidden 16 --layers 1 --heads 2 --ffn 16 --vocab 32 --prompts 6 --prompt-length 4"
    flags += " --new-tokens 8 --slots 4 --prefill-rows 2 --chunk 2 --repeats 1"
    assert main([*flags.split(), "--lengths", "lognormal", "--median", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["generated_tokens"] == result["stats"]["generated_tokens"]
    assert result["measured_over_floor"] > 1 and 0 < result["occupancy"] <= 1
