"""Addresses and timeouts are checked once, where they come in."""

import pytest

from outlast.errors import ConfigError
from outlast.notice.aws import AwsWatcher
from outlast.notice.source import HttpResponse


@pytest.mark.parametrize(
    "url",
    [
        "",
        "169.254.169.254",
        "https://127.0.0.1",
        "http://",
        "http://127.0.0.1:port",
        "http://127.0.0.1:0",
        "http://127.0.0.1/?a=1",
        "http://[::1",
        "http://user:secret@127.0.0.1",
        "file:///etc/passwd",
    ],
)
def test_addresses_that_cannot_be_used(url):
    with pytest.raises(ConfigError, match="write it as http://HOST"):
        AwsWatcher(url)


@pytest.mark.parametrize("timeout_s", [0, -1, 2.1, float("inf"), float("nan")])
def test_a_request_takes_at_most_two_seconds(timeout_s):
    with pytest.raises(ConfigError, match="up to 2 s"):
        AwsWatcher(timeout_s=timeout_s)


def test_a_slash_at_the_end_and_a_path_before_are_kept_apart():
    urls = []

    def send(method, url, **_):
        urls.append(url)
        return HttpResponse(404, b"")

    AwsWatcher("http://127.0.0.1:80/imds/", send=send).poll()
    assert urls == ["http://127.0.0.1:80/imds/latest/api/token"]
