"""Reward functions that misbehave in every way the tests know; loaded by file path in workers."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time


def length(prompt, response, meta):
    return float(len(prompt) + len(response)) + meta.get("bonus", 0)


def process(prompt, response, meta):
    return float(os.getpid())


def jax_loaded(prompt, response, meta):
    ours = {name for name in sys.modules if name.startswith("fuse_jax")}
    heavy = {"jax", "jaxlib", "numpy", "flax"} & set(sys.modules)
    return float(bool(heavy) or "fuse_jax.scoring.scorer" in ours)


def in_main_thread(prompt, response, meta):
    signal.signal(signal.SIGALRM, lambda *_: None)  # ValueError outside the main thread
    return 1.0


def misbehave(prompt, response, meta):
    """What `prompt` says; anything unknown scores its length."""
    actions = {
        "sleep": lambda: time.sleep(3600),
        "spin": _spin,
        "spin in C": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
        "raise": lambda: 1 / 0,
        "exit": lambda: sys.exit(3),
        "hard exit": lambda: os._exit(7),
        "segfault": lambda: ctypes.string_at(0),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "print": lambda: print("x" * 3_000_000, flush=True) or sys.stdout.close() or 5.0,
        "nan": lambda: float("nan"),
        "inf": lambda: float("-inf"),
        "too large": lambda: 1e300,
        "none": lambda: None,
        "text": lambda: "1.0",
        "true": lambda: True,
        "integer": lambda: 3,
        "numpy": _numpy_scalar,
        "grandchild": lambda: subprocess.run(["sleep", meta["seconds"]]),
        "interrupt": _interrupt,
        "odd exception": _odd,
        "recursion": lambda: misbehave(prompt, response, meta),
    }
    return actions.get(prompt, lambda: float(len(prompt)))()


def _spin():
    while True:
        pass


def _numpy_scalar():
    import numpy as np

    return np.float32(2.5)


def _interrupt():
    raise KeyboardInterrupt


class _Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def _odd():
    raise _Unprintable


def two_arguments(prompt, response):
    return 0.0


not_callable = 3
