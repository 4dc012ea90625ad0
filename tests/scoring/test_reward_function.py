"""Reward functions in worker processes: whatever they do concerns one sample only."""

import contextlib
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from absl import logging

from fuse_jax.scoring import reward_call
from fuse_jax.scoring.reward_function import RewardFunction, check_reward_function

EXAMPLES = Path(__file__).with_name("reward_examples.py")
ROOT = Path(__file__).resolve().parents[2]


def example(name: str) -> str:
    return f"{EXAMPLES}:{name}"


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> set[int]:
    """Processes started by any thread of this one and not reaped, zombies included."""
    lists = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for file in lists for pid in file.read_text().split()}


def running(argument: str) -> bool:
    """Whether a process with this argument runs anywhere."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended just now
            if argument.encode() in file.read_bytes().split(b"\0"):
                return True
    return False


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def error_of_collecting(function: RewardFunction, keys: list) -> str:
    """What waiting for `keys` raises, within a minute: a fault must not hang the tests."""
    errors: list[BaseException] = []

    def collect():
        try:
            function.collect(keys)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "still waiting"
    return str(errors[0])


@pytest.fixture(scope="module")
def misbehave():
    with RewardFunction(example("misbehave"), workers=2, timeout=60.0) as function:
        yield function


@pytest.mark.parametrize(
    ("prompt", "score", "reason"),
    [
        ("any text", 8.0, ""),
        ("true", 1.0, ""),
        ("integer", 3.0, ""),
        ("numpy", 2.5, ""),
        ("print", 5.0, ""),
        ("raise", None, "exception: ZeroDivisionError: division by zero"),
        ("exit", None, "exception: SystemExit: 3"),
        ("interrupt", None, "exception: KeyboardInterrupt"),
        ("recursion", None, "exception: RecursionError"),
        ("odd exception", None, "exception: _Unprintable"),
        ("nan", None, "not finite: nan"),
        ("inf", None, "not finite: -inf"),
        ("too large", None, "not finite: 1e+300"),  # inf once it is float32
        ("none", None, "not a number: NoneType"),
        ("text", None, "not a number: str"),
        ("hard exit", None, "worker died: exit code 7"),
        ("segfault", None, "worker died: SIGSEGV"),
        ("kill", None, "worker died: SIGKILL"),
    ],
)
def test_each_fault_excludes_its_own_sample(misbehave, prompt, score, reason):
    calls = [("before", "", {}), (prompt, "", {}), ("after it", "", {})]
    before, result, after = misbehave.score(calls)
    assert (before.score, after.score) == (6.0, 8.0) and before.valid and after.valid
    assert result.valid == (score is not None)
    if score is None:
        assert math.isnan(result.score) and result.reason.startswith(reason)
    else:
        assert result.score == score and result.reason == ""


def test_endless_calls_are_killed_and_the_rest_goes_on():
    """Spinning in C never lets a Python signal handler or thread in; a child must go too."""
    seconds = f"3600.{os.getpid()}"  # nobody else's
    hanging = ["spin", "spin in C", "grandchild", "sleep"]
    with RewardFunction(example("misbehave"), workers=2, timeout=1.5) as function:
        first = function._pool.processes()
        prompts = [p for h in hanging for p in (h, "fine")]
        results = function.score([(prompt, "", {"seconds": seconds}) for prompt in prompts])
        assert [r.score for r in results[1::2]] == [4.0] * 4
        assert [r.reason for r in results[::2]] == ["timeout: longer than 1.5 s"] * 4
        assert all(1.5 <= r.seconds < 10 for r in results[::2])
        assert function.excluded == Counter(timeout=4)
        assert function.calls == 8
        assert function.summary() == ("reward function: 4 of 8 samples excluded (timeout 4)")
        later = function._pool.processes()
        assert not set(first) & set(later) and not any(alive(pid) for pid in first)
    assert not any(alive(pid) for pid in later)
    assert not {*first, *later} & children()  # no zombies either
    assert not running(seconds)  # the grandchild


def test_answer_beyond_the_limit_is_late_even_if_it_was_seen_in_time(monkeypatch):
    """The watching thread may be held up; what counts is the time the call took."""
    from fuse_jax.scoring import worker_pool

    with RewardFunction(example("misbehave"), workers=1, timeout=60.0) as function:
        function._pool.timeout = (
            1e-7  # the deadline was set with 60 s, the answer is judged by this
        )
        monkeypatch.setattr(worker_pool.WorkerPool, "_expire", lambda self: None)
        (result,) = function.score([("fine", "", {})])
        assert result.reason.startswith("timeout")


def test_results_keep_order_and_stream(misbehave):
    keys = list(range(40))
    for key in keys:
        misbehave.submit(key, "x" * key, "", {})
    seen = {}
    assert wait_until(lambda: seen.update(misbehave.poll()) or len(seen) == 40)
    assert [seen[key].score for key in keys] == [float(key) for key in keys]
    assert misbehave.poll() == {}
    for key in reversed(keys):
        misbehave.submit(key, "x" * key, "", {})
    assert [r.score for r in misbehave.collect(keys)] == [float(key) for key in keys]
    with pytest.raises(KeyError, match="no open call under key 3"):
        misbehave.collect([3])


def test_poll_and_submit_never_wait():
    with RewardFunction(example("misbehave"), workers=1, timeout=60.0) as function:
        started = time.monotonic()
        function.submit("slow", "sleep", "", {})
        for i in range(50):
            function.submit(i, "y" * 200_000, "", {})  # more than a socket holds
            assert function.poll() == {}
        assert time.monotonic() - started < 5
        with pytest.raises(ValueError, match="already asked for under key 7"):
            function.submit(7, "", "", {})


def test_many_calls_cost_well_under_a_millisecond(misbehave):
    calls = [("prompt", "a response of usual length " * 4, {"answer": i}) for i in range(1000)]
    misbehave.score(calls[:10])
    started = time.process_time()
    results = misbehave.score(calls)
    spent = time.process_time() - started
    assert all(r.valid for r in results) and len(results) == 1000
    assert spent < 0.5, f"{spent} CPU-seconds of this process for 1000 calls"


def test_workers_import_neither_jax_nor_numpy():
    with RewardFunction(example("jax_loaded"), workers=1) as function:
        assert function.score([("", "", {})])[0].score == 0.0


def test_workers_stay_alive_and_all_work():
    with RewardFunction(example("process"), workers=2) as function:
        assert wait_until(lambda: all(w.ready for w in function._pool._workers))
        pids = {r.score for r in function.score([("", "", {})] * 200)}
        assert pids == set(map(float, function._pool.processes())) and len(pids) == 2


def test_called_from_several_threads():
    """Alarms work too: a call is in its worker's main thread wherever it was asked for."""
    with RewardFunction(example("in_main_thread"), workers=2) as function:
        found = []

        def ask():
            found.extend(r.score for r in function.score([("", "", {})] * 25))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [1.0] * 100


