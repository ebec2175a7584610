"""Where a job's machines meet, as people write it."""

from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.launch.place import place_of


def test_a_directory_or_a_bucket():
    assert place_of("s3://bucket/job") == "s3://bucket/job"
    assert place_of("job") == str(Path("job").absolute())
    assert place_of("/shared/run:7") == "/shared/run:7"


@pytest.mark.parametrize("address", ["node0:29400", "10.0.0.1:0", ":29400", "[::1]:29400"])
def test_an_address_is_none(address):
    with pytest.raises(ConfigError, match="name a directory or bucket"):
        place_of(address)
