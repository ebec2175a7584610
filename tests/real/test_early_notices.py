"""An early notice brings checkpoints closer together, or has the job leave at the next one."""

import pytest
from floor import TRAIN, Job, until

from outlast.drill.metadata_server import AwsMetadataServer

LONG = (100_000, "--light", "--pause", "0.02", "--every", "1 h")


@pytest.fixture(name="server")
def _server():
    with AwsMetadataServer() as server:
        yield server


def start(floor, job, server, way, **more):
    env = {"OUTLAST_NOTICE_PLATFORM": "aws", "OUTLAST_NOTICE_BASE_URL": server.url} | more
    if way == "python":
        return floor.warm(TRAIN, job.records, *LONG, env={**job.env, **env})
    return floor.outlast("run", "--dir", job.directory, TRAIN, job.records, *LONG, env=env)


@pytest.mark.parametrize("way", ["run", "python"])
def test_a_recommendation_has_the_job_save_and_go_on(floor, tmp_path, server, way):
    job = Job(tmp_path / "job")
    process = start(floor, job, server, way)
    until(lambda: job.begun() >= 5, "steps", running=process)
    assert not job.events("snapshot")  # none would be due for an hour
    server.recommend_rebalance()
    until(lambda: len(job.events("commit")) >= 2, "two commits", running=process)
    (notice,) = job.events("notice")
    assert (notice["early"], notice["answer"], notice["action"]) == (True, "save", "rebalance")
    assert "early notice from aws: rebalance; saving more often" in process.err
    assert not job.events("drain_agreed")
    server.preempt(in_s=120)  # and then it is meant
    assert process.wait() == 75, process.text
    assert [event.get("early", False) for event in job.events("notice")] == [True, False]
    assert job.events("drained")[-1]["committed"]


def test_one_that_is_to_be_followed_has_it_leave_at_the_next_checkpoint(floor, tmp_path, server):
    job = Job(tmp_path / "job")
    process = start(floor, job, server, "run", OUTLAST_NOTICE_EARLY="leave")
    until(lambda: job.begun() >= 5, "steps", running=process)
    server.recommend_rebalance()
    assert process.wait() == 75, process.text
    (drained,) = job.events("drained")
    assert (drained["step"], drained["committed"]) == (job.newest(), True)
    assert "early notice from aws: rebalance; saving, then leaving" in process.err
    assert not job.events("worker_lost")
