"""A toy PPO mini-batch, its serial gradients, and a compiled pipeline for it."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import ppo_numpy as toy

from fuse_jax.buckets import Bucket
from fuse_jax.fusion.intra_stage.baselines import alone, chimera_like, concatenated_1f1b
from fuse_jax.fusion.intra_stage.dispatch import Dispatch
from fuse_jax.fusion.intra_stage.executor import collect, pipeline_mesh
from fuse_jax.fusion.intra_stage.layout import (
    Layout,
    deal_micro_batches,
    most_rows,
    relative_lengths,
    trained_pipelines,
)
from fuse_jax.fusion.intra_stage.problem import MODELS, Pipeline, Problem
from fuse_jax.fusion.intra_stage.stages import join_params, split_params
from fuse_jax.fusion.intra_stage.tables import slots_needed
from fuse_jax.fusion.intra_stage.transport import make_transport
from fuse_jax.models.transformer import init
from fuse_jax.training.gradients import finish_metrics, serial_gradients
from fuse_jax.training.minibatch import cut_minibatch
from fuse_jax.training.pipeline_engine import place_rows
from fuse_jax.training.pipeline_gradients import PipelineGradients, model_stages
from fuse_jax.training.pipeline_shared import counts_of

ONE = (Bucket(16, 2),)
TWO = (Bucket(8, 2), Bucket(16, 2))
TIMES = ((5.0, 10.0, 4.0), (3.0, 6.0, 2.0))
KL = 0.3
serial = jax.jit(serial_gradients, static_argnames=("hp", "train"))


def hyper_parameters(layers, *, tied=False, kv_heads=1, **kwargs):
    """The toy's settings with as many layers of actor and critic as `layers` says."""
    sizes = {"tie_embeddings": tied, "num_kv_heads": kv_heads}
    return dataclasses.replace(
        toy.hyper_parameters(**kwargs),
        actor=dataclasses.replace(toy.ACTOR, num_layers=layers[0], **sizes),
        critic=dataclasses.replace(toy.CRITIC, num_layers=layers[1]),
    )


def parameters(hp, seed=1):
    actor, critic, head = jax.random.split(jax.random.key(seed), 3)
    params = {"actor": init(hp.actor, actor), "critic": init(hp.critic, critic, head="scalar")}
    params["critic"]["head"]["kernel"] = 0.3 * jax.random.normal(head, (hp.critic.hidden_size, 1))
    return params


def experience(samples, seed=0):
    """One long to two short; of one sign, so that sums do not cancel and a tolerance holds."""
    drawn = toy.toy_experience(samples, seed, lengths=((1, 3), (4, 12), (2, 6)))
    return drawn._replace(advantages=np.abs(drawn.advantages), returns=drawn.returns + 2.0)


def minibatch(micro_batches, buckets=ONE, *, rows=2, room=None, seed=0, data=1):
    """About `micro_batches` real ones; `room` of them fix the shapes."""
    samples = (room or micro_batches) * rows * data
    drawn = experience(samples, seed)
    drawn.valid[micro_batches * rows * data :] = False
    buckets = tuple(Bucket(b.length, b.rows * data) for b in buckets)
    return cut_minibatch(drawn, np.arange(samples), buckets, kl_coef=KL, shards=data)


