"""The watcher against a real server on the loopback, correct and spoiled."""

import socket
import time

import pytest

from outlast.drill.metadata_server import (
    ACTION_PATH,
    REBALANCE_PATH,
    TIME_PATH,
    TOKEN_PATH,
    AnswerFault,
    AwsMetadataServer,
)
from outlast.notice import aws, source
from outlast.notice.aws import AwsWatcher
from outlast.notice.platform import choose

PATIENT_S = 2.0  # where the answer is expected to come
IMPATIENT_S = 0.3  # where it is expected not to


@pytest.fixture
def server():
    with AwsMetadataServer() as server:
        yield server


@pytest.fixture
def watcher(server, monkeypatch):
    monkeypatch.setattr(aws, "_SOFTER_S", PATIENT_S)  # a loaded machine may miss 0.4 s
    return AwsWatcher(server.url, timeout_s=PATIENT_S)


def methods(server):
    """What was asked about the notice itself, and for tokens."""
    return [
        (request.method[0], request.status)
        for request in server.requests
        if request.path in (TOKEN_PATH, ACTION_PATH)
    ]


@pytest.mark.parametrize("action", ["terminate", "stop"])
def test_a_notice_is_heard_and_withdrawn(server, watcher, action):
    assert watcher.poll() is None
    deadline_t = server.preempt(in_s=120.0, action=action)
    notice = watcher.poll()
    assert (notice.source, notice.action, notice.deadline_t) == ("aws", action, deadline_t)
    assert notice.heard_t <= time.time()
    server.withdraw()
    assert watcher.poll() is None
    assert methods(server) == [("P", 200), ("G", 404), ("G", 200), ("G", 404)]
    assert (watcher.polls, watcher.errors) == (3, 0)


def test_hibernation_is_heard_without_time(server, watcher):
    server.preempt(action="hibernate")
    notice = watcher.poll()
    assert notice.seconds_left(time.time()) == 0


def test_a_rebalance_recommendation_is_early_and_a_notice_wins_over_it(server, watcher):
    server.recommend_rebalance()
    notice = heard(watcher)
    assert (notice.action, notice.early, notice.deadline_t) == ("rebalance", True, None)
    deadline_t = server.preempt()
    notice = watcher.poll()
    assert (notice.action, notice.early, notice.deadline_t) == ("terminate", False, deadline_t)
    server.withdraw()
    assert heard(watcher).action == "rebalance"


def test_termination_time_alone_is_heard(server, watcher):
    server.only_termination_time(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 90)))
    assert 0 < heard(watcher).seconds_left(time.time()) <= 90
    server.only_termination_time("nothing is planned")
    assert [watcher.poll() for _ in range(5)][-1] is None


@pytest.mark.parametrize("path", [TIME_PATH, REBALANCE_PATH])
@pytest.mark.parametrize(
    "fault", [AnswerFault(status=500), AnswerFault(delay_s=3.0), AnswerFault(drip_s=0.05)]
)
def test_softer_questions_that_fail_do_not_hold_up_the_notice(server, path, fault):
    watcher = AwsWatcher(server.url, timeout_s=PATIENT_S)
    server.inject(fault, path=path)
    assert watcher.poll() is None
    assert watcher.errors == 1
    server.preempt()
    assert watcher.poll() is not None
    num_asked = len(server.requests)
    server.withdraw()
    watcher.poll()
    assert [request.path for request in server.requests[num_asked:]] == [ACTION_PATH]


def test_expired_tokens_are_renewed_within_the_poll(server, watcher):
    watcher.poll()
    server.expire_tokens()
    server.preempt()
    assert watcher.poll() is not None
    assert methods(server)[2:] == [("G", 401), ("P", 200), ("G", 200)]
    assert watcher.errors == 0


def test_tokens_that_expire_on_the_server_s_clock():
    now = [time.time()]
    with AwsMetadataServer(clock=lambda: now[0]) as server:
        watcher = AwsWatcher(server.url, timeout_s=PATIENT_S)
        watcher.poll()
        now[0] += 21_600  # the watcher's clock does not know
        assert watcher.poll() is None
        assert methods(server)[2:] == [("G", 401), ("P", 200), ("G", 404)]
        assert watcher.errors == 0


