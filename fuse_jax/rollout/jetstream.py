"""The slot engine as a `jetstream.engine.engine_api.Engine` (google-jetstream 0.2.2).

JetStream is optional: it is archived and brings TensorFlow along. Only `jetstream_engine` imports
it, so this module loads without. The engine it returns is a real subclass that JetStream's own
orchestrator can drive.

Two contracts differ. JetStream's prefill gives no token, and its first `generate` after `insert`
gives the first one; ours draws the first token in prefill. So the adapter runs one token behind:
`generate` reports the token drawn before, then draws the next. And JetStream knows no random keys:
prompts are numbered in the order in which they are prefilled, and draw from `seed_key` and that
number.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from fuse_jax.models.transformer import Params
from fuse_jax.rollout.batcher import Request, prefill_arrays
from fuse_jax.rollout.engine import DecodeState, Engine, Rows


class ReportedState(NamedTuple):
    """Slots, and how many tokens of each have been given out, int32 `[slots]`."""

    slots: DecodeState
    reported: Array


class Verbs:
    """JetStream's abstract members in terms of `Engine`; `jetstream_engine` adds the base class."""

    _result_tokens: Any
    _tokenizer_parameters: Any

    def __init__(self, engine: Engine, params: Params, seed_key: Any, tokenizer_path: str) -> None:
        self._engine, self._seed_key = engine, seed_key
        self._params = engine.place_params(params)
        self._tokenizer_path = tokenizer_path
        self._numbers = itertools.count()

    def load_params(self, *args: Any, **kwargs: Any) -> Params:
        """The parameters the adapter was made with."""
        del args, kwargs
        return self._params

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: Rows | None = None,
        padded_tokens: Array,
        true_length: int,
    ) -> Rows:
        """Read one prompt, the first `true_length` of `padded_tokens` `[T]`. It is row 0."""
        if existing_prefix is not None:
            raise NotImplementedError("prefill on top of an existing prefix is not supported")
        engine, rollout = self._engine, self._engine.rollout
        prompt = np.asarray(padded_tokens, np.int32)[:true_length]
        bucket = engine.bucket_of(len(prompt))
        request = Request(next(self._numbers), prompt, rollout.max_new_tokens)
        arrays = prefill_arrays([request], rollout.prefill_rows, bucket)
        return engine.prefill(params, *arrays, self._seed_key)[0]

    def insert(self, prefix: Rows, decode_state: ReportedState, slot: int) -> ReportedState:
        """Put a prefilled prompt into `slot`. `decode_state` is donated."""
        rollout = self._engine.rollout
        index = np.full(rollout.prefill_rows, rollout.slots, np.int32)
        index[0] = slot
        slots = self._engine.insert(decode_state.slots, prefix, index)
        return ReportedState(slots, decode_state.reported.at[slot].set(0))

    def generate(self, params: Params, decode_state: ReportedState) -> tuple[ReportedState, Any]:
        """The next token of every slot, valid where there is one. `decode_state` is donated."""
        data, reported = _report(decode_state)
        slots, _ = self._engine.generate(params, decode_state.slots, self._seed_key)
        result = self._result_tokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )
        return ReportedState(slots, reported), result

    def init_decode_state(self, *args: Any, **kwargs: Any) -> ReportedState:
        """All slots empty."""
        del args, kwargs
        reported = jnp.zeros((self._engine.rollout.slots,), jnp.int32)
        return ReportedState(self._engine.init_decode_state(), reported)

    def get_prefix_destination_sharding(self) -> Any:
        """Where prefilled rows belong."""
        return self._engine.row_shardings()

    def get_tokenizer(self) -> Any:
        """JetStream's description of the tokenizer. Raises ValueError if none was given."""
        if not self._tokenizer_path:
            raise ValueError("jetstream_engine needs tokenizer_path=... to hand out a tokenizer")
        return self._tokenizer_parameters(path=self._tokenizer_path)

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self._engine.rollout.slots

    @property
    def samples_per_slot(self) -> int:
        """One response a slot."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt, tokens."""
        return self._engine.rollout.max_prompt_length

    @property
    def mesh(self) -> Mesh:
        """Devices of the engine."""
        return self._engine.mesh

    @property
    def colocated_cpus(self) -> None:
        """None: nothing runs beside the accelerators."""
        return None


@jax.jit
def _report(state: ReportedState) -> tuple[Array, Array]:
    """Columns token, valid, length so far `[slots, 3]`, and the new count of reported tokens."""
    slots, reported = state
    valid = reported < slots.generated
    reported = reported + valid
    return jnp.stack([slots.last_tokens, valid.astype(jnp.int32), reported], axis=1), reported


@functools.cache
def _adapter_class() -> type:
    try:
        from jetstream.engine import engine_api, tokenizer_pb2  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            f"google-jetstream 0.2.2 cannot be imported ({error}): "
            "pip install 'fuse_jax[jetstream]' (it brings TensorFlow, about 3 GB)"
        ) from error
    members = {
        "_result_tokens": engine_api.ResultTokens,
        "_tokenizer_parameters": tokenizer_pb2.TokenizerParameters,
    }
    return type("FuseJaxEngine", (Verbs, engine_api.Engine), members)


def jetstream_engine(
    engine: Engine, params: Params, *, seed_key: Any, tokenizer_path: str = ""
) -> Any:
    """`engine` behind JetStream 0.2.2's interface, one token a `generate`.

    Raises ImportError naming the extra if JetStream is missing, and ValueError unless
    `rollout.chunk` is 1: JetStream counts one token a step.
    """
    if engine.rollout.chunk != 1:
        raise ValueError(f"JetStream needs rollout.chunk=1, not {engine.rollout.chunk}")
    return _adapter_class()(engine, params, seed_key, tokenizer_path)
