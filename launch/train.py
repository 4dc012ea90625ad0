"""Train: supervised warm start, reward model, PPO. See configs/ for recipes.

python launch/train.py --config configs/quickstart.py --workdir runs/quickstart
"""

import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Recipe; change a setting with --config.key=value.", lock_config=True
)
WORKDIR = flags.DEFINE_string("workdir", None, "Directory for checkpoints, logs and the report.")
RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in --workdir.")


def parse(argv: list[str]) -> list[str]:
    """Flags, with one line where absl or the recipe would give a traceback."""
    from fuse_jax.config_read import check_recipe, refused_flags

    try:
        check_recipe(argv)
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        sys.exit(f"error: {refused_flags(argv, error)}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"not understood: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    from fuse_jax.training.run import REFUSALS, report_text, train  # slow: after the flags

    try:
        report = train(CONFIG.value, Path(str(WORKDIR.value)), resume=RESUME.value)
    except REFUSALS as error:
        sys.exit(f"error: {error}")
    print(report_text(report))


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main, flags_parser=parse)
