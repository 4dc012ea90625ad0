"""The quickstart with fused training: actor and critic in one pipeline over 4 virtual devices.

The same models, data and settings as `quickstart.py`, so the same result. The host's CPU is split
into 4 devices; each update trains both models in pipelines of two stages (two replicas each) that
run in opposite directions and fill each other's bubbles (RLHFuse, arXiv 2409.13221 §5). On so few
cores this shows how it works, not how fast: virtual devices share them, and models this small are
trained faster whole. The work directory holds the timeline of an update, planned and measured:
`pipeline.png` and `pipeline_trace.json` (https://ui.perfetto.dev).

    python launch/train.py --config configs/quickstart_fused.py --workdir runs/quickstart_fused
"""

from ml_collections import ConfigDict

from configs.quickstart import get_config as quickstart


def get_config() -> ConfigDict:
    """The quickstart on 4 virtual devices: data-parallel rollout and scoring, pipelined updates."""
    config = quickstart()
    config.mesh.cpu_devices = 4
    config.mesh.data = 4
    config.mesh.pipe = 4
    config.fusion.intra_stage.schedule = "fused"
    config.fusion.intra_stage.actor_stages = 2
    config.fusion.intra_stage.critic_stages = 2
    return config
