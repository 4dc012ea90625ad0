"""Let a model answer a file of prompts, and score its answers.

python launch/evaluate.py --model DIR --prompts FILE --out runs/eval --reward_model DIR
python launch/evaluate.py --model DIR --prompts gsm8k/test.jsonl --out runs/eval --greedy \
    --reward_function fuse_jax.data.gsm8k:reward
python launch/evaluate.py --model runs/quickstart/models/actor --task countdown --out runs/eval

DIR is a Hugging Face directory, as launch/export.py writes. FILE is .jsonl, .json or .parquet (also
.gz, a directory, a glob) with prompts, messages, HH-RLHF transcripts or GSM8K questions.
"""

import sys
from pathlib import Path

from absl import app, flags, logging

OUT = flags.DEFINE_string(
    "out", None, "Directory for samples.jsonl and summary.json.", required=True
)
GREEDY = flags.DEFINE_bool("greedy", False, "Take the likeliest token each time.")
SHOWN = flags.DEFINE_integer("shown", 5, "Answers to print.")
# The keys are those of fuse_jax/config.py.
SETTINGS = {
    "actor.path": flags.DEFINE_string("model", "", "Directory of the model that answers."),
    "tokenizer": flags.DEFINE_string("tokenizer", "", "Directory; default the model's."),
    "data.task": flags.DEFINE_enum("task", "files", ["files", "countdown"], "Kind of prompts."),
    "data.prompts": flags.DEFINE_string("prompts", "", "File of prompts."),
    "data.limit": flags.DEFINE_integer("limit", 0, "First n prompts; 0 = all."),
    "reward_model.path": flags.DEFINE_string("reward_model", "", "Directory of a model to score."),
    "reward.function": flags.DEFINE_string("reward_function", "", "package.module:name to score."),
    "rollout.max_prompt_length": flags.DEFINE_integer(
        "max_prompt_length", 512, "Tokens; longer prompts are left out and counted."
    ),
    "rollout.max_new_tokens": flags.DEFINE_integer("max_new_tokens", 128, "Tokens of an answer."),
    "rollout.temperature": flags.DEFINE_float("temperature", 1.0, "Of sampling."),
    "rollout.top_k": flags.DEFINE_integer("top_k", 0, "Likeliest tokens to draw from; 0 = all."),
    "rollout.top_p": flags.DEFINE_float("top_p", 1.0, "Probability to draw from; 1 = all."),
    "rollout.slots": flags.DEFINE_integer("slots", 16, "Answers at a time."),
    "evaluation.samples_per_prompt": flags.DEFINE_integer("samples_per_prompt", 1, "Answers each."),
    "compute.dtype": flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Numerics."),
    "seed": flags.DEFINE_integer("seed", 0, "Of sampling."),
}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"not understood: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    from fuse_jax.training import evaluate_files  # slow: after the flags
    from fuse_jax.training.run import REFUSALS

    settings = {key: flag.value for key, flag in SETTINGS.items()}
    try:
        values = evaluate_files.evaluate_files(settings, Path(OUT.value), greedy=GREEDY.value)
    except REFUSALS as error:
        sys.exit(f"error: {error}")
    print(evaluate_files.table_text(Path(OUT.value), SHOWN.value))
    print(evaluate_files.summary_text(values))


if __name__ == "__main__":
    app.run(main)
