"""WorkerRecords of workers as a recorder would have written them, made by hand."""

from outlast.drill.record import StateFound, StepRecord, WorkerBegun, WorkerRecord


def step(number, rank=0, world_size=2, **changed):
    """What a step says of itself, but for what is changed of it."""
    said = {
        "step": number,
        "t": float(number),
        "losses": [(1.0 / number).hex()],
        "inputs": [f"batch {number}.{rank}"],
        "state": {"model.weight": f"w{number}", "optimizer.exp_avg": f"m{number}"},
        "random": {"torch": f"r{number}", "python": "unseeded"},
        "rates": [0.1],
        "rank": rank,
        "world_size": world_size,
    }
    return StepRecord(**{**said, **changed})


def found(number=0, *, is_counted=True, **changed):
    """What a process found ahead of its first step."""
    said = {
        "step": number if is_counted else 0,
        "is_counted": is_counted,
        "state": {"model.weight": f"w{number}"},
        "random": {"torch": f"r{number}", "python": "unseeded"},
    }
    return StateFound(**{**said, **changed})


def worker(rank, steps, *, pid=None, attempt=1, t=0.0, world_size=2, at=None):
    """One process' record; it has found what the step ahead of its first one has left."""
    steps = list(steps)
    first = steps[0].step if steps else 1
    begun = WorkerBegun(
        pid=100 * attempt + rank if pid is None else pid,
        rank=rank,
        world_size=world_size,
        attempt=attempt,
        machine="one",
        t=t,
        versions={},
    )
    return WorkerRecord(begun, found=found(first - 1) if at is None else at, steps=steps)


def run(last=4, ranks=2):
    """The records of a run that nothing happened to."""
    return [worker(rank, [step(n, rank) for n in range(1, last + 1)]) for rank in range(ranks)]
