"""Generation instances: the run's devices cut into disjoint sub-meshes of the same geometry.

An instance generates on its own slots and scores on the same devices once they are free. All shapes
are the same on every instance, so a sample's bits do not depend on where it is generated or scored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from fuse_jax.config import RolloutConfig
from fuse_jax.fusion.inter_stage.costs import Geometry
from fuse_jax.placement.mesh import AXES
from fuse_jax.placement.sharding import parameter_specs
from fuse_jax.rollout.engine import Engine
from fuse_jax.scoring.columns import ROLES, Model, Role
from fuse_jax.scoring.scorer import Scorer


@dataclass(frozen=True)
class Instance:
    """One sub-mesh with the engine that generates on it and the scorer that scores on it."""

    index: int
    engine: Engine
    scorer: Scorer
    _shardings: dict[Role, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def roles(self) -> list[Role]:
        """The models that its columns read."""
        roles: set[Role] = set()
        for column in self.scorer.columns:
            roles.update(ROLES[column])
        return sorted(roles)

    def scoring_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        """Those of `models` that its columns read, `on_mesh`."""
        return {role: self.on_mesh(role, models[role]) for role in self.roles}

    def on_mesh(self, role: Role, model: Model) -> Model:
        """`model` with its parameters on this instance's devices; returns before they are there.

        What its devices hold already is shared, not copied: it must not be kept over a donation.
        """
        if role not in self._shardings:
            mesh = self.engine.mesh
            self._shardings[role] = parameter_specs(model.arch, model.params, mesh)
        return Model(model.arch, jax.device_put(model.params, self._shardings[role]))


def cut_mesh(mesh: Mesh, instances: int) -> list[Mesh]:
    """`mesh` cut along `data` into `instances` meshes. Raises ValueError if it does not divide."""
    size = mesh.shape["data"]
    if instances < 1 or size % instances:
        raise ValueError(
            f"fusion.inter_stage.instances={instances}: must divide mesh.data={size}, because an "
            "instance is a part of the data axis: choose a divisor"
        )
    parts = np.split(mesh.devices, instances, axis=0)
    return [Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3) for devices in parts]


def instance_rollout(rollout: RolloutConfig, instances: int) -> RolloutConfig:
    """The settings of one instance: slots and prefill rows are those of all instances together.

    Raises ValueError if they do not divide.
    """
    for name in ("slots", "prefill_rows"):
        count = getattr(rollout, name)
        if count % instances:
            raise ValueError(
                f"rollout.{name}={count}: must be a multiple of fusion.inter_stage.instances="
                f"{instances}, which share them"
            )
    return dataclasses.replace(
        rollout, slots=rollout.slots // instances, prefill_rows=rollout.prefill_rows // instances
    )


def geometry_of(instances: Sequence[Instance]) -> Geometry:
    """What a policy needs to know of them. Raises ValueError if they are not alike."""
    first, rollout = instances[0], instances[0].engine.rollout
    for instance in instances:
        alike = (instance.engine.rollout, instance.scorer.buckets, instance.scorer.columns)
        if alike != (rollout, first.scorer.buckets, first.scorer.columns):
            raise ValueError(f"instances 0 and {instance.index} have different shapes")
    return Geometry(
        instances=len(instances),
        slots=rollout.slots,
        chunk=rollout.chunk,
        prefill_rows=rollout.prefill_rows,
        buckets=first.scorer.buckets,
        columns=tuple(first.scorer.columns),
    )
