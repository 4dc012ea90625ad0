"""Independent judge of fused pipeline schedules: plain Python, written from the definition alone.

Shares no code with fuse_jax. Reads a problem (JSON) and a schedule (CSV or JSON), rebuilds every
task, dependency and amount of memory for itself, and reports what is wrong, the earliest times, the
makespan and the peak of each device. Slow and obvious on purpose.

    python tests/oracle/check_schedule.py PROBLEM.json SCHEDULE.csv

exits 0 when the schedule is valid and the times written in it are the earliest ones, else 1.
"""

import csv
import json
import math
import sys
from dataclasses import dataclass, field

TICKS = 1000  # a ms
QUANTA = 1_000_000  # a unit of memory


@dataclass(frozen=True)
class Task:
    """One F, B or W of one micro-batch on one stage; times in ticks, memory in quanta."""

    model: str
    replica: int
    stage: int
    kind: str
    micro_batch: int
    device: int
    chunk: int
    duration: int
    takes: int
    gives: int
    tail: int

    @property
    def key(self):
        return (self.model, self.replica, self.stage, self.kind, self.micro_batch)

    def __str__(self):
        return (
            f"{self.model}[{self.replica}] {self.kind}{self.micro_batch} of stage {self.stage} "
            f"(device {self.device})"
        )


@dataclass
class Verdict:
    """What the judge found. `faults` holds (kind, text, key of the offending task or None); the
    rest is filled when times exist.

    Kinds: task (missing, twice, unknown or on the wrong device), order (micro-batches of a class
    out of turn), deadlock, memory, times (those written are not the earliest ones).
    """

    faults: list = field(default_factory=list)
    start: dict = field(default_factory=dict)  # task key -> tick
    end: dict = field(default_factory=dict)
    makespan: int = -1  # ticks
    memory: list = field(default_factory=list)  # per device: [(tick, quanta held from then on)]
    peaks: list = field(default_factory=list)  # per device, quanta
    running: list = field(default_factory=list)  # per device, quanta held while each task runs

    @property
    def valid(self):
        return not self.faults

    @property
    def peak(self):
        return max(self.peaks, default=0)

    def kinds(self):
        return {kind for kind, _, _ in self.faults}


def round_half_up(number, unit):
    return math.floor(number * unit + 0.5)


def spread(value, count):
    """A number stands for all stages."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


def device_of(model, replica, stage):
    """Where a stage runs: chunks lie along the replica's devices, odd ones backwards in a vee."""
    width = model["stages"]
    chunk, position = stage // width, stage % width
    if model.get("placement", "loop") == "vee" and chunk % 2 == 1:
        position = width - 1 - position
    if model["direction"] == "down":
        position = width - 1 - position
    return replica * width + position


def normalised(problem):
    """The problem with its dependent defaults filled in: devices and directions."""
    problem = {**problem, "actor": dict(problem["actor"]), "critic": dict(problem["critic"])}
    problem["actor"].setdefault("direction", "up")
    problem["critic"].setdefault("direction", "down")
    if not problem.get("devices"):
        problem["devices"] = math.lcm(problem["actor"]["stages"], problem["critic"]["stages"])
    return problem