def test_proxies_are_bypassed(server, watcher, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as dead:
        proxy = f"http://127.0.0.1:{dead.getsockname()[1]}"
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server.preempt()
    assert watcher.poll() is not None


def test_redirects_are_not_followed(server, watcher):
    watcher.poll()
    server.preempt()
    moved = AnswerFault(status=302, headers=(("Location", server.url + ACTION_PATH),))
    server.inject(moved, times=1)
    assert watcher.poll() is None
    assert methods(server)[2:] == [("G", 302)]
    assert server.requests[-1].status == 302
    assert "status 302" in watcher.last_error


SPOILED = {
    "500": (AnswerFault(status=500), "status 500"),
    "503": (AnswerFault(status=503), "status 503"),
    "garbage": (AnswerFault(body=b"<html>\xff\x00</html>"), "cannot be read"),
    "empty": (AnswerFault(body=b""), "cannot be read"),
    "not http": (AnswerFault(raw=b"SSH-2.0-OpenSSH_9.2\r\n"), "not HTTP"),
    "noise": (AnswerFault(raw=bytes(range(256)) * 64), "not HTTP"),
    "endless head": (AnswerFault(raw=b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000), "not HTTP"),
    "closed": (AnswerFault(raw=b""), "not HTTP"),
    "huge": (AnswerFault(padding_bytes=8 << 20), "larger than 16384 bytes"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_notice_is_none(server, watcher, name):
    fault, said = SPOILED[name]
    watcher.poll()
    server.preempt()
    server.inject(fault, method="GET")
    assert watcher.poll() is None
    assert watcher.errors == 1
    assert said in watcher.last_error
    server.inject(AnswerFault())
    assert watcher.poll() is not None
    assert watcher.errors == 1


# Read to their end these answers are correct, so only a limit on the whole exchange, not one on
# the silence between two bytes, makes them errors.
LATE = {
    "slow": AnswerFault(delay_s=3.0),
    "drips": AnswerFault(drip_s=0.03),
    "drips in the body": AnswerFault(drip_s=0.1, drip_after_bytes=100),
}


@pytest.mark.parametrize("name", LATE)
def test_a_late_notice_is_given_up_and_heard_once_it_is_quick(server, name):
    watcher = AwsWatcher(server.url, timeout_s=IMPATIENT_S)
    assert any(watcher.answers() for _ in range(100))  # a loaded machine may miss 0.3 s
    watcher.errors = 0
    server.preempt()
    server.inject(LATE[name], method="GET")
    assert watcher.poll() is None
    assert watcher.errors == 1
    assert watcher.last_error == f"{server.url}: no whole answer within 0.3 s"
    server.inject(AnswerFault())
    assert heard(watcher) is not None


@pytest.mark.parametrize("sent", [b"", b"2015-01-05"])
def test_an_answer_that_is_cut_short_is_none(server, sent):
    """Part of an answer may read like another one: an empty one means "nothing is planned"."""
    server.inject(AnswerFault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n" + sent))
    with pytest.raises(ConnectionError, match="cut short"):
        source.request(
            "GET", f"{server.url}/x", headers={}, timeout_s=PATIENT_S, max_body_bytes=1000
        )


def test_a_token_that_drips_is_given_up(server):
    server.inject(AnswerFault(drip_s=0.03), method="PUT")
    watcher = AwsWatcher(server.url, timeout_s=IMPATIENT_S)
    assert watcher.poll() is None
    assert "no whole answer within" in watcher.last_error


def test_nobody_listens_or_nobody_accepts():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        watcher = AwsWatcher(url, timeout_s=IMPATIENT_S)
        assert watcher.poll() is None
        assert "no whole answer" in watcher.last_error
    assert watcher.poll() is None
    assert "refused" in watcher.last_error
    assert watcher.errors == 2


def test_each_wait_gets_only_what_is_left_of_the_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(source.time, "monotonic", lambda: now[0])
    ours, theirs = socket.socketpair()
    with theirs, source._BoundedSocket(fileno=ours.detach()) as bounded:
        bounded.deadline = 101.0
        now[0] = 100.75
        theirs.sendall(b"x")
        assert bounded.receive() == b"x"
        assert bounded.gettimeout() == 0.25
        now[0] = 101.0
        theirs.sendall(b"x")
        with pytest.raises(TimeoutError):
            bounded.receive()
        with pytest.raises(TimeoutError):
            bounded.sendall(b"x")


def heard(watcher, within_s=60.0):
    give_up = time.monotonic() + within_s
    while time.monotonic() < give_up:
        notice = watcher.poll()
        if notice is not None:
            return notice
    return None


def test_auto_takes_an_address_that_answers_as_ec2_does(server, tmp_path):
    (watcher,), reason, *_ = choose("auto", server.url, root=tmp_path)
    assert reason == (f"notices from aws at {server.url} (120 s ahead): it answers as aws's does")
    server.preempt()
    assert heard(watcher) is not None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (AnswerFault(status=404), "it answered status 404"),
        (AnswerFault(body=b"<html>it works</html>"), "it answered something else"),
        (AnswerFault(raw=b""), "not HTTP"),
        (AnswerFault(drip_s=0.05), "no whole answer within 2 s"),
    ],
)
def test_auto_leaves_an_address_that_does_not(server, tmp_path, fault, said):
    server.inject(fault)
    watchers, reason, *_ = choose("auto", server.url, root=tmp_path)
    assert watchers == ()
    assert reason.startswith(
        f"notices from signals only: no metadata service answers ({server.url}"
    )
    assert said in reason
    assert "\n" not in reason
