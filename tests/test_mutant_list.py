"""The list of mutations still fits the code; `python tests/mutants.py` tries them (minutes)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import mutants


def test_every_mutation_can_be_made_and_its_tests_exist():
    wrong = [problem for m in mutants.MUTANTS if (problem := mutants.what_is_wrong(m))]
    assert not wrong, "\n".join(wrong)


def test_names_are_unique():
    names = [m.name for m in mutants.MUTANTS]
    assert len(set(names)) == len(names)