def test_workers_outlive_the_thread_that_made_them_but_not_the_process():
    made = []
    thread = threading.Thread(target=lambda: made.append(RewardFunction(example("process"))))
    thread.start()
    thread.join()
    with made[0] as function:
        assert function.score([("", "", {})])[0].valid


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PR_SET_PDEATHSIG")
def test_workers_die_with_a_killed_parent_even_while_they_spin():
    script = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(ROOT)!r})
        import time
        from fuse_jax.scoring.reward_function import RewardFunction
        function = RewardFunction({example("misbehave")!r}, workers=2, timeout=600.0)
        while not all(w.ready for w in function._pool._workers):
            time.sleep(0.01)
        function.submit(0, "spin in C", "", {{}})
        while function._pool._workers[0].job is None and function._pool._workers[1].job is None:
            time.sleep(0.01)
        time.sleep(0.1)
        print(*function._pool.processes(), flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_exit_without_close_ends_at_once():
    script = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(ROOT)!r})
        from fuse_jax.scoring.reward_function import RewardFunction
        function = RewardFunction({example("misbehave")!r}, workers=2, timeout=600.0)
        function.submit(0, "spin", "", {{}})
        print(*function._pool.processes(), "jax" in sys.modules, flush=True)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    *pids, jax_loaded = done.stdout.split()
    assert jax_loaded == "False"  # the trainer's side of it needs none either
    assert wait_until(lambda: not any(alive(int(pid)) for pid in pids))


def test_import_path_of_a_package(tmp_path, monkeypatch):
    (tmp_path / "house_rewards").mkdir()
    (tmp_path / "house_rewards" / "__init__.py").write_text("")
    (tmp_path / "house_rewards" / "exact.py").write_text(
        "def score(prompt, response, meta):\n    return response == meta['answer']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with RewardFunction("house_rewards.exact:score", workers=1) as function:
        results = function.score([("", "4", {"answer": "4"}), ("", "5", {"answer": "4"})])
        assert [r.score for r in results] == [1.0, 0.0]
    monkeypatch.chdir(tmp_path)
    check_reward_function("house_rewards/exact.py:score")


def test_the_packages_own_rule_reward_runs():
    with RewardFunction("fuse_jax.data.gsm8k:reward", workers=1) as function:
        right, wrong, broken = function.score(
            [("", "so 72", {"answer": "#### 72"}), ("", "71", {"answer": "#### 72"}), ("", "", {})]
        )
        assert (right.score, wrong.score) == (1.0, 0.0)
        assert not broken.valid and "meta['answer']" in broken.reason
        assert function.first_traceback.startswith("Traceback")
        assert "gsm8k.py" in function.first_traceback


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_colon", ["must be 'package.module:name' or 'path/to/file.py:name'"]),
        ("a b:c", ["must be 'package.module:name'"]),
        ("no_such_module_anywhere:f", ["No module named", "PYTHONPATH"]),
        ("no/such/file.py:f", ["there is no file no/such/file.py"]),
        (example("lenght"), ["has no 'lenght'", "did you mean one of ['length']"]),
        (example("two_arguments"), ["called as two_arguments(prompt, response, meta)"]),
        (example("not_callable"), ["is no plain function: 3"]),
    ],
)
def test_bad_paths_are_refused_with_the_key_and_the_fix(path, words):
    with pytest.raises(ValueError) as caught:
        check_reward_function(path)
    for word in (f"reward.function={path!r}", *words):
        assert word in str(caught.value)


