"""Scoring samples in fixed shapes, dispatched without blocking.

A sample's bucket follows from its own length, the rows of a bucket from the bucket, and rows that
no sample fills are padding. So the bits of a sample's results depend on nothing but the sample and
the models, and scoring sample by sample while others are still generated (inter-stage fusion,
RLHFuse, arXiv 2409.13221) gives what scoring them all at the end gives.

The small unit is one column of one `Batch`: `batches`, `dispatch`, `Pending`. `submit` and
`collect` do the whole of it for callers that have all their samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from fuse_jax.buckets import Bucket, bucket_of
from fuse_jax.placement.host import start_copies
from fuse_jax.placement.mesh import row_shards
from fuse_jax.placement.sharding import batch_sharding, replicated
from fuse_jax.samples import Sample, SequenceBatch, sequence_batch
from fuse_jax.scoring.columns import (
    ROLES,
    Column,
    Model,
    PassOptions,
    Role,
    Scored,
    models_of,
    run_column,
    write_column,
)


class Shape(NamedTuple):
    """One compiled scoring shape: `rows` sequences of `length` tokens, `response` columns out."""

    column: Column
    rows: int
    length: int
    response: int


class Batch(NamedTuple):
    """Samples of one bucket, at most its rows; sample i is row i.

    The arrays are on the host, or on the mesh where several columns read them (`Scorer.batch`).
    """

    bucket: int
    samples: tuple[Sample, ...]
    arrays: SequenceBatch
    largest_id: int


class Pending(NamedTuple):
    """One column of one batch, dispatched: arrays that may still be in the making."""

    column: Column
    batch: Batch
    arrays: tuple[jax.Array, ...]

    def is_ready(self) -> bool:
        """Whether `write` would not wait."""
        return all(array.is_ready() for array in self.arrays)  # type: ignore[attr-defined]

    def write(self, scored: Sequence[Scored]) -> None:
        """Put the column of sample i of the batch into `scored[i]`. Waits for the device."""
        arrays = tuple(np.asarray(array) for array in self.arrays)
        for row, sample in enumerate(self.batch.samples):
            write_column(self.column, scored[row], arrays, row, len(sample.response_tokens))


class Submission(NamedTuple):
    """Samples whose columns are dispatched: `positions[i]` places the rows of `pending[i]`."""

    count: int
    pending: tuple[Pending, ...]
    positions: tuple[tuple[int, ...], ...]

    def ready(self) -> dict[Column, np.ndarray]:
        """Of each column, bool `[N]`: whether that sample's part of it is there. Never waits."""
        table: dict[Column, np.ndarray] = {}
        for pending, positions in zip(self.pending, self.positions, strict=True):
            column = table.setdefault(pending.column, np.zeros(self.count, bool))
            column[list(positions)] = pending.is_ready()
        return table


