"""Machines of two kinds in one job: each is reckoned at its own price, whoever says its kind."""

import json

import pytest
from floor import TRAIN, Job

from outlast.drill.metadata_server import AwsMetadataServer
from outlast.ledger.file import read_events

PRICES = {"OUTLAST_PRICE_SPOT": "p5.48xlarge=3600, dgx=1800"}


def report(floor, directory, **env):
    process = floor.outlast("report", directory, "--json", env={**PRICES, **env})
    assert process.wait() == 0, process.text
    return json.loads(process.out)


def kinds(directory):
    return {
        one.node: (one["kind"], one["source"])
        for one in read_events(directory)
        if one.event == "machine"
    }


def test_two_machines_at_two_prices(machines, floor, tmp_path):
    job = Job(tmp_path / "job", 2)
    started = [
        host.outlast(
            *("run", "--nnodes", 2, "--nproc-per-node", 1, "--local-addr", host.address),
            *("--dir", job.directory, TRAIN, job.records, 40, "--light"),
            env={"OUTLAST_PRICE_KIND": kind},
        )
        for host, kind in zip(machines(2), ("p5.48xlarge", "dgx"), strict=True)
    ]
    assert [one.wait() for one in started] == [0, 0], started[0].text
    said = kinds(job.directory)
    assert sorted(said.values()) == [("dgx", "price.kind"), ("p5.48xlarge", "price.kind")]
    found = report(floor, job.directory)
    assert found["unpriced_machine_s"] == 0
    costs = {said[name][0]: cost for name, cost in found["cost_by_machine"].items()}
    assert costs["p5.48xlarge"] == pytest.approx(2 * costs["dgx"])
    assert found["cost"] == pytest.approx(sum(costs.values()))
    one_price = report(floor, job.directory, OUTLAST_PRICE_SPOT="2700")
    assert found["cost"] == pytest.approx(one_price["cost"])


def test_a_session_alone_hears_from_its_cloud_what_machine_it_has(floor, tmp_path):
    job = Job(tmp_path / "job")
    with AwsMetadataServer() as server:
        server.kind = "p5.48xlarge"
        told_of = {"OUTLAST_NOTICE_PLATFORM": "aws", "OUTLAST_NOTICE_BASE_URL": server.url}
        process = floor.warm(TRAIN, job.records, 40, "--light", env={**job.env, **told_of})
        assert process.wait() == 0, process.text
    assert set(kinds(job.directory).values()) == {("p5.48xlarge", "aws")}
    found = report(floor, job.directory)
    assert [(one["kind"], one["price"]) for one in found["kinds_of_machines"]] == [
        ("p5.48xlarge", 3600.0)
    ]
    assert found["cost"] > 0
