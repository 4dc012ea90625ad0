"""Break the package on purpose, one place at a time, and demand that a named fast test notices.

    python tests/mutants.py                     all of tests/mutant_list.py
    python tests/mutants.py --only rl/ gae      those whose name or file contains one of the words

The package and its tests are copied to a temporary directory. The named tests must pass there as
they are; then each mutation is made alone, and its tests must fail. Exits with 1 if a mutant
survives, or if it proves nothing: its text is not found exactly once (the code has moved on), it is
not valid Python, or its tests could not be collected or hung. Works where there is `fork`: jax and
pytest are imported once, and every run is a forked child, which saves seconds each.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from mutant_list import MUTANTS, Mutant
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("fuse_jax", "tests", "configs", "launch", "pyproject.toml")
TIMEOUT_S = 300.0
PASSED, FAILED = 0, 1  # pytest's exit codes; any other means that no test gave a verdict
TIMED_OUT = -1


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutations that the tests must notice.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    words = parser.parse_args().only
    chosen = [m for m in MUTANTS if any(word in m.name or word in m.file for word in words)]
    problems = [problem for m in chosen if (problem := what_is_wrong(m))]
    if problems or not chosen:
        print("\n".join(problems) or f"no mutant matches {' '.join(words)}")
        return 1

    with tempfile.TemporaryDirectory(prefix="mutants_") as name:
        copy = Path(name)
        copy_sources(copy)
        prepare_children(copy)
        tests = sorted({test for m in chosen for test in m.tests})
        print(f"{len(chosen)} mutants; first their {len(tests)} tests on the unbroken package")
        code, _, output = run_tests(tests, copy)
        if code != PASSED:
            print(output)
            print("the tests must pass before anything is broken")
            return 1
        rows = []
        for mutant in (bar := tqdm(chosen, unit="mutant")):
            bar.set_postfix_str(mutant.name)
            rows.append((mutant, *judge(mutant, copy)))
    return report(rows)


def what_is_wrong(mutant: Mutant) -> str | None:
    """Why this entry of the list cannot be used any more, or None."""
    path = ROOT / mutant.file
    if not path.is_file():
        return f"{mutant.name}: there is no {mutant.file}"
    source = path.read_text()
    count = source.count(mutant.original)
    if count != 1:
        return f"{mutant.name}: found {count} times in {mutant.file}, not once: {mutant.original!r}"
    if not mutant.tests:
        return f"{mutant.name}: names no test"
    for test in mutant.tests:
        file, _, function = test.partition("::")
        function = function.partition("[")[0].rpartition("::")[2]
        if not (ROOT / file).is_file() or f"def {function}" not in (ROOT / file).read_text():
            return f"{mutant.name}: there is no test {test}"
    try:
        compile(source.replace(mutant.original, mutant.mutated), mutant.file, "exec")
    except SyntaxError as error:
        return f"{mutant.name}: the mutation is not valid Python: {error}"
    return None


def copy_sources(copy: Path) -> None:
    # Stale bytecode of an unbroken file could hide a mutation made within the same second.
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)


def prepare_children(copy: Path) -> None:
    """Everything a forked child inherits: settings, search path, and the slow imports."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTHONPATH"] = str(copy)
    sys.path.insert(0, str(copy))
    # What tests/conftest.py sets has to be there before jax is imported, and that happens here.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["PJRT_NPROC"] = "24"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(copy / ".jax_cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    import flax.linen
    import hypothesis
    import jax.numpy
    import optax
    import pytest

    # None of these may have started a backend or loaded the package: both belong to the children.
    del flax, hypothesis, jax, optax, pytest
    assert "fuse_jax" not in sys.modules


def run_tests(tests: list[str], copy: Path, timeout_s: float = TIMEOUT_S) -> tuple[int, float, str]:
    """Exit code of pytest (or TIMED_OUT), seconds, and what it printed, in a forked child."""
    log = copy / "pytest.log"
    start = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(_pytest_in_child(tests, copy, log))
    code = TIMED_OUT
    while time.monotonic() - start < timeout_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            # A crash of the interpreter is no verdict of a test: reported as its signal.
            code = os.waitstatus_to_exitcode(status)
            code = 1000 - code if code < 0 else code
            break
        time.sleep(0.02)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return code, time.monotonic() - start, log.read_text() if log.exists() else ""


def _pytest_in_child(tests: list[str], copy: Path, log: Path) -> int:
    os.setpgid(0, 0)  # so that a hanging test dies with the processes it started
    os.chdir(copy)
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        try:
            import pytest

            import fuse_jax

            inside = Path(fuse_jax.__file__).is_relative_to(copy)
            assert inside, f"{fuse_jax.__file__} is not the copy"
            options = [
                "-n0",  # one process: with workers, a failing test has another exit status
                "-x",
                "-q",
                "-m",
                "",
                "--durations=0",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:warnings",
            ]
            return int(pytest.main([*options, f"--rootdir={copy}", *tests]))
        except BaseException as error:
            print(repr(error))
            return 99
        finally:
            sys.stdout.flush()


def judge(mutant: Mutant, copy: Path) -> tuple[str, float, str]:
    """Verdict, seconds and the output of the tests with this one mutation."""
    path = copy / mutant.file
    source = path.read_text()
    try:
        path.write_text(source.replace(mutant.original, mutant.mutated))
        code, seconds, output = run_tests(list(mutant.tests), copy)
    finally:
        path.write_text(source)
    verdicts = {PASSED: "SURVIVED", FAILED: "killed", TIMED_OUT: "HUNG"}
    return verdicts.get(code, f"NO VERDICT ({code})"), seconds, output


def report(rows: list[tuple[Mutant, str, float, str]]) -> int:
    """Print the table; 0 if every mutant was killed."""
    width = max(len(mutant.name) for mutant, *_ in rows)
    for mutant, verdict, seconds, output in rows:
        print(f"{mutant.name:{width}}  {verdict:10} {seconds:6.1f} s  {first_failure(output)}")
    alive = [(mutant, output) for mutant, verdict, _, output in rows if verdict != "killed"]
    for mutant, output in alive:
        print(f"\n{mutant.name}: {mutant.file}\n  - {mutant.original}\n  + {mutant.mutated}")
        print("\n".join(output.splitlines()[-15:]))
    print(f"\n{len(rows) - len(alive)} of {len(rows)} mutants killed")
    return 1 if alive else 0


def first_failure(output: str) -> str:
    failed = [line for line in output.splitlines() if line.startswith("FAILED ")]
    return failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else ""


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
