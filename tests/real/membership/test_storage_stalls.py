"""The storage that the rendezvous uses stalls, then answers errors: a running attempt goes on.

It is a bucket; the job's directory and its tier are elsewhere. Claims that cannot be read let
nobody commit, so that saves wait meanwhile, and training does not.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from floor import SCRIPTS, Job, until

sys.path.append(str(Path(__file__).parents[1] / "storage"))

STALL_S = 10.0
ERRORS_S = 3.0
BUCKET = "bucket"
FAULT_S = 5.0  # that a commit which was let through before may take


class Stalled:
    """Two agents of a job whose attempts are claimed in a bucket."""

    def __init__(self, floor, directory, server, proxy):
        self.server, self.proxy = server, proxy
        self.job = Job(directory / "job", 2)
        self.end = directory / "end"
        env = {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "of-no-account",
            "AWS_SECRET_ACCESS_KEY": "s3cr3t",
        }
        self.agents = [
            floor.outlast(
                *("run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "outlast"),
                *("--rdzv-endpoint", f"s3://{BUCKET}/job", "--local-addr", "127.0.0.1"),
                *("--dir", self.job.directory, SCRIPTS / "elastic.py", self.job.records, 100_000),
                *("--every", "3 steps", "--pause", 0.03, "--end", self.end),
                env=env,
            )
            for _ in range(2)
        ]

    def until(self, condition, what):
        return until(condition, what, running=self.agents[0])

    def commits(self, since_t=0.0, until_t=float("inf")):
        events = self.job.events("commit")
        return [event["step"] for event in events if since_t < event.t < until_t]

    def claims(self):
        return self.server.ask("GET", f"/{BUCKET}?list-type=2").count("/attempt-")

    def go_on_through(self, seconds):
        """Steps go on all the time; returns when it began and ended."""
        begun_t = time.time()
        while time.time() < begun_t + seconds:
            step = self.job.begun()
            self.until(lambda step=step: self.job.begun() > step + 3, "more steps")
        return begun_t, time.time()

    def commit_again(self):
        t = time.time()
        self.until(lambda: self.commits(since_t=t), "a commit behind it")
        assert [event.attempt for event in self.job.events("attempt_formed")] == [1]
        assert self.claims() == 1

    def finish(self):
        unfinished = self.end.with_suffix(".tmp")
        unfinished.write_text(str(self.job.begun() + 5))
        unfinished.replace(self.end)
        assert [agent.wait() for agent in self.agents] == [0, 0], self.agents[0].text
        first, second = self.job.finals()
        assert first["hash"] == second["hash"]
        assert [first["resumed"], second["resumed"]] == [0, 0]


@pytest.fixture
def stalled(floor, tmp_path):
    pytest.importorskip("moto")
    from bucket_server import BucketServer, Proxy

    server = BucketServer()
    server.make_bucket(BUCKET)
    proxy = Proxy(server.address)
    yield Stalled(floor, tmp_path, server, proxy)
    os.kill(server._process.pid, signal.SIGCONT)
    floor.close()
    proxy.close()
    server.close()


def test_steps_go_on_and_a_save_behind_it_is_committed(stalled):
    from bucket_server import Answer

    stalled.until(stalled.commits, "a commit")
    os.kill(stalled.server._process.pid, signal.SIGSTOP)
    begun_t, ended_t = stalled.go_on_through(STALL_S)
    os.kill(stalled.server._process.pid, signal.SIGCONT)
    assert stalled.commits(begun_t + FAULT_S, ended_t) == []
    reasons = stalled.job.events("storage_error")
    assert {event["operation"] for event in reasons} == {"claim"}
    assert "stays in memory" in reasons[0]["error"]
    stalled.commit_again()
    stalled.proxy.faults.append(Answer(status=503))
    stalled.go_on_through(ERRORS_S)
    assert stalled.proxy.lines("Answer"), "nobody asked storage"
    stalled.proxy.faults.clear()
    stalled.commit_again()
    stalled.finish()