class Scorer:
    """Fills columns of samples on one mesh. Holds executables, never parameters.

    Not for several threads at once.
    """

    def __init__(
        self,
        mesh: Mesh,
        buckets: tuple[Bucket, ...],
        columns: Sequence[Column],
        *,
        max_response: int,
        pad_token: int = 0,
        options: PassOptions | None = None,
    ) -> None:
        """Args:
          mesh: axes `data`, `fsdp`, `tensor`; rows are cut over the first two.
          buckets: shapes, from `make_buckets(lengths, compute.scoring_tokens, row_shards(mesh))`.
          columns: what to compute of each sample.
          max_response: the longest response there can be (rollout.max_new_tokens).
          pad_token: fills rows up; any id the models know, results do not depend on it.

        Raises:
          ValueError: an unknown column, or rows of a bucket that the mesh does not divide.
        """
        unknown = [column for column in columns if column not in ROLES]
        if unknown or not columns:
            raise ValueError(f"columns={list(columns)!r}: choose some of {list(ROLES)}")
        shards = row_shards(mesh)
        for bucket in buckets:
            if bucket.rows % shards:
                raise ValueError(
                    f"{bucket} has rows that data * fsdp = {shards} does not divide: make the "
                    f"scoring buckets with row_multiple={shards}"
                )
        self.mesh = mesh
        self.buckets = buckets
        self.columns = tuple(columns)
        self.max_response = max_response
        self.pad_token = pad_token
        self.options = replace(options or PassOptions(), rows=batch_sharding(mesh))
        self._executables: dict[tuple, Any] = {}
        self._warm = False

    # What is compiled.

    def shapes(self) -> tuple[Shape, ...]:
        """Every shape this scorer can compile: one a column and bucket."""
        return tuple(
            Shape(column, bucket.rows, bucket.length, self._response(bucket))
            for column in self.columns
            for bucket in self.buckets
        )

    @property
    def compilations(self) -> int:
        """Executables compiled so far."""
        return len(self._executables)

    def precompile(self, models: Mapping[Role, Model]) -> int:
        """Compile every shape now, and return how many were new.

        Parameters may be arrays or `jax.ShapeDtypeStruct`s with their shardings. Whatever is
        compiled afterwards is logged with its shape as a warning.
        """
        before = self.compilations
        for column in self.columns:
            for index in range(len(self.buckets)):
                self._executable(column, index, models_of(column, models))
        self._warm = True
        return self.compilations - before

    def _response(self, bucket: Bucket) -> int:
        return min(bucket.length, self.max_response)

    def _executable(self, column: Column, index: int, models: tuple[Model, ...]) -> Any:
        # The parameters' shapes and shardings are not in the key: they stay what they are through
        # a run, and an executable refuses others loudly.
        archs = tuple(model.arch for model in models)
        key = (column, index, archs)
        if key not in self._executables:
            if self._warm:
                shape = self.shapes()[self.columns.index(column) * len(self.buckets) + index]
                logging.warning("scoring compiles after warm-up: %s", shape)
            self._executables[key] = self._compile(column, self.buckets[index], archs, models)
        return self._executables[key]

    def _compile(self, column: Column, bucket: Bucket, archs: tuple, models: tuple) -> Any:
        length, options = self._response(bucket), self.options

        def scoring_pass(params: tuple, batch: SequenceBatch) -> tuple[jax.Array, ...]:
            return run_column(column, archs, params, batch, length, options)

        rows = batch_sharding(self.mesh)

        def shaped(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)

        batch: Any = SequenceBatch(
            shaped(bucket.rows, bucket.length), shaped(bucket.rows), shaped(bucket.rows)
        )
        params = tuple(model.params for model in models)
        # Replicated results: a process of several can read all rows of its own copy.
        jitted = jax.jit(scoring_pass, out_shardings=replicated(self.mesh))
        return jitted.lower(params, batch).compile()

    # The small unit.

    def bucket_of(self, sample: Sample) -> int:
        """Index of the bucket of `sample`; a function of its own lengths alone.

        Raises ValueError: no bucket holds it, an empty prompt, or a response beyond `max_response`.
        """
        prompt, response = len(sample.prompt_tokens), len(sample.response_tokens)
        if prompt < 1:
            raise ValueError(f"sample {sample.sample_id} has an empty prompt: nothing predicts")
        if response > self.max_response:
            raise ValueError(
                f"sample {sample.sample_id} has {response} response tokens, more than "
                f"max_response={self.max_response}"
            )
        return bucket_of(sample.length, self.buckets)

    def group(self, samples: Iterable[Sample]) -> list[tuple[int, tuple[int, ...]]]:
        """(bucket, positions in `samples`) of each batch: full ones first come, first served."""
        open_groups: dict[int, list[int]] = {}
        groups: list[tuple[int, tuple[int, ...]]] = []
        for position, sample in enumerate(samples):
            bucket = self.bucket_of(sample)
            waiting = open_groups.setdefault(bucket, [])
            waiting.append(position)
            if len(waiting) == self.buckets[bucket].rows:
                groups.append((bucket, tuple(open_groups.pop(bucket))))
        groups += [(bucket, tuple(open_groups[bucket])) for bucket in sorted(open_groups)]
        return groups

    def batch(self, bucket: int, samples: Sequence[Sample]) -> Batch:
        """Lay `samples` of one bucket out and send them to the mesh, without waiting."""
        batch = self.lay_out(bucket, samples)
        return batch._replace(arrays=jax.device_put(batch.arrays, batch_sharding(self.mesh)))

    def lay_out(self, bucket: int, samples: Sequence[Sample]) -> Batch:
        """`samples` of one bucket in its shape, on the host: `dispatch` sends them along.

        For one column that is cheaper than sending them first.
        """
        for sample in samples:
            self._check_response_ids(sample)
        arrays = sequence_batch(samples, self.buckets[bucket], self.pad_token)
        if arrays.tokens.min() < 0:
            raise ValueError(f"negative token ids among samples {[s.sample_id for s in samples]}")
        return Batch(bucket, tuple(samples), arrays, int(arrays.tokens.max()))

    def _check_response_ids(self, sample: Sample) -> None:
        valid = self.options.valid_vocab
        if valid is not None and np.max(sample.response_tokens, initial=0) >= valid:
            raise ValueError(
                f"sample {sample.sample_id} has response tokens from valid_vocab={valid} on, which "
                "are padding of the vocabulary and can't have been sampled"
            )

    def dispatch(self, column: Column, batch: Batch, models: Mapping[Role, Model]) -> Pending:
        """Start one column of one batch and return at once (compiling first if it has to)."""
        used = models_of(column, models)
        for model in used:
            # A gather clamps ids it does not know without a word: refuse them here.
            if batch.largest_id >= model.arch.vocab_size:
                raise ValueError(
                    f"token id {batch.largest_id} is outside the vocabulary of "
                    f"{model.arch.vocab_size} that column {column!r} reads: the models have "
                    "different tokenizers"
                )
        executable = self._executable(column, batch.bucket, used)
        arrays = executable(tuple(model.params for model in used), batch.arrays)
        start_copies(arrays)
        return Pending(column, batch, arrays)

    # The whole of it.

    def submit(self, samples: Iterable[Sample], models: Mapping[Role, Model]) -> Submission:
        """Dispatch every column of every sample; waits for nothing but compilation."""
        samples = list(samples)
        pending, positions = [], []
        for bucket, members in self.group(samples):
            batch = self.batch(bucket, [samples[i] for i in members])
            for column in self.columns:
                pending.append(self.dispatch(column, batch, models))
                positions.append(members)
        return Submission(len(samples), tuple(pending), tuple(positions))

    def collect(self, submission: Submission) -> list[Scored]:
        """Results of each sample, in the order they were submitted in. Waits for the device."""
        scored = [Scored() for _ in range(submission.count)]
        for pending, positions in zip(submission.pending, submission.positions, strict=True):
            pending.write([scored[i] for i in positions])
        return scored

    def score(self, samples: Iterable[Sample], models: Mapping[Role, Model]) -> list[Scored]:
        """`submit`, then `collect`."""
        return self.collect(self.submit(samples, models))
