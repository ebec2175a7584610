"""A bucket of a real server, with a proxy before it."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "unit" / "storage"))  # the contract
pytest.register_assert_rewrite("storage_contract")

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server():
    pytest.importorskip("moto")
    from bucket_server import BucketServer

    started = BucketServer()
    yield started
    started.close()


@pytest.fixture
def bucket(server):
    """An empty bucket's name."""
    name = f"bucket-{next(_numbers)}"
    server.make_bucket(name)
    return name


@pytest.fixture
def proxy(server, monkeypatch):
    """What AWS_ENDPOINT_URL leads to."""
    from bucket_server import Proxy

    between = Proxy(server.address)
    for name, value in {
        "AWS_ENDPOINT_URL": between.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "of-no-account",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t",
    }.items():
        monkeypatch.setenv(name, value)
    yield between
    between.close()
