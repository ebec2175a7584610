"""What Alibaba's metadata service says is understood exactly, and nothing else is a notice."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.notice import alibaba
from outlast.notice.alibaba import AlibabaWatcher
from outlast.notice.source import HttpResponse
from thorough import examples

NOW = 1_420_480_620.0  # 2015-01-05T17:57:00Z
DUE = NOW + 300
DUE_TEXT = b"2015-01-05T18:02:00Z"
TOKEN = "secret_token=="
TTL = {"X-aliyun-ecs-metadata-token-ttl-seconds": "21600"}


class Service:
    """The service as a function; P is a request for a token, T a question with it, G without."""

    def __init__(self, released=None):
        self.released = released or HttpResponse(404, b"")
        self.token = HttpResponse(200, TOKEN.encode())
        self.with_token = self.without_token = None
        self.asked = ""

    def __call__(self, method, url, *, headers, timeout_s, max_body_bytes):
        if method == "PUT":
            self.asked += "P"
            assert (url, headers) == ("http://service/latest/api/token", TTL)
            return given_(self.token)
        zone = url == "http://service/latest/meta-data/zone-id"
        if not zone:
            assert url == "http://service/latest/meta-data/instance/spot/termination-time"
        self.asked += "T" if headers else "G"
        assert headers in ({}, {"X-aliyun-ecs-metadata-token": TOKEN})
        refusal = self.with_token if headers else self.without_token
        return given_(refusal or (HttpResponse(200, b"cn-hangzhou-i") if zone else self.released))


def given_(answer):
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def watcher(service):
    return AlibabaWatcher("http://service", clock=lambda: NOW, send=service)


@pytest.mark.parametrize(
    "answer", [HttpResponse(404, b""), HttpResponse(200, b""), HttpResponse(200, b"\n")]
)
def test_nothing_is_announced(watcher, service, answer):
    service.released = answer
    assert watcher.poll() is None
    assert watcher.poll() is None
    assert (watcher.polls, watcher.errors, service.asked) == (2, 0, "PTT")


def test_a_time_is_the_notice(watcher, service):
    service.released = HttpResponse(200, DUE_TEXT + b"\n")
    notice = watcher.poll()
    assert (notice.source, notice.action, notice.early) == ("alibaba", "terminate", False)
    assert (notice.deadline_t, notice.heard_t) == (DUE, NOW)
    assert notice.detail == "ECS: released at 2015-01-05T18:02:00+00:00"
    assert watcher.poll() is notice


@pytest.mark.parametrize(
    "refusal",
    [
        HttpResponse(404, b""),
        HttpResponse(403, b""),
        ConnectionRefusedError("refused"),
        TimeoutError("slow"),  # a hop limit of 1, in a container
    ],
)
def test_a_service_without_tokens_is_asked_without_and_for_one_again_later(
    watcher, service, monkeypatch, refusal
):
    now = [1000.0]
    monkeypatch.setattr(alibaba.time, "monotonic", lambda: now[0])
    service.token = refusal
    service.released = HttpResponse(200, DUE_TEXT)
    assert watcher.poll() is not None
    assert watcher.poll() is not None
    assert (service.asked, watcher.errors) == ("PGG", 0)
    now[0] += 600
    service.token = HttpResponse(200, TOKEN.encode())
    assert watcher.poll() is not None
    assert service.asked == "PGGPT"


def test_a_token_that_is_refused_is_renewed_in_the_same_poll(watcher, service):
    watcher.poll()
    service.with_token = HttpResponse(401, b"")
    assert watcher.poll() is None
    assert (service.asked, watcher.errors) == ("PT" + "TPT", 1)


def test_a_service_that_now_wants_tokens_gets_one_in_the_same_poll(watcher, service):
    service.token = HttpResponse(404, b"")
    watcher.poll()
    service.token = HttpResponse(200, TOKEN.encode())
    service.without_token = HttpResponse(403, b"")
    service.released = HttpResponse(200, DUE_TEXT)
    assert watcher.poll() is not None
    assert (service.asked, watcher.errors) == ("PG" + "GPT", 0)


@pytest.mark.parametrize("answer", [HttpResponse(403, b""), HttpResponse(401, b"")])
def test_a_service_that_refuses_both_is_an_error_not_a_loop(watcher, service, answer):
    service.token = HttpResponse(403, b"")
    service.without_token = answer
    assert watcher.poll() is None
    assert (len(service.asked), watcher.errors) == (4, 1)


@pytest.mark.parametrize(
    "answer", [HttpResponse(500, b""), HttpResponse(200, b""), HttpResponse(200, b"a\r\nb: c")]
)
def test_a_token_service_that_is_ill_is_an_error(watcher, service, answer):
    service.token = answer
    assert watcher.poll() is None
    assert not watcher.answers()
    assert (service.asked, watcher.errors) == ("PP", 2)


@pytest.mark.parametrize(
    "answer",
    [
        HttpResponse(200, b"soon"),
        HttpResponse(200, b"2015-01-05T18:02:00"),
        HttpResponse(200, b"2015-01-05T18:02:00+08:00"),
        HttpResponse(200, b"2015-13-05T18:02:00Z"),
        HttpResponse(200, b"2015-01-05T18:02:00Z 2015"),
        HttpResponse(200, b"2016-01-05T18:02:00Z"),
        HttpResponse(200, b"0001-01-01T00:00:00Z"),
        HttpResponse(200, b"\xff\xfe"),
        HttpResponse(200, b"<html>2015-01-05T18:02:00Z</html>"),
        HttpResponse(302, DUE_TEXT),
        HttpResponse(500, DUE_TEXT),
        HttpResponse(503, b""),
    ],
)
def test_what_is_not_a_notice(watcher, service, answer):
    service.released = answer
    assert watcher.poll() is None
    assert watcher.errors == 1
    service.released = HttpResponse(200, DUE_TEXT)
    assert watcher.poll() is not None


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("token", OSError("no route")),
        ("token", KeyError(1)),
        ("released", TimeoutError("slow")),
        ("released", OSError("no route")),
        ("released", KeyError(1)),
    ],
)
def test_poll_never_raises(watcher, service, error, what):
    setattr(service, what, error)
    assert watcher.poll() is None
    assert watcher.errors == 1


@examples(300)
@given(
    status=st.sampled_from([200, 200, 200, 201, 301, 401, 403, 404, 500]),
    body=st.binary(),
    token=st.sampled_from(
        [HttpResponse(200, TOKEN.encode()), HttpResponse(404, b""), HttpResponse(500, b"")]
    ),
)
def test_no_bytes_are_a_notice_or_raise(status, body, token):
    service = Service(HttpResponse(status, body))
    service.token = token
    assert AlibabaWatcher("http://service", clock=lambda: NOW, send=service).poll() is None


def test_the_token_is_in_no_log_and_no_error(watcher, service, caplog):
    caplog.set_level(logging.DEBUG)
    for answer in (HttpResponse(200, b"soon"), HttpResponse(503, b""), TimeoutError()):
        service.released = answer
        watcher.poll()
        assert "secret" not in watcher.last_error
    assert "secret" not in caplog.text + repr(watcher)
