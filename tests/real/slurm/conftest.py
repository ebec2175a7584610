"""One Slurm for all tests of this directory; each test leaves it without jobs."""

import os

import floor as real
import pytest
import slurm_floor


@pytest.fixture(scope="package")
def _cluster(tmp_path_factory):
    if missing := slurm_floor.missing():
        pytest.skip(f"{missing[0]} is not here: apt install slurmctld slurmd slurm-client munge")
    if os.getuid() != 0:
        pytest.skip("Slurm's own processes are started as root here")
    started = real.Floor(tmp_path_factory.mktemp("slurm"))
    cluster = slurm_floor.Slurm(started)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        started.close()


@pytest.fixture
def slurm(_cluster):
    yield _cluster
    _cluster.cancel_all()
