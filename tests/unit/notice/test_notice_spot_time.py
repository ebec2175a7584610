"""A time at an address is understood exactly, in its zone, and nothing else is a notice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.notice.source import HttpResponse
from outlast.notice.spot_time import TencentWatcher, VolcengineWatcher
from thorough import examples

DUE = 1_534_565_133.0  # 2018-08-18T04:05:33Z, the CVM documentation's example
NOW = DUE - 120
SAID = {TencentWatcher: b"2018-08-18 12:05:33", VolcengineWatcher: b"2018-08-18T04:05:33Z"}
KINDS = pytest.mark.parametrize("kind", SAID)


def watching(kind, answer):
    def send(method, url, *, headers, timeout_s, max_body_bytes):
        assert (method, headers) == ("GET", {})
        if url == f"http://service{kind.path}":
            return answer
        assert url == f"http://service{kind.about}"
        return HttpResponse(200, b"ins-3g445roi" if kind is TencentWatcher else b"cn-beijing\n")

    return kind("http://service", clock=lambda: NOW, send=send)


@KINDS
@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_a_time_is_the_notice(kind, ending):
    watcher = watching(kind, HttpResponse(200, SAID[kind] + ending))
    assert watcher.answers()
    notice = watcher.poll()
    assert (notice.source, notice.action, notice.early) == (kind.name, "terminate", False)
    assert (notice.deadline_t, notice.heard_t) == (DUE, NOW)
    assert watcher.poll() is notice


def test_volcengine_s_time_is_utc_with_its_z_and_without():
    for said in (b"2018-08-18 04:05:33", b"2018-08-18T04:05:33", b"2018-08-18 04:05:33Z"):
        assert watching(VolcengineWatcher, HttpResponse(200, said)).poll().deadline_t == DUE


@KINDS
@pytest.mark.parametrize("answer", [HttpResponse(404, b""), HttpResponse(200, b"\n")])
def test_nothing_is_announced(kind, answer):
    watcher = watching(kind, answer)
    assert watcher.poll() is None
    assert (watcher.polls, watcher.errors) == (1, 0)


@KINDS
@pytest.mark.parametrize("status", [301, 401, 403, 500, 503])
def test_other_answers_are_errors(kind, status):
    watcher = watching(kind, HttpResponse(status, SAID[kind]))
    assert watcher.poll() is None
    assert (watcher.errors, str(status) in watcher.last_error) == (1, True)


@KINDS
@pytest.mark.parametrize(
    "body",
    [
        *(b"soon", b"2018-08-18", b"2019-08-18 12:05:33", b"2018-13-18 12:05:33"),
        *(b"2018-08-18 12:05:33+08:00", b"<html>2018-08-18 12:05:33</html>", b"\xff\xfe"),
    ],
)
def test_what_is_no_time_of_today_is_no_notice(kind, body):
    watcher = watching(kind, HttpResponse(200, body))
    assert watcher.poll() is None
    assert watcher.errors == 1


@examples(200)
@given(status=st.sampled_from([200, 200, 301, 404, 500]), body=st.binary())
def test_no_bytes_are_a_notice_or_raise(status, body):
    for kind in SAID:
        assert watching(kind, HttpResponse(status, body)).poll() is None
