"""Fixtures for ``outlast watch``."""

import pytest
from watch_floor import Listening

from outlast.drill.metadata_server import AwsMetadataServer


@pytest.fixture(name="listen")
def _listen(floor):
    return lambda name="job", **options: Listening(floor, name, **options)


@pytest.fixture(name="server")
def _server():
    with AwsMetadataServer() as server:
        yield server


@pytest.fixture(name="watch")
def _watch(floor, server):
    def start(*arguments, **options):
        asked = ("--platform", "aws", "--base-url", server.url, "--poll", "100 ms")
        return floor.cold("-m", "outlast", "watch", *asked, *arguments, **options)

    return start
