"""The doctor's probe of a bucket, at a real server."""

import pytest
from floor import until

from outlast.health.doctor.probes import Child
from outlast.policy.fitness import PlaceFacts, judge_place

LIMIT_S = 60.0


def probed(url):
    child = Child("place", {"url": url, "writes": True, "locks": False}, LIMIT_S)
    try:
        until(child.is_over, "its end")
        return child.answer(PlaceFacts)
    finally:
        child.close()


@pytest.mark.usefixtures("proxy")
def test_a_bucket_is_tried_in_full_and_left_empty(server, bucket):
    facts = probed(f"s3://{bucket}/job")
    assert facts.stage == "", facts
    assert facts.put_new is True
    assert facts.outlasts is True
    assert facts.rate_bytes > 0
    assert abs(facts.clock_offset_s) <= facts.clock_bound_s + 1  # the server is this machine
    assert "<Key>" not in server.ask("GET", f"/{bucket}?list-type=2")
    assert not server.uploads(bucket)


@pytest.mark.usefixtures("proxy")
def test_a_bucket_that_is_not_there_is_said(bucket):
    url = f"s3://no-{bucket}/job"
    facts = probed(url)
    found = judge_place("storage bucket", url, facts)
    assert found.status == "failed"
    assert "there is no bucket" in found.seen
    assert found.seen.count(url) == 1


def test_a_server_that_is_not_there_is_said(proxy, bucket):
    proxy.close()
    facts = probed(f"s3://{bucket}/job")
    assert facts.stage == "small"
    assert "cannot be reached" in facts.error
