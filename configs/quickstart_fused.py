"""The quickstart with both stage fusions of RLHFuse (arXiv 2409.13221) on 4 virtual devices.

The same models, data and settings as `quickstart.py`. The host's CPU is split into 4 devices, which
rounds sums another way: `gold` lies within 0.05 of that of the serial run on the same 4 devices
(`--config.mesh.pipe=1 --config.fusion.intra_stage.actor_stages=0
--config.fusion.intra_stage.critic_stages=0 --config.fusion.inter_stage.policy=serial`). Between
stages: each device is a generation instance of its own; finished samples are scored on the devices
that are done while the others generate. Inside the update: actor and critic train in pipelines of
two stages (two replicas each) that run in opposite directions and fill each other's bubbles. On so
few cores this shows how it works, not how fast: virtual devices share them, and models this small
are trained faster whole. With `--config.fusion.inter_stage.policy=serial`, or
`--config.fusion.intra_stage.schedule=serial`, every figure stays the same, bit by bit.

The work directory holds the timelines, `inter_stage.png` of an iteration's generation and scoring
and `pipeline.png` of an update, each with its trace for https://ui.perfetto.dev.

    python launch/train.py --config configs/quickstart_fused.py --workdir runs/quickstart_fused
"""

from pathlib import Path
from runpy import run_path

from ml_collections import ConfigDict

QUICKSTART = Path(__file__).with_name("quickstart.py")


def get_config() -> ConfigDict:
    """The quickstart on 4 virtual devices: 4 generation instances, pipelined updates."""
    config = run_path(str(QUICKSTART))["get_config"]()
    config.mesh.cpu_devices = 4
    config.mesh.data = 4
    config.mesh.pipe = 4
    config.fusion.inter_stage.instances = 4
    config.fusion.inter_stage.policy = "auto"
    config.fusion.intra_stage.schedule = "fused"
    config.fusion.intra_stage.actor_stages = 2
    config.fusion.intra_stage.critic_stages = 2
    return config
