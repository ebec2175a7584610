"""What the metadata service says is understood exactly, and nothing else is a notice."""

import itertools
import json
import logging
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.notice import Notice
from outlast.notice.aws import AwsWatcher
from outlast.notice.source import HttpResponse, WatchThread
from thorough import examples

NOW = 1_505_722_800.0  # 2017-09-18T08:20:00Z
DUE = NOW + 120
DUE_TEXT = "2017-09-18T08:22:00Z"
TIME_PATH = "/latest/meta-data/spot/termination-time"
LIFECYCLE_PATH = "/latest/meta-data/autoscaling/target-lifecycle-state"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
SOFTER = {TIME_PATH: "time", LIFECYCLE_PATH: "lifecycle", REBALANCE_PATH: "rebalance"}


class Clock:
    def __init__(self) -> None:
        self.t = NOW

    def __call__(self) -> float:
        return self.t


class Service:
    """IMDSv2 as a function: tokens are numbered, what is announced can be set."""

    def __init__(self) -> None:
        self.token = ""
        self.asked: list[tuple[str, str]] = []
        self.put: HttpResponse | Exception | None = None
        self.get: HttpResponse | Exception = HttpResponse(404, b"")
        self.time: HttpResponse | Exception = HttpResponse(404, b"")
        self.lifecycle: HttpResponse | Exception = HttpResponse(404, b"")
        self.rebalance: HttpResponse | Exception = HttpResponse(404, b"")
        self.accepts_tokens = True
        self.limits: set[tuple[float, int]] = set()
        self._numbers = itertools.count(10_000_000)

    def __call__(self, method, url, *, headers, timeout_s, max_body_bytes):
        path = url.removeprefix("http://service")
        self.asked.append((method, path))
        if path in SOFTER:
            assert headers == {"X-aws-ec2-metadata-token": self.token}
            assert 0 < timeout_s < 0.4 + 1e-9
            return _given(getattr(self, SOFTER[path]))
        self.limits.add((timeout_s, max_body_bytes))
        if method == "PUT":
            assert path == "/latest/api/token"
            assert headers == {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            self.token = f"secret{next(self._numbers)}=="
            return _given(self.put or HttpResponse(200, self.token.encode()))
        assert path == "/latest/meta-data/spot/instance-action"
        if headers != {"X-aws-ec2-metadata-token": self.token} or not self.accepts_tokens:
            return HttpResponse(401, b"")
        return _given(self.get)

    def methods(self) -> str:
        methods = "".join(method[0] for method, path in self.asked if path not in SOFTER)
        self.asked.clear()
        return methods


def _given(answer):
    if isinstance(answer, Exception):
        raise answer
    return answer


def announced(action: object = "terminate", time: object = DUE_TEXT) -> HttpResponse:
    return HttpResponse(200, json.dumps({"action": action, "time": time}).encode())


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def watcher(clock, service):
    return AwsWatcher("http://service", clock=clock, send=service)


def test_nothing_is_announced(watcher, service):
    assert watcher.poll() is None
    assert (watcher.polls, watcher.errors, watcher.last_error) == (1, 0, "")
    assert service.limits == {(1.0, 16_384)}


@pytest.mark.parametrize("action", ["terminate", "stop"])
def test_a_notice_has_action_and_deadline(watcher, service, action):
    service.get = announced(action)
    notice = watcher.poll()
    assert notice == Notice(
        source="aws", action=action, deadline_t=DUE, heard_t=NOW, detail=notice.detail
    )
    assert notice.detail == f"EC2 spot: {action} at 2017-09-18T08:22:00+00:00"


def test_the_same_notice_said_again_keeps_when_it_was_heard(watcher, service, clock):
    service.get = announced()
    first = watcher.poll()
    clock.t += 30
    assert watcher.poll() == first
    service.get = announced("terminate", "2017-09-18T08:23:00Z")
    assert watcher.poll().heard_t == NOW + 30


def test_hibernation_gives_no_time_and_its_deadline_does_not_move(watcher, service, clock):
    service.get = announced("hibernate")
    assert watcher.poll().deadline_t == NOW
    clock.t += 5
    assert watcher.poll().deadline_t == NOW


def test_seconds_left():
    notice = Notice(source="aws", action="stop", deadline_t=DUE, heard_t=NOW, detail="")
    assert notice.seconds_left(NOW) == 120
    assert notice.seconds_left(DUE + 9) == 0
    open_end = Notice(source="signal", action="stop", deadline_t=None, heard_t=NOW, detail="")
    assert open_end.seconds_left(NOW) is None


@pytest.mark.parametrize(
    "time",
    ["2017-09-18T08:22:00Z", "2017-09-18T08:22:00.000Z", "2017-09-18T10:22:00+02:00"],
)
def test_forms_of_one_time(watcher, service, time):
    service.get = announced("terminate", time)
    assert watcher.poll().deadline_t == DUE


@pytest.mark.parametrize(
    "answer",
    [
        announced("reboot"),
        announced("TERMINATE"),
        announced(None),
        announced("terminate", ""),
        announced("terminate", "soon"),
        announced("terminate", "2017-09-18T08:22:00"),  # whose time?
        announced("terminate", "2017-13-18T08:22:00Z"),
        announced("terminate", "0001-01-01T00:00:00Z"),
        announced("terminate", "9999-12-31T23:59:59Z"),
        announced("terminate", "2018-09-18T08:22:00Z"),
        announced("terminate", DUE),
        HttpResponse(200, b""),
        HttpResponse(200, b"null"),
        HttpResponse(200, b"{}"),
        HttpResponse(200, b"[1]"),
        HttpResponse(200, b'{"action":"terminate"}'),
        HttpResponse(200, b'{"action":"terminate","time":"2017-09-18T08:2'),
        HttpResponse(200, b"<html>terminate</html>"),
        HttpResponse(200, b'{"action":"\xff\xfe","time":"2017-09-18T08:22:00Z"}'),
        HttpResponse(200, b"[" * 10_000),
        HttpResponse(204, b""),
        HttpResponse(302, announced().body),
        HttpResponse(403, announced().body),
        HttpResponse(500, announced().body),
        HttpResponse(503, b""),
    ],
)
def test_what_is_not_a_notice(watcher, service, answer):
    service.get = answer
    assert watcher.poll() is None
    assert watcher.errors == 1
    assert watcher.last_error.startswith("http://service: ")
    service.get = announced()
    assert watcher.poll() is not None
    assert watcher.errors == 1


@pytest.mark.parametrize(
    "error",
    [TimeoutError("slow"), ConnectionResetError(), OSError("no route"), ValueError(), KeyError(1)],
)
@pytest.mark.parametrize("method", ["put", "get"])
def test_poll_never_raises(watcher, service, error, method):
    setattr(service, method, error)
    assert watcher.poll() is None
    assert watcher.errors == 1
    assert str(error) in watcher.last_error


@examples(300)
@given(status=st.sampled_from([200, 200, 200, 201, 301, 401, 404, 500]), body=st.binary())
def test_no_bytes_are_a_notice_or_raise(status, body):
    service = Service()
    service.get = HttpResponse(status, body)
    assert AwsWatcher("http://service", clock=Clock(), send=service).poll() is None


@examples(300)
@given(
    action=st.sampled_from(["terminate", "stop"]),
    due=st.integers(int(NOW) - 80_000, int(NOW) + 80_000),
)
def test_every_documented_notice_is_heard(action, due):
    service = Service()
    service.get = announced(action, datetime.fromtimestamp(due, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    notice = AwsWatcher("http://service", clock=Clock(), send=service).poll()
    assert (notice.action, notice.deadline_t) == (action, due)


@examples(300)
@given(status=st.sampled_from([200, 200, 201, 301, 401, 404, 500]), body=st.binary())
def test_no_bytes_of_the_softer_questions_are_a_notice_or_raise(status, body):
    service = Service()
    service.time = service.rebalance = HttpResponse(status, body)
    assert AwsWatcher("http://service", clock=Clock(), send=service).poll() is None


def test_the_older_form_alone_is_a_hard_notice(watcher, service):
    service.time = HttpResponse(200, DUE_TEXT.encode() + b"\n")
    notice = watcher.poll()
    assert (notice.action, notice.deadline_t, notice.early) == ("terminate", DUE, False)
    assert notice.detail == "EC2 spot: terminate at 2017-09-18T08:22:00+00:00"


@pytest.mark.parametrize("body", [b"", b"none", b"soon", b"\xff", b"1505722920"])
def test_what_is_not_a_time_there_is_documented_as_none(watcher, service, body):
    service.time = HttpResponse(200, body)
    assert watcher.poll() is None
    assert watcher.errors == 0


@pytest.mark.parametrize(
    "body", [b"2017-09-18T08:22:00", b"2018-09-18T08:22:00Z", b"0001-01-01T00:00:00Z"]
)
def test_a_time_that_cannot_be_meant_is_an_error(watcher, service, body):
    service.time = HttpResponse(200, body)
    assert watcher.poll() is None
    assert watcher.errors == 1


def recommended(time=DUE_TEXT):
    return HttpResponse(200, json.dumps({"noticeTime": time}).encode())


def test_a_rebalance_recommendation_is_an_early_notice(watcher, service, clock):
    service.rebalance = recommended("2017-09-17T08:22:00Z")
    notice = watcher.poll()
    assert (notice.action, notice.deadline_t, notice.early) == ("rebalance", None, True)
    clock.t += 30
    assert watcher.poll() == notice
    service.get = announced()
    assert watcher.poll().action == "terminate"


@pytest.mark.parametrize("time", ["", "soon", None, "2017-01-18T08:22:00Z", "2017-09-20T08:22:00Z"])
def test_a_recommendation_that_cannot_be_meant_is_an_error(watcher, service, time):
    service.rebalance = recommended(time)
    assert watcher.poll() is None
    assert watcher.errors == 1


@pytest.mark.parametrize("soft", ["time", "rebalance"])
def test_softer_questions_that_fail_do_not_touch_the_notice_and_are_left_out(
    watcher, service, monkeypatch, soft
):
    now = [100.0]
    monkeypatch.setattr("outlast.notice.aws.time.monotonic", lambda: now[0])
    setattr(service, soft, TimeoutError("slow"))
    assert watcher.poll() is None
    assert watcher.errors == 1
    service.asked.clear()
    watcher.poll()
    assert len(service.asked) == 1
    service.get = announced()
    assert watcher.poll().deadline_t == DUE
    assert watcher.errors == 1
    service.get = HttpResponse(404, b"")
    setattr(
        service, soft, HttpResponse(200, DUE_TEXT.encode()) if soft == "time" else recommended()
    )
    now[0] += 10
    assert watcher.poll() is not None


def test_the_softer_questions_are_put_in_every_fifth_poll_and_5_s_later_at_most(
    watcher, service, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr("outlast.notice.aws.time.monotonic", lambda: now[0])

    def softer():
        service.asked.clear()
        watcher.poll()
        paths = [path for method, path in service.asked if method == "GET"]
        assert paths[0] not in SOFTER
        assert paths[1:] in ([], list(SOFTER))
        return len(paths) > 1

    assert [softer() for _ in range(11)] == ([True] + [False] * 4) * 2 + [True]
    now[0] += 4.9
    assert not softer()
    now[0] += 0.2
    assert softer()


@pytest.mark.parametrize("soft", ["time", "rebalance"])
def test_softer_word_stands_until_it_is_asked_for_again(watcher, service, soft):
    setattr(
        service, soft, HttpResponse(200, DUE_TEXT.encode()) if soft == "time" else recommended()
    )
    heard = watcher.poll()
    assert heard is not None
    setattr(service, soft, HttpResponse(404, b""))
    assert [watcher.poll() for _ in range(5)] == [heard] * 4 + [None]
    service.get = announced()
    assert watcher.poll().deadline_t == DUE


@pytest.mark.parametrize(
    ("state", "is_notice"),
    [
        *((state, False) for state in ("InService", "Standby", "Detached", "Warmed:Stopped")),
        *((state, False) for state in ("", "terminated", "<html>Terminated</html>", "\xff")),
        *((state, True) for state in ("Terminated", "Warmed:Terminated", "Terminated\n")),
    ],
)
def test_a_group_that_ends_this_machine_gives_notice_without_a_time(
    watcher, service, state, is_notice
):
    service.lifecycle = HttpResponse(200, state.encode())
    service.rebalance = recommended()
    notice = watcher.poll()
    assert notice.early is not is_notice
    assert (notice.action, notice.deadline_t) == ("terminate" if is_notice else "rebalance", None)
    service.lifecycle = HttpResponse(500, b"Terminated")
    for _ in range(5):
        watcher.poll()
    assert watcher.errors == 1


def test_two_recommendations_are_two(service, clock):
    heard = []
    watch = WatchThread(AwsWatcher("http://service", clock=clock, send=service), heard.append)
    for time in ("2017-09-18T08:20:00Z", "2017-09-18T08:20:00Z", "2017-09-19T08:20:00Z"):
        service.rebalance = HttpResponse(200, json.dumps({"noticeTime": time}).encode())
        for _ in range(5):
            watch.check()
        clock.t += 43_200
    assert [notice.detail[-25:] for notice in heard] == [
        "2017-09-18T08:20:00+00:00",
        "2017-09-19T08:20:00+00:00",
    ]


def test_the_softer_questions_share_their_time(watcher, service, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("outlast.notice.aws.time.monotonic", lambda: now[0])
    limits = []

    def send(method, url, **options):
        if url.endswith(tuple(SOFTER)):
            limits.append(round(options["timeout_s"], 3))
            now[0] += 0.3
        return service(method, url, **options)

    AwsWatcher("http://service", clock=Clock(), send=send).poll()
    assert limits == [0.4, 0.1, 0.001]


def test_a_token_serves_many_polls_and_is_renewed_before_it_expires(watcher, service, clock):
    for _ in range(100):
        watcher.poll()
    assert service.methods() == "P" + "G" * 100
    clock.t += 21_600 - 601
    watcher.poll()
    assert service.methods() == "G"
    clock.t += 2
    watcher.poll()
    assert service.methods() == "PG"
    assert watcher.errors == 0


def test_a_clock_that_is_set_back_renews_the_token(watcher, service, clock):
    watcher.poll()
    service.methods()
    clock.t -= 3600
    watcher.poll()
    assert service.methods() == "PG"


def test_401_renews_the_token_and_asks_again_in_the_same_poll(watcher, service):
    watcher.poll()
    service.token = "another"
    service.get = announced()
    service.methods()
    assert watcher.poll() is not None
    assert service.methods() == "GPG"
    assert watcher.errors == 0


def test_401_again_is_an_error_not_a_loop(watcher, service):
    service.accepts_tokens = False
    assert watcher.poll() is None
    assert service.methods() == "PGPG"
    assert (watcher.errors, watcher.last_error) == (
        1,
        "http://service: asked for a notice, it answered status 401",
    )


@pytest.mark.parametrize(
    "answer",
    [
        HttpResponse(200, b""),
        HttpResponse(200, b"<html>please log in</html>"),
        HttpResponse(200, b"token\r\nX-Injected: 1"),
        HttpResponse(200, b"A" * 2000),
        HttpResponse(400, b"AQAEAtoken=="),
        HttpResponse(403, b""),
        HttpResponse(503, b"AQAEAtoken=="),
    ],
)
def test_what_is_not_a_token_is_not_sent_back(watcher, service, answer):
    service.put = answer
    service.get = announced()
    assert watcher.poll() is None
    assert not watcher.answers()
    assert service.methods() == "PP"
    assert watcher.errors == 2


def test_the_token_is_in_no_log_and_no_error(watcher, service, caplog):
    caplog.set_level(logging.DEBUG)
    assert watcher.answers()
    for answer in (
        announced("reboot"),
        HttpResponse(503, b""),
        TimeoutError(),
        HttpResponse(401, b""),
    ):
        service.get = answer
        watcher.poll()
        assert "secret" not in watcher.last_error
    assert len(caplog.records) == 4
    assert "secret" not in caplog.text + repr(watcher)


def test_a_service_that_is_away_warns_once(watcher, service, caplog):
    service.put = OSError("no route to host")
    caplog.set_level(logging.WARNING)
    for _ in range(50):
        watcher.poll()
    assert [record.getMessage() for record in caplog.records] == [
        "no notice can be heard, asking again: http://service: no route to host"
    ]
