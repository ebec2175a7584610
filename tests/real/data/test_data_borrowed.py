"""Loaders of other libraries, with their own states: killed and stopped, not a batch differs."""

import importlib.util
import signal

import pytest
from floor import SCRIPTS, Job, until

from thorough import ALL

BORROWED = SCRIPTS / "borrowed.py"
STEPS = 40  # of 13 an epoch
DEATHS = 3 if ALL else 2
# Each with the number of ranks. Nodes have no part for each rank; and grain's processes, which
# import everything anew, are too many beside each other for what they could show.
KINDS = {
    "nodes": ("torchdata", [1]),
    "stream": ("datasets", [1, 2]),
    "stream, shuffled": ("datasets", [1, 2]),
    "stream, processes": ("datasets", [1, 2]),
    "stream itself": ("datasets", [1]),
    "stateful stream": ("datasets", [1, 2]),
    "stateful stream, shuffled": ("datasets", [1]),
    "stateful stream, processes": ("datasets", [1]),
    "stateful stream, shuffled, processes": ("datasets", [1]),
    "grain": ("grain", [1, 2]),
    "grain, processes": ("grain", [1]),
    "grain data set": ("grain", [1, 2]),
    "grain iterator": ("grain", [1]),
    "mosaic": ("streaming", [1, 2]),
    "mosaic, processes": ("streaming", [1, 2]),
}
CASES = [(kind, num) for kind, (_, counts) in KINDS.items() for num in counts]


@pytest.mark.timeout(900)  # grain's processes import everything anew, at each of the starts
@pytest.mark.parametrize(("kind", "num_ranks"), CASES if ALL else [("nodes", 1)])
def test_it_sees_the_batches_of_the_undisturbed_run(floor, rng, tmp_path, kind, num_ranks):
    library = KINDS[kind][0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not here; make test-all and make test-mosaic install it")
    check(floor, rng, tmp_path, kind, num_ranks)


def check(floor, rng, tmp_path, kind, num_ranks):
    calm, job = (Job(tmp_path / name, num_ranks) for name in ("calm", "job"))

    def start(one, *more):
        env = {**one.env, "MDS": tmp_path / "mds", "HF_HUB_OFFLINE": "1"}
        arguments = (BORROWED, kind, one.records, STEPS, *more)
        if num_ranks == 1:
            return [floor.warm(*arguments, env=env)]
        return floor.ranks(num_ranks, *arguments, env=env)

    undisturbed = start(calm)
    assert [rank.wait() for rank in undisturbed] == [0] * num_ranks, undisturbed[0].text
    for death in range(DEATHS + 1):
        ranks = start(job, "--pause", 0.03)
        since, later = job.begun(), rng.randrange(1, STEPS // (DEATHS + 2))
        until(lambda n=since + later: job.begun() >= n, "steps", running=ranks[0])
        for rank in ranks:
            rank.signal_group(signal.SIGKILL if death < DEATHS else signal.SIGTERM)
        codes = {rank.wait() for rank in ranks}
        assert codes == {-signal.SIGKILL if death < DEATHS else 75}, ranks[0].text
    last = start(job)
    assert [rank.wait() for rank in last] == [0] * num_ranks, last[0].text
    for rank in range(num_ranks):
        assert job.consumed(rank) == calm.consumed(rank)
    assert job.finals() == calm.finals()
