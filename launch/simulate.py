"""Simulate what cannot be run here, or not yet.

python launch/simulate.py inter-stage --instances=8 --slots=16 --samples=128 --sweep
python launch/simulate.py inter-stage --lengths=FILE --decode-ms=1:8,16:10,64:14 --scoring-share=0.4

inter-stage: generation and scoring overlapped sample by sample (RLHFuse), policy by policy.
"""

import argparse
import sys


def main(argv: list[str]) -> int:
    from fuse_jax.fusion.inter_stage import study

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    study.add_options(
        commands.add_parser(
            "inter-stage", help="hand-off, migration and their thresholds", allow_abbrev=False
        )
    )
    arguments = parser.parse_args(argv)
    try:
        print(study.run(arguments))
    except study.StudyError as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