def test_errors_in_the_module_and_bad_settings_are_refused(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nraise SystemExit('no key set')\n")
    with pytest.raises(ValueError, match=r"(?s)reward\.function.*SystemExit: no key set.*line 2"):
        check_reward_function(f"{broken}:f")
    dying = tmp_path / "dying.py"
    dying.write_text("import os\nos._exit(5)\n")
    with pytest.raises(ValueError, match=r"reward\.function.*end before.*exit code 5"):
        check_reward_function(f"{dying}:f")
    with pytest.raises(ValueError, match=r"reward\.workers=0"):
        RewardFunction(example("length"), workers=0)
    with pytest.raises(ValueError, match=r"reward\.timeout=0"):
        RewardFunction(example("length"), timeout=0)


def test_workers_that_cannot_come_back_end_the_wait(tmp_path):
    """The module loads once and never again: waiting callers get an error, not silence."""
    once = tmp_path / "once.py"
    once.write_text(
        "import os, pathlib\n"
        "mark = pathlib.Path(__file__).with_suffix('.mark')\n"
        "if mark.exists():\n    os._exit(5)\n"
        "mark.touch()\n"
        "def f(prompt, response, meta):\n    os._exit(6)\n"
    )
    with RewardFunction(f"{once}:f", workers=1) as function:
        function.submit(0, "", "", {})
        function.submit(1, "", "", {})
        error = error_of_collecting(function, [0, 1])
        assert "1 calls are lost" in error and "exit code 5" in error
        with pytest.raises(RuntimeError, match="exit code 5"):
            function.submit(2, "", "", {})
    assert function.excluded == Counter({"worker died": 1})


def test_close_ends_the_wait_and_may_be_repeated():
    function = RewardFunction(example("misbehave"), workers=1, timeout=600.0)
    function.submit(0, "sleep", "", {})
    threading.Timer(0.2, function.close).start()
    assert "the pool is closed" in error_of_collecting(function, [0])
    function.close()
    with pytest.raises(RuntimeError, match="the pool is closed"):
        function.submit(1, "", "", {})


def test_what_cannot_be_sent_excludes_the_sample(misbehave):
    unsendable, fine = misbehave.score(
        [("x", "", {"lock": threading.Lock()}), ("x", "", {"a": np.arange(3), "b": "\ud800"})]
    )
    assert unsendable.reason.startswith("exception: TypeError")
    assert fine.score == 1.0


def test_a_kind_is_shown_once(caplog):
    logging.get_absl_logger().propagate = True
    with RewardFunction(example("misbehave"), workers=1) as function:
        function.score([("raise", "", {})] * 3 + [("none", "", {})] * 2)
        assert function.excluded == Counter({"exception": 3, "not a number": 2})
    shown = [r.getMessage() for r in caplog.records if "excluded" in r.getMessage()]
    assert len(shown) == 2 and "1 / 0" in shown[0] and "NoneType" in shown[1]


def test_callable_runs_here_and_says_so_once():
    with pytest.warns(UserWarning, match="runs in this process") as caught:
        function = RewardFunction(lambda prompt, response, meta: len(prompt) / meta["n"])
    results = function.score([("ab", "", {"n": 4}), ("", "", {"n": 0}), ("", "", {"n": 1})])
    assert [r.valid for r in results] == [True, False, True] and results[0].score == 0.5
    assert results[1].reason.startswith("exception: ZeroDivisionError")
    assert function.excluded == Counter(exception=1) and "lambda" in function.first_traceback
    assert len(caught) == 1
    function.close()


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (np.float64(1.5), ""),
        (np.bool_(True), ""),
        (np.array(2), ""),
        (np.array([2.0]), "not a number"),
        (1j, "not a number"),
        (10**400, "exception"),
        (-3.4028234663852886e38, ""),
        (3.5e38, "not finite"),
        (math.nan, "not finite"),
    ],
)
def test_what_counts_as_a_score(result, kind):
    outcome = reward_call.call(lambda *_: result, "", "", {})
    assert outcome.kind == kind
    assert math.isnan(outcome.score) == bool(kind)
