"""A machine is lost and storage with it: the rest go on from memory, spread over fewer ranks."""

import json
import signal
from pathlib import Path

import pytest
import torch
from floor import Job, free_port, until
from lean import JOB
from peer_floor import Fleet
from state_bits import difference

from outlast.attempt.link import open_store
from thorough import ALL

SCRIPT = Path(__file__).parent / "spread_script.py"
NODES = ("n0", "n1", "n2")
EVERY = 30  # steps; long before the next one all copies are made


class PlayedJob(Job):
    """A job whose agents are played by the test: three machines, a rank each."""

    def __init__(self, floor, directory):
        directory.mkdir()
        super().__init__(directory, len(NODES))
        record = {"id": JOB, "created_t": 0.0, "settings": {}, "versions": {}}
        (directory / "job.json").write_text(json.dumps(record))
        self.floor, self.stores = floor, []
        self.config = directory.with_name("outlast.toml")
        self.config.write_text(f'[[tier]]\nname = "shared"\nurl = "{self.checkpoints}"\n')
        self.fleet = Fleet(
            *(floor, directory.with_name("machines"), NODES),
            shared=self.checkpoints,
            directory=str(directory),
        )

    def start(self, nodes, *arguments):
        """An attempt; its ranks, as started processes."""
        self.fleet.form(*nodes)
        store, port = open_store("127.0.0.1")
        self.stores.append(store)
        shared = {
            "OUTLAST_DIR": self.directory,
            "OUTLAST_CONFIG": self.config,
            "OUTLAST_STORE": f"127.0.0.1:{port}",
            "OUTLAST_ATTEMPT": self.fleet.attempt,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": len(nodes),
            "LOCAL_WORLD_SIZE": 1,
            "LOCAL_RANK": 0,
        }
        keepers = [self.fleet.machines[node].setup.socket for node in nodes]
        return [
            self.floor.warm(
                *(SCRIPT, self.records, *arguments, f"{EVERY} steps"),
                env={**shared, "RANK": rank, "OUTLAST_KEEPER": keeper},
            )
            for rank, keeper in enumerate(keepers)
        ]

    def copied(self):
        """The newest step of which there is a copy of each machine's part."""
        steps = [event["step"] for event in self.events("replicated")]
        return max((step for step in steps if steps.count(step) == len(NODES)), default=0)


@pytest.fixture(name="job")
def _job(floor, tmp_path):
    job = PlayedJob(floor, tmp_path / "job")
    yield job
    job.fleet.close()


CASES = [("fsdp", 2), ("ddp", 0), ("fsdp", 0), ("ddp", 2)]


@pytest.mark.parametrize(("mode", "lost"), CASES if ALL else CASES[:1])
def test_three_lose_one_and_their_storage(job, mode, lost):
    left = [node for position, node in enumerate(NODES) if position != lost]
    go_on(job, mode, lost, left)


def test_a_new_machine_takes_the_place_of_the_lost_one(job):
    job.fleet.add("new")
    go_on(job, "fsdp", 0, ["new", "n1", "n2"])


def go_on(job, mode, lost, nodes):
    ranks = job.start(NODES, mode, 1000)
    step = until(job.copied, "copies of all parts", running=ranks[0])
    for position in (lost, *({0, 1, 2} - {lost})):
        ranks[position].signal(signal.SIGKILL)
    job.fleet.machines[NODES[lost]].die()
    for rank in ranks:
        rank.wait()
    away = job.checkpoints.with_name("away")
    job.checkpoints.rename(away)
    job.checkpoints.write_text("a file, where a directory should be: it cannot be listed")
    known = step + 2
    ranks = job.start(nodes, mode, known)
    resumed = until(lambda: job.events("resumed")[1:], "a resume", running=ranks[0])[0]
    job.checkpoints.unlink()
    away.rename(job.checkpoints)
    assert [rank.wait() for rank in ranks] == [0] * len(nodes), ranks[0].text + ranks[1].text
    assert resumed["step"] == step
    assert resumed["skipped"] == []
    assert resumed["from_world_size"] == 3
    # Copies are made for the new attempt at once: perhaps nothing is left to be asked for.
    assert set(resumed["source"].removeprefix("from ").split(" and ")) <= {"memory", "peer"}
    assert "cannot be listed" not in ranks[0].text  # it was not as much as tried
    assert not job.events("verify_failed")
    then, now = (torch.load(job.records / f"{name}.pt") for name in (f"at-{step}", "entered"))
    assert difference(then, now) == ""
    assert job.newest() == known
