"""Loaders that are not ours: a signal to the whole group, and not a sample more or less."""

import signal

import pytest
from floor import TRAIN, Job, until

from thorough import some

LOADERS = {
    "stock, processes": ("stock", 2),
    "stock": ("stock", 0),
    "stateful": ("stateful", 0),
    "stateful, processes": ("stateful", 2),
    "outlast, processes": ("outlast", 2),
}
STEPS = 90  # of 13 steps an epoch
STOPS = 3


def stop_somewhere(rng, job, ranks):
    """Signal the groups of all ranks in the middle of the training."""
    # A second step has begun: then every rank has entered its session and hears signals.
    since, later = job.begun(), rng.randrange(2, 20)
    until(lambda: job.begun() >= since + later, "steps", running=ranks[0])
    number = rng.choice([signal.SIGTERM, signal.SIGUSR1])
    for rank in ranks:
        rank.signal_group(number)
    assert [rank.wait() for rank in ranks] == [75] * len(ranks), ranks[0].text
    for rank in ranks:
        assert "killed by signal" not in rank.err
        assert "Traceback" not in rank.err
    stopped = [max(job.consumed(rank)) for rank in range(job.num_ranks)]
    assert stopped == [job.newest()] * job.num_ranks


def check(floor, rng, tmp_path, num_ranks, *options):
    calm, job = (Job(tmp_path / name, num_ranks) for name in ("calm", "job"))

    def start(one, *more):
        arguments = (TRAIN, one.records, STEPS, *options, *more)
        if num_ranks == 1:
            return [floor.warm(*arguments, env=one.env)]
        return floor.ranks(num_ranks, *arguments, env=one.env)

    undisturbed = start(calm)
    assert [rank.wait() for rank in undisturbed] == [0] * num_ranks, undisturbed[0].text
    for _ in range(STOPS):
        stop_somewhere(rng, job, start(job, "--pause", "0.02"))
    last = start(job)
    assert [rank.wait() for rank in last] == [0] * num_ranks, last[0].text
    for rank in range(num_ranks):
        steps = [line["step"] for line in job.lines(rank)]
        assert steps == list(range(1, STEPS + 1))  # each once: none lost, none repeated
        assert job.consumed(rank) == calm.consumed(rank)
    assert [final["hash"] for final in job.finals()] == [final["hash"] for final in calm.finals()]


@pytest.mark.parametrize("name", some(LOADERS, 3))
def test_one_process(floor, rng, tmp_path, name):
    loader, num_workers = LOADERS[name]
    check(floor, rng, tmp_path, 1, "--loader", loader, "--num-workers", num_workers)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_distributed_sampler_on_two_ranks(floor, rng, tmp_path, num_workers):
    check(floor, rng, tmp_path, 2, "--loader", "distributed", "--num-workers", num_workers)


def test_a_killed_process_takes_its_loader_processes_along(floor, tmp_path):
    job = Job(tmp_path / "job")
    arguments = ("--loader", "stock", "--num-workers", 2, "--pause", "0.02", "--light")
    # A fresh interpreter, so that its children can be told by its environment.
    process = floor.cold(TRAIN, job.records, STEPS, *arguments, env=job.env)
    until(lambda: job.begun() >= 3, "steps", running=process)
    until(lambda: len(floor.offspring()) >= 3, "loader processes", running=process)
    process.kill()
    until(lambda: not floor.offspring(), "the end of the loader processes")
    again = floor.warm(TRAIN, job.records, 40, *arguments, env=job.env)
    assert again.wait() == 0, again.text