def tasks_of_model(name, model, devices):
    width, total = model["stages"], model["stages"] * (model.get("chunks") or 1)
    count = model["micro_batches"]
    split = model.get("weight_grad") is not None
    times = {"F": spread(model["forward"], total), "B": spread(model["backward"], total)}
    if split:
        times["W"] = spread(model["weight_grad"], total)
    held = spread(model.get("activation", 0.0), total)
    first = [*(model.get("first_extra") or (0, 0, 0)), 0]
    last = [*(model.get("last_extra") or (0, 0, 0)), 0]
    lengths = model.get("lengths")
    for replica in range(devices // width):
        if lengths is None:
            own = [1.0] * count
        else:
            own = lengths[replica] if count and isinstance(lengths[0], (list, tuple)) else lengths
        for stage in range(total):
            for number, kind in enumerate(times):
                time = times[kind][stage]
                if stage == 0:
                    time = time + first[number]
                if stage == total - 1:
                    time = time + last[number]
                for m in range(count):
                    amount = round_half_up(held[stage] * own[m], QUANTA)
                    finishes = kind == ("W" if split else "B")
                    yield Task(
                        name, replica, stage, kind, m,
                        device=device_of(model, replica, stage),
                        chunk=stage // width,
                        duration=round_half_up(time * own[m], TICKS),
                        takes=amount if kind == "F" else 0,
                        gives=amount if finishes else 0,
                        tail=round_half_up(model.get("tail", 0.0), TICKS) if finishes else 0,
                    )  # fmt: skip


def all_tasks(problem):
    return {
        task.key: task
        for name in ("actor", "critic")
        for task in tasks_of_model(name, problem[name], problem["devices"])
    }


def needs(task, problem):
    """Keys of the tasks whose results this one reads."""
    model = problem[task.model]
    last = model["stages"] * (model.get("chunks") or 1) - 1

    def key(stage, kind):
        return (task.model, task.replica, stage, kind, task.micro_batch)

    if task.kind == "F":
        return [key(task.stage - 1, "F")] if task.stage > 0 else []
    if task.kind == "B":
        backward = [key(task.stage + 1, "B")] if task.stage < last else []
        return [key(task.stage, "F"), *backward]
    return [key(task.stage, "B")]


def check(problem, orders, times=None):
    """Judge a schedule.

    Args:
      problem: the problem as plain data (the content of its JSON file).
      orders: for each device the keys (model, replica, stage, kind, micro_batch) in running order.
      times: optional {key: (start, end)} in ms, to be compared with the earliest times.

    Returns: a Verdict.
    """
    problem = normalised(problem)
    tasks = all_tasks(problem)
    verdict = Verdict()
    check_tasks(problem, tasks, orders, verdict)
    if verdict.faults:
        return verdict
    check_turns(tasks, orders, verdict)
    run(problem, tasks, orders, verdict)
    if "deadlock" in verdict.kinds():
        return verdict
    verdict.makespan = max([verdict.end[key] + task.tail for key, task in tasks.items()], default=0)
    follow_memory(problem, tasks, orders, verdict)
    if times is not None:
        check_times(tasks, times, verdict)
    return verdict


def check_tasks(problem, tasks, orders, verdict):
    """Every task exactly once, on its own device."""
    if len(orders) != problem["devices"]:
        verdict.faults.append(
            ("task", f"{len(orders)} rows for {problem['devices']} devices", None)
        )
    seen = set()
    for device, row in enumerate(orders):
        for key in row:
            if key not in tasks:
                verdict.faults.append(("task", f"no such task {key} (device {device})", key))
            elif tasks[key].device != device:
                verdict.faults.append(("task", f"{tasks[key]} is listed on device {device}", key))
            elif key in seen:
                verdict.faults.append(("task", f"{tasks[key]} is listed twice", key))
            seen.add(key)
    for key, task in tasks.items():
        if key not in seen:
            verdict.faults.append(("task", f"{task} is missing", key))


def check_turns(tasks, orders, verdict):
    """Micro-batches of a (model, chunk, kind) run in index order on a device."""
    for row in orders:
        latest = {}
        for key in row:
            task = tasks[key]
            cls = (task.model, task.chunk, task.kind)
            if task.micro_batch < latest.get(cls, -1):
                text = f"{task} runs after micro-batch {latest[cls]} of its stage and kind"
                verdict.faults.append(("order", text, key))
            latest[cls] = task.micro_batch


def run(problem, tasks, orders, verdict):
    """Start the head of any device whose inputs are there, until nothing can move."""
    at = [0] * len(orders)
    free = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(orders):
            while at[device] < len(row):
                task = tasks[row[at[device]]]
                ready = free[device]
                for key in needs(task, problem):
                    if key not in verdict.end:
                        ready = None
                        break
                    lag = 0
                    if tasks[key].device != device:
                        lag = round_half_up(problem[task.model].get("lag", 0.0), TICKS)
                    ready = max(ready, verdict.end[key] + lag)
                if ready is None:
                    break
                verdict.start[task.key] = ready
                verdict.end[task.key] = free[device] = ready + task.duration
                at[device] += 1
                moved = True
    for device, row in enumerate(orders):
        if at[device] < len(row):
            task = tasks[row[at[device]]]
            missing = [str(tasks[k]) for k in needs(task, problem) if k not in verdict.end]
            text = f"{task} waits for {' and '.join(missing)}"
            verdict.faults.append(("deadlock", text, task.key))


def follow_memory(problem, tasks, orders, verdict):
    """Memory over time: all takes and releases of a device, sorted by when they happen.

    At one instant the device's own order decides (tasks may take no time).
    """
    cap = problem.get("memory_cap")
    for device, row in enumerate(orders):
        events = []
        for position, key in enumerate(row):
            task = tasks[key]
            events.append((verdict.start[key], position, 0, task.takes, task))
            events.append((verdict.end[key], position, 1, -task.gives, task))
        events.sort(key=lambda event: event[:3])
        held, peak, steps, over, running = 0, 0, [(0, 0)], False, []
        for tick, _, is_end, amount, task in events:
            held += amount
            if not is_end:
                running.append(held)
            peak = max(peak, held)
            if amount:
                steps.append((tick, held))
            if cap is not None and held > round_half_up(cap, QUANTA) and not over:
                over = True
                text = f"{task} brings device {device} to {held / QUANTA:g}, over the cap {cap:g}"
                verdict.faults.append(("memory", text, task.key))
        verdict.memory.append(steps)
        verdict.peaks.append(peak)
        verdict.running.append(running)


def check_times(tasks, times, verdict):
    """The times written beside the order must be the earliest ones, to half a tick."""
    for key, task in tasks.items():
        start, end = times[key]
        mine = verdict.start[key] / TICKS, verdict.end[key] / TICKS
        if abs(start - mine[0]) > 0.5 / TICKS or abs(end - mine[1]) > 0.5 / TICKS:
            text = f"{task} is written as {start}..{end} ms but runs {mine[0]}..{mine[1]} ms"
            verdict.faults.append(("times", text, key))


def read_schedule(path, problem):
    """Orders and times of a schedule file; JSON holds no times (None).

    CSV rows may come in any order, `position` counts; `chunk` is there with virtual stages only.
    """
    problem = normalised(problem)
    orders = [[] for _ in range(problem["devices"])]
    if path.endswith(".json"):
        with open(path) as file:
            content = json.load(file)
        for device, row in enumerate(content["order"]):
            orders[device] = [
                (name, replica, stage_on(problem[name], replica, chunk, device), kind, m)
                for name, replica, kind, m, chunk in row
            ]
        return orders, None
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    rows.sort(key=lambda row: (int(row["device"]), int(row["position"])))
    times = {}
    for row in rows:
        device, replica, chunk = int(row["device"]), int(row["replica"]), int(row.get("chunk") or 0)
        if int(row["position"]) != len(orders[device]):
            raise ValueError(f"device {device}: position {row['position']} is missing or twice")
        stage = stage_on(problem[row["model"]], replica, chunk, device)
        key = (row["model"], replica, stage, row["kind"], int(row["micro_batch"]))
        orders[device].append(key)
        times[key] = (float(row["start"]), float(row["end"]))
    return orders, times


def stage_on(model, replica, chunk, device):
    """The stage of a chunk that a device hosts; -1 when there is none."""
    stages = range(chunk * model["stages"], (chunk + 1) * model["stages"])
    return next((s for s in stages if device_of(model, replica, s) == device), -1)


def main(argv):
    if len(argv) != 3:
        print("usage: check_schedule.py PROBLEM.json SCHEDULE.csv", file=sys.stderr)
        return 2
    with open(argv[1]) as file:
        problem = json.load(file)
    problem = problem.get("problem", problem)  # a schedule's JSON file carries its problem
    verdict = check(problem, *read_schedule(argv[2], problem))
    for kind, text, _ in verdict.faults:
        print(f"{kind}: {text}")
    print(
        f"{'valid' if verdict.valid else 'INVALID'}: makespan {verdict.makespan / TICKS:g} ms, "
        f"peak {verdict.peak / QUANTA:g}"
    )
    return 0 if verdict.valid else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
