"""Times of a schedule under tick-locked transports, in plain Python and apart from fuse_jax.

A step is cut in ticks; a device runs at most one task a tick, and a task's tick is the earliest
that its device's order and its input allow when every task takes one tick (an input from another
device is there one tick later, two with `deferred`). At the end of a tick results move:

  rendezvous  sender and receiver wait for each other: neighbour pairs with an even lower device
              first, then odd ones, then distant pairs by sender
  neighbour   every device waits for the devices beside it, whether or not anything moves
  lockstep    every device waits for all
  deferred    like rendezvous, but the move starts with the next tick and runs beside its task

A move takes its model's lag; one tick's exchange takes the longest of them where all wait.
"""

import check_schedule as judge


def times_under(problem, orders, transport):
    """({key: (start, end)} in ticks of time, makespan) of a schedule that is valid."""
    problem = judge.normalised(problem)
    tasks = judge.all_tasks(problem)
    step_of = steps(problem, tasks, orders, 2 if transport == "deferred" else 1)
    target = receivers(problem, tasks)
    devices = range(problem["devices"])
    clock, times, before = [0 for _ in devices], {}, []
    for now in range(max(step_of.values(), default=-1) + 1):
        began, moves = list(clock), []
        for device in devices:
            for key in orders[device]:
                if step_of[key] == now:
                    times[key] = (clock[device], clock[device] + tasks[key].duration)
                    clock[device] = times[key][1]
                    if key in target:
                        lag = judge.round_half_up(problem[key[0]].get("lag", 0.0), judge.TICKS)
                        moves.append((device, target[key], lag))
        if transport == "rendezvous":
            rendezvous(clock, moves)
        elif transport == "deferred":
            for sender, receiver, lag in before:
                done = max(began[sender], began[receiver]) + lag
                clock[sender] = max(clock[sender], done)
                clock[receiver] = max(clock[receiver], done)
        else:
            reach = 1 if transport == "neighbour" else problem["devices"]
            longest = max((lag for _, _, lag in moves), default=0)
            clock = [
                max(clock[other] for other in devices if abs(other - device) <= reach) + longest
                for device in devices
            ]
        before = moves
    makespan = max((end + tasks[key].tail for key, (_, end) in times.items()), default=0)
    return times, makespan


def rendezvous(clock, moves):
    """Let the pairs of this tick meet, neighbours in two rounds and the rest in order of sender."""
    pairs = {}
    for sender, receiver, lag in moves:
        low, high = min(sender, receiver), max(sender, receiver)
        rank = (low % 2, low, high) if high - low == 1 else (2, sender, receiver)
        pairs[rank] = (low, high, max(lag, pairs.get(rank, (0, 0, 0))[2]))
    for rank in sorted(pairs):
        low, high, lag = pairs[rank]
        clock[low] = clock[high] = max(clock[low], clock[high]) + lag


def steps(problem, tasks, orders, latency):
    """The tick of every task."""
    step, changed = {}, True
    while changed:
        changed = False
        for device, row in enumerate(orders):
            last = -1
            for key in row:
                if key not in step:
                    inputs = judge.needs(tasks[key], problem)
                    if any(need not in step for need in inputs):
                        break
                    ready = [
                        step[need] + (1 if tasks[need].device == device else latency)
                        for need in inputs
                    ]
                    step[key] = max([last + 1, *ready])
                    changed = True
                last = step[key]
    return step


def receivers(problem, tasks):
    """The other device that reads a task's result, where there is one."""
    return {
        need: task.device
        for task in tasks.values()
        for need in judge.needs(task, problem)
        if tasks[need].device != task.device
    }
