"""Random problems and random orders for them, valid and broken, in the judge's terms.

Every choice comes from the `random.Random` that is passed, so a seed names a case.
"""

import math

import check_schedule as judge

MODELS = ("actor", "critic")


def draw_time(rng):
    """ms: whole, decimal, on the edge between two ticks, or nothing."""
    exact = [0.0, 1, 5, 0.0005, 2.0005, 0.0004999]
    return rng.choice([rng.choice(exact), rng.randint(1, 20), rng.uniform(0, 9), rng.uniform(1, 4)])


def draw_model(rng, stages, replicas):
    chunks = rng.choice([1, 1, 2, 3]) if stages <= 4 else rng.choice([1, 1, 2])
    total, count = stages * chunks, rng.randint(1, 16 if stages * chunks <= 8 else 8)
    per_stage = rng.random() < 0.5

    def times():
        return [draw_time(rng) for _ in range(total)] if per_stage else draw_time(rng)

    model = {
        "stages": stages,
        "micro_batches": count,
        "forward": times(),
        "backward": times(),
        "activation": [rng.uniform(0, 3) for _ in range(total)] if per_stage else rng.random(),
        "direction": rng.choice(["up", "down"]),
        "chunks": chunks,
        "placement": rng.choice(["loop", "vee"]),
    }
    if rng.random() < 0.4:
        model["weight_grad"] = times()
    if rng.random() < 0.4:
        model["lag"] = draw_time(rng)
    if rng.random() < 0.3:
        model["tail"] = rng.uniform(0, 40)
    for key in ("first_extra", "last_extra"):
        if rng.random() < 0.3:
            model[key] = [rng.uniform(0, 3) for _ in range(3)]
    if rng.random() < 0.4:
        rows = [[rng.choice([0, 1, rng.lognormvariate(0, 0.5)]) for _ in range(count)]]
        rows += [[rng.uniform(0.1, 3) for _ in range(count)] for _ in range(replicas - 1)]
        model["lengths"] = rng.choice([rows, rows[0]])
    return model


def draw_problem(rng):
    """Plain data of a problem on at most 8 devices."""
    pairs = [(a, c) for a in range(1, 9) for c in range(1, 9) if math.lcm(a, c) <= 8]
    stages = rng.choice(pairs)
    common = math.lcm(*stages)
    devices = common * rng.choice([1, 1, 2]) if common <= 4 else common
    problem = {
        name: draw_model(rng, width, devices // width) for name, width in zip(MODELS, stages)
    }
    problem["devices"] = devices
    if rng.random() < 0.05:
        problem[rng.choice(MODELS)]["micro_batches"] = 0
        for name in MODELS:
            if problem[name]["micro_batches"] == 0:
                problem[name].pop("lengths", None)
    return problem


def draw_orders(rng, problem):
    """A valid order, from dispatching at random any task whose inputs have been dispatched."""
    problem = judge.normalised(problem)
    tasks = judge.all_tasks(problem)
    queues: dict = {}
    for key, task in tasks.items():
        queues.setdefault((task.device, task.model, task.chunk, task.kind), []).append(key)
    for queue in queues.values():
        queue.sort(key=lambda key: key[4], reverse=True)
    forward_weight = rng.choice([0.1, 1.0, 10.0])
    orders, done = [[] for _ in range(problem["devices"])], set()
    while queues:
        ready = [
            name
            for name, queue in queues.items()
            if all(key in done for key in judge.needs(tasks[queue[-1]], problem))
        ]
        weights = [forward_weight if name[3] == "F" else 1.0 for name in ready]
        # Several picks a round: the ready list only grows, but for what was picked.
        for name in dict.fromkeys(rng.choices(ready, weights, k=1 + len(ready) // 3)):
            key = queues[name].pop()
            orders[name[0]].append(key)
            done.add(key)
            if not queues[name]:
                del queues[name]
    return orders


def broken_orders(rng, orders):
    """The same order with one thing wrong (or, by luck, only different)."""
    orders = [list(row) for row in orders]
    long_rows = [row for row in orders if len(row) > 1]
    how = rng.choice(["swap", "swap", "move", "move", "twice", "elsewhere"])
    row = rng.choice(long_rows) if long_rows else orders[0]
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    if how == "swap":
        j = min(i + 1, len(row) - 1) if rng.random() < 0.5 else j
        row[i], row[j] = row[j], row[i]
    elif how == "move":
        row.insert(j, row.pop(i))
    elif how == "twice":
        row[i] = row[j]
    else:
        other = rng.choice(orders)
        k = rng.randrange(len(other))
        row[i], other[k] = other[k], row[i]
    return orders


def rows_of(problem, orders):
    """The orders as cells (device, model, replica, kind, micro_batch, chunk)."""
    return [
        [(d, key[0], key[1], key[3], key[4], key[2] // problem[key[0]]["stages"]) for key in row]
        for d, row in enumerate(orders)
    ]
