"""Write a model of a run as a Hugging Face directory, from its checkpoints.

python launch/export.py --workdir runs/quickstart --out models/actor
python launch/export.py --workdir runs/quickstart --out models/rm --model reward_model
"""

import sys
from pathlib import Path

from absl import app, flags, logging

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
OUT = flags.DEFINE_string("out", None, "Directory to write; new or empty.", required=True)
MODEL = flags.DEFINE_enum(
    "model", None, ["actor", "critic", "reward_model"], "Default: the stage's first."
)
STAGE = flags.DEFINE_enum(
    "stage",
    None,
    ["sft", "reward_model", "ppo", "best"],
    "Whose checkpoints; best = PPO's actor with the best held-out score. Default: PPO's, else the "
    "first that has the model.",
)
STEP = flags.DEFINE_integer("step", None, "Number of the checkpoint. Default: the newest.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"not understood: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    from fuse_jax.training.export_run import export_run  # slow: after the flags
    from fuse_jax.training.run import REFUSALS

    try:
        done = export_run(
            Path(WORKDIR.value),
            Path(OUT.value),
            model=MODEL.value or "",
            stage=STAGE.value or "",
            step=STEP.value,
        )
    except (*REFUSALS, FileExistsError) as error:
        sys.exit(f"error: {error}")
    print(f"{done.model} of {done.stage}, step {done.step} -> {OUT.value}")


if __name__ == "__main__":
    app.run(main)
