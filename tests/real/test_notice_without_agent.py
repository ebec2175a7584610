"""Under plain python and stock torchrun a session listens to the platform by itself."""

from floor import TRAIN, Job, until

from outlast.drill.metadata_server import AwsMetadataServer

PAUSE = ("--light", "--pause", "0.02")
STEPS = 100_000


def told_of(server):
    return {"OUTLAST_NOTICE_PLATFORM": "aws", "OUTLAST_NOTICE_BASE_URL": server.url}


def test_plain_python_hears_the_metadata_service(floor, tmp_path):
    job = Job(tmp_path / "job")
    with AwsMetadataServer() as server:
        env = {**job.env, **told_of(server)}
        process = floor.warm(TRAIN, job.records, STEPS, *PAUSE, env=env)
        until(lambda: job.begun() >= 5, "steps", running=process)
        deadline_t = server.preempt(in_s=120)
        assert process.wait() == 75, process.text
    (notice,), (drained,) = job.events("notice"), job.events("drained")
    assert (notice["source"], notice["deadline_t"]) == ("aws", deadline_t)
    assert (drained["step"], drained["committed"]) == (job.newest(), True)
    assert f"outlast: notices from aws at {server.url}" in process.err
    assert "grace 120 s, save needs " in process.err


def test_one_rank_of_a_machine_asks_and_all_leave(floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    with AwsMetadataServer() as server:
        env = {**job.env, **told_of(server)}
        ranks = floor.ranks(2, TRAIN, job.records, STEPS, *PAUSE, env=env)
        until(lambda: job.begun() >= 5, "steps", running=ranks[0])
        server.preempt(in_s=120)
        assert [rank.wait() for rank in ranks] == [75, 75], ranks[0].text
    assert len(job.events("notice")) == 1
    assert job.events("drained")[-1]["committed"]
    assert "notices from aws" not in ranks[1].err
