"""Under a notice: which tiers are brought up to date in the time that is left, and what is said."""

import os
import signal

import pytest
from bucket_server import Delay
from floor import TRAIN, Job, until

TIERS = """
[[tier]]
name = "local"
url = "{local}"
[[tier]]
name = "near"
url = "s3://{near}/job"
[[tier]]
name = "far"
url = "s3://{far}/job"
"""
# 34 MB: five parts in the far store, of which each takes its time.
BIG = ("--light", "--width", 250_000, "--size", 8, "--every", "4 s", "--pause", "0.02")


@pytest.fixture(name="near")
def _near(bucket):
    return bucket


@pytest.fixture(name="far")
def _far(server):
    server.make_bucket("far-away")
    return "far-away"


def each_request_takes(proxy, seconds):
    proxy.faults[:] = [
        Delay(where=rf"(PUT|POST) /{bucket}/.*", delay_s=delay_s)
        for bucket, delay_s in seconds.items()
    ]


def copied(job, tier):
    return [event for event in job.events("tier_copied") if event["tier"] == tier]


def test_what_is_in_reach_is_brought_up_to_date_and_what_is_not_is_named(
    floor, tmp_path, proxy, near, far
):
    job = Job(tmp_path / "job")
    (tmp_path / "outlast.toml").write_text(TIERS.format(local=job.checkpoints, near=near, far=far))
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    env = {**job.env, **environ, "OUTLAST_NOTICE_GRACE": "12 s"}
    process = floor.outlast(
        "run", "--dir", job.directory, TRAIN, job.records, 100_000, *BIG, env=env
    )
    each_request_takes(proxy, {near: 0.1, far: 0.1})
    until(lambda: copied(job, "far") and copied(job, "near"), "all tiers", running=process)
    each_request_takes(proxy, {near: 0.5, far: 40.0})
    process.signal(signal.SIGTERM)
    assert process.wait() == 75, process.text
    (agreed,), (drained,), (notice,) = map(job.events, ("drain_agreed", "drained", "notice"))
    assert agreed["tiers"] == ["local", "near", "far"]  # it was quick until then
    assert (drained["step"], drained["committed"]) == (job.newest(), True)
    assert copied(job, "near")[-1]["step"] == drained["step"]
    before = copied(job, "far")[-1]["step"]
    assert before < drained["step"]
    said = f"outlast: step {drained['step']} is in local, near alone: far has step {before}\n"
    assert said in process.err
    assert job.events("job_finished")[-1].t < notice["deadline_t"]