def problem(stages, batch, *, split=False, devices=None):
    """What is to be scheduled for the real micro-batches of a mini-batch."""
    devices = devices or max(stages)
    counts = [int(bucket.count) for bucket in batch.buckets]
    tokens = [bucket.micro_batches.tokens.shape[2] / 16 for bucket in batch.buckets]
    pipelines = []
    for stage_count, (f, b, w), direction in zip(stages, TIMES, ("up", "down")):
        dealt = deal_micro_batches(counts, devices // stage_count)
        pipelines.append(
            Pipeline(
                stage_count,
                dealt.shape[1],
                f,
                b - w if split else b,
                activation=1.0,
                weight_grad=w if split else None,
                direction=direction,
                lengths=relative_lengths(dealt, tokens),
            )
        )
    return Problem(*pipelines, devices=devices)


def schedules(made, train=MODELS):
    """By name: one that fuses, and one in series; of a model that trains alone its own."""
    if train != MODELS:
        (name,) = train
        return {"serial": alone(made, MODELS.index(name))}
    return {"fused": chimera_like(made), "serial": concatenated_1f1b(made, "critic")}


def spoiled(batch):
    """The mini-batch with NaN in all its micro-batches that are not real."""

    def spoil(leaf, count):
        leaf = np.array(leaf)
        if np.issubdtype(leaf.dtype, np.floating):
            leaf[int(count) :] = np.nan
        return leaf

    buckets = [
        bucket._replace(
            micro_batches=jax.tree.map(partial(spoil, count=bucket.count), bucket.micro_batches)
        )
        for bucket in batch.buckets
    ]
    return batch._replace(buckets=tuple(buckets))


class Case:
    """A pipeline compiled for a toy mini-batch, and two schedules to run through it."""

    def __init__(
        self, stages, batch, hp, *, transport, split=False, data=1, tensor=1, train=MODELS
    ):
        self.batch, self.hp, self.train = batch, hp, train
        self.problem = problem(stages, batch, split=split)
        self.schedules = schedules(self.problem, train)
        devices = self.problem.devices
        carrier = make_transport(transport, devices, data * tensor)
        any_schedule = next(iter(self.schedules.values()))
        pipelines = trained_pipelines(any_schedule.problem)
        counts = [int(bucket.count) for bucket in batch.buckets]
        dealt = {n: deal_micro_batches(counts, p.replicas) for n, p in pipelines}
        needed = [slots_needed(s, dealt, carrier.ticked) for s in self.schedules.values()]
        self.layout = Layout(
            devices,
            pipelines,
            len(batch.buckets),
            # One more than is needed: it stays NaN, and nobody may notice.
            tuple(1 + max(slots[n] for slots in needed) for n, _ in pipelines),
            most_rows(pipelines, len(batch.buckets[0].micro_batches.tokens) * 2, carrier.ticked),
        )
        mesh = pipeline_mesh(devices, data, tensor)
        self.pipeline = PipelineGradients(self.layout, mesh, hp, carrier)
        self.function = jax.jit(partial(self.pipeline, hp=hp, train=train))

    def planned(self, schedule="fused", batch=None):
        batch = self.batch if batch is None else batch
        plan = self.schedules[schedule] if isinstance(schedule, str) else schedule
        return self.pipeline.place(self.pipeline.prepare(batch, plan))

    def __call__(self, params, schedule="fused", batch=None):
        return self.function(params, self.planned(schedule, batch))


class Dispatched:
    """The same for tasks that the host dispatches."""

    def __init__(
        self, stages, batch, hp, *, split=False, data=1, train=MODELS, wrap=None, timeout_s=60.0
    ):
        self.batch, self.hp, self.train = batch, hp, train
        self.problem = problem(stages, batch, split=split)
        self.schedules = schedules(self.problem, train)
        pipelines = trained_pipelines(next(iter(self.schedules.values())).problem)
        functions = model_stages(hp)
        if wrap is not None:
            functions = {name: wrap(name, one) for name, one in functions.items()}
        self.mesh = pipeline_mesh(self.problem.devices, data)
        self.dispatch = Dispatch(pipelines, self.mesh, functions, timeout_s)
        self.dealt = {n: deal_micro_batches(counts_of(batch), p.replicas) for n, p in pipelines}
        self.collect = {n: jax.jit(partial(collect, pipeline=p)) for n, p in pipelines}

    def start(self, params, schedule, batch):
        """The Sums of a step under way, and its flight."""
        walk = self.dispatch.prepare(self.schedules[schedule], self.dealt)
        placed = place_rows(batch, self.mesh)
        weights = {name: split_params(params[name]) for name in self.train}
        micro_batches = [bucket.micro_batches for bucket in placed.buckets]
        return self.dispatch.run(walk, weights, micro_batches, placed.kl_coef)

    def __call__(self, params, schedule="fused", batch=None):
        sums, flight = self.start(params, schedule, self.batch if batch is None else batch)
        flight.wait()
        whole = {name: self.collect[name](part) for name, part in sums.items()}
        metrics = {k: v for of in whole.values() for k, v in of.metrics.items()}
        return {n: join_params(of.grads) for n, of in whole.items()}, finish_metrics(metrics)


def error(grads, expected):
    """Largest difference over the largest gradient, the worse of the models; or NaN."""
    worst = []
    for name in expected:
        pairs = list(
            zip(jax.tree.leaves(grads[name]), jax.tree.leaves(expected[name]), strict=True)
        )
        largest = np.max([np.abs(wanted).max() for _, wanted in pairs])
        worst += [np.abs(np.asarray(got) - wanted).max() / largest for got, wanted in pairs]
    return float(np.max(worst))  # unlike max, it does not pass over NaN


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
