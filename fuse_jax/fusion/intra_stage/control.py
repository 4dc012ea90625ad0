"""Work that only some devices do, inside one program for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

Flag = bool | Array


def choose(flag: Flag, yes: Callable, no: Callable, *operands: Any) -> Any:
    """`yes(*operands)` if `flag`, else `no(*operands)`: decided now, or by the device."""
    if isinstance(flag, bool):
        return (yes if flag else no)(*operands)
    return lax.cond(flag, yes, no, *operands)


def when(flag: Flag, change: Callable, *state: Any) -> Any:
    """`change(*state)` if `flag`, else `state`, as a tuple.

    A traced flag makes it a loop of no or one turn: XLA updates what a loop carries in place, while
    the branches of a conditional copy it, used or not. Gradients and slots are large: with
    conditionals a step took 1.3 times as long, and 1.3 times the temporary memory (4 devices, CPU).
    """
    if isinstance(flag, bool):
        return change(*state) if flag else state
    turns = jnp.asarray(flag, jnp.int32)
    return lax.fori_loop(0, turns, lambda _, carried: tuple(change(*carried)), state)
