"""What every benchmark shares: clocks, peak memory, and a floor from XLA's own dot.

A time alone says nothing about another machine. So each benchmark counts the multiply-adds its
model cannot do without, runs XLA's dot at exactly those shapes in the same process, and reports
measured / floor beside the seconds. On a shared machine the CPU-seconds are the figure to trust.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fuse_jax.models.architecture import Architecture


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: CPU (all threads of this process) and wall."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Dot:
    """`count` products `[m, k] x [k, n]`."""

    m: int
    k: int
    n: int
    count: float = 1.0

    @property
    def flops(self) -> float:
        """Multiplications and additions together."""
        return 2.0 * self.m * self.k * self.n * self.count


@dataclass(frozen=True)
class Floor:
    """The dots of a computation: their FLOPs, and the CPU- and wall-seconds XLA's dot takes."""

    flops: float
    cpu_s: float
    wall_s: float

    @property
    def gflops_per_cpu_s(self) -> float:
        """The rate behind it."""
        return self.flops / self.cpu_s / 1e9


def peak_rss() -> int:
    """Highest resident memory of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def timed(function: Callable[[], Any]) -> tuple[Any, Timing]:
    """Result of `function()` and its time; device work it returns is waited for."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = jax.block_until_ready(function())
    return result, Timing(time.process_time() - cpu, time.perf_counter() - wall)


def repeated(function: Callable[[], Any], repeats: int) -> list[Timing]:
    """Times of `repeats` runs. The caller warms up (compiles) beforehand."""
    return [timed(function)[1] for _ in range(repeats)]


def best(timings: Iterable[Timing]) -> Timing:
    """Smallest CPU and smallest wall time: what disturbance by others can only add to."""
    timings = list(timings)
    return Timing(min(t.cpu_s for t in timings), min(t.wall_s for t in timings))


def median(timings: Iterable[Timing]) -> Timing:
    """Median CPU and median wall time."""
    timings = list(timings)
    return Timing(
        statistics.median(t.cpu_s for t in timings), statistics.median(t.wall_s for t in timings)
    )


def forward_dots(
    arch: Architecture, rows: int, *, head: Literal["lm", "scalar", "none"] = "lm", times: float = 1
) -> list[Dot]:
    """Weight products of a forward pass over `rows` tokens at once, done `times` times."""
    d, q, kv = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    layers = arch.num_layers * times
    dots = [
        Dot(rows, d, q, layers),
        Dot(rows, d, kv, 2 * layers),
        Dot(rows, q, d, layers),
        Dot(rows, d, arch.intermediate_size, 2 * layers),
        Dot(rows, arch.intermediate_size, d, layers),
    ]
    if head != "none":
        dots.append(Dot(rows, d, arch.vocab_size if head == "lm" else 1, times))
    return dots


def with_backward(dots: Iterable[Dot]) -> list[Dot]:
    """`dots` and, for each, the product for its input's gradient and the one for its weight's."""
    return [
        other
        for dot in dots
        for other in (
            dot,
            Dot(dot.m, dot.n, dot.k, dot.count),
            Dot(dot.k, dot.m, dot.n, dot.count),
        )
    ]


def attention_flops(arch: Architecture, contexts: Iterable[int]) -> float:
    """FLOPs of scores and mixing for queries that see `contexts` keys each, over all layers."""
    return 4.0 * arch.num_layers * arch.num_heads * arch.head_dim * float(sum(contexts))


def floor(dots: Iterable[Dot], *, dtype: Any = jnp.float32, extra_flops: float = 0.0) -> Floor:
    """Least time of `dots` by XLA's own dot at their shapes, measured now.

    `extra_flops` (attention, whose shapes vary) are charged at the mean rate of the dots.
    """
    dots = list(dots)
    timings = {shape: dot_time(*shape, dtype=dtype) for shape in {(d.m, d.k, d.n) for d in dots}}
    flops = sum(d.flops for d in dots)
    cpu = sum(timings[d.m, d.k, d.n].cpu_s * d.count for d in dots)
    wall = sum(timings[d.m, d.k, d.n].wall_s * d.count for d in dots)
    more = 1.0 + extra_flops / flops
    return Floor(flops * more, cpu * more, wall * more)


def dot_time(m: int, k: int, n: int, *, dtype: Any = jnp.float32) -> Timing:
    """Seconds of one XLA product `[m, k] x [k, n]`, from a loop long enough to measure."""
    repeats = max(4, int(2e8 / (2.0 * m * k * n)))

    @jax.jit
    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(_: int, x: jax.Array) -> jax.Array:
            # The next product needs this one's result, so no repetition can be dropped; only one
            # column goes on, so that little is added to the product itself.
            return jax.lax.dynamic_update_slice(x, (x @ w)[:, :1] * 1e-20, (0, 0))

        return jax.lax.fori_loop(0, repeats, body, x)

    x, w = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
    jax.block_until_ready(loop(x, w))
    least = best(repeated(lambda: loop(x, w), 5))
    return Timing(least.cpu_s / repeats, least.wall_s / repeats)


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures: versions, device, cores, threading flags."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


@contextlib.contextmanager
def controller_apart() -> Iterator[None]:
    """One core for the calling thread, and the others for the devices, as far as there are others.

    Else the host's work in a paced run is measured with its core's caches full of the devices'
    models, and behind them in the queue for it. Threads of devices that exist already stay.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        yield
        return
    try:
        os.sched_setaffinity(0, cores[1:])
        jax.devices()  # starts their threads, which stay on the cores that their maker had
        os.sched_setaffinity(0, cores[:1])
        yield
    finally:
        os.sched_setaffinity(0, cores)
