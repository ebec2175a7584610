"""What Google's metadata server says is understood exactly, and nothing else is a notice."""

from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.notice.gcp import MaintenanceWatcher, PreemptedWatcher
from outlast.notice.source import HttpResponse
from thorough import examples

NOW = 1_505_722_800.0
FLAVOR = {"metadata-flavor": "Google"}


class Clock:
    t = NOW

    def __call__(self):
        return self.t


class Service:
    """The server as a function: what it says next, and what it was asked."""

    def __init__(self, said="FALSE"):
        self.said = said
        self.asked = []
        self.etags = iter(range(1, 10_000))

    def __call__(self, method, url, *, headers, timeout_s, max_body_bytes):
        assert (method, headers) == ("GET", {"Metadata-Flavor": "Google"})
        parts = urlsplit(url)
        self.asked.append((parts.path, parse_qs(parts.query), timeout_s))
        if isinstance(self.said, Exception):
            raise self.said
        if isinstance(self.said, HttpResponse):
            return self.said
        etag = {"etag": f"a/{next(self.etags)}&"}
        return HttpResponse(200, self.said.encode(), FLAVOR | etag)


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def preempted(service, clock):
    return PreemptedWatcher("http://service", clock=clock, send=service)


def maintenance(service, clock, **options):
    service.said = "NONE"
    return MaintenanceWatcher("http://service", clock=clock, send=service, **options)


def test_the_first_question_does_not_hang_and_the_next_ones_do(preempted, service):
    for _ in range(3):
        assert preempted.poll() is None
    path = "/computeMetadata/v1/instance/preempted"
    assert service.asked[0] == (path, {}, 1.0)
    hanging = {"wait_for_change": ["true"], "timeout_sec": ["20"]}
    assert service.asked[1:] == [
        (path, hanging | {"last_etag": ["a/1&"]}, 22.0),
        (path, hanging | {"last_etag": ["a/2&"]}, 22.0),
    ]
    assert (preempted.polls, preempted.errors) == (3, 0)


def test_after_an_error_the_value_is_asked_for_at_once(preempted, service):
    preempted.poll()
    service.said = TimeoutError("slow")
    assert preempted.poll() is None
    service.said = "TRUE"
    assert preempted.poll() is not None
    assert service.asked[-1][1:] == ({}, 1.0)


def test_a_server_without_etags_is_asked_without_hanging(preempted, service):
    service.said = HttpResponse(200, b"FALSE", FLAVOR)
    preempted.poll()
    preempted.poll()
    assert service.asked[-1][1] == {}
    assert preempted.errors == 0


def test_preemption_leaves_thirty_seconds_and_the_deadline_does_not_move(preempted, service, clock):
    service.said = "TRUE\n"
    notice = preempted.poll()
    assert (notice.source, notice.action, notice.early) == ("gcp", "preempt", False)
    assert notice.deadline_t == NOW + 30
    clock.t += 20
    assert preempted.poll() == notice
    service.said = "FALSE"
    assert preempted.poll() is None
    service.said = "TRUE"
    assert preempted.poll().deadline_t == NOW + 50


def test_a_migration_is_an_early_notice_without_a_deadline(service, clock):
    watcher = maintenance(service, clock)
    assert watcher.poll() is None
    service.said = "MIGRATE_ON_HOST_MAINTENANCE"
    notice = watcher.poll()
    assert (notice.source, notice.action) == ("gcp-maintenance", "migrate")
    assert (notice.early, notice.deadline_t) == (True, None)
    service.said = "NONE"
    assert watcher.poll() is None
    assert service.asked[-1][0] == "/computeMetadata/v1/instance/maintenance-event"


def test_maintenance_that_ends_the_machine_is_hard(service, clock):
    watcher = maintenance(service, clock)
    service.said = "TERMINATE_ON_HOST_MAINTENANCE"
    notice = watcher.poll()
    assert (notice.action, notice.early, notice.deadline_t) == ("terminate", False, NOW + 60)


def test_an_hour_s_word_is_early_until_two_minutes_are_left(service, clock):
    watcher = maintenance(service, clock, lead_s=3600.0)
    watcher.poll()
    service.said = "TERMINATE_ON_HOST_MAINTENANCE"
    first = watcher.poll()
    assert (first.early, first.deadline_t) == (True, NOW + 3600)
    clock.t = NOW + 3600 - 125.5
    assert watcher.poll() == first
    assert service.asked[-1][1]["timeout_sec"] == ["5"]  # so that we can speak in time
    clock.t = NOW + 3600 - 120.5
    assert watcher.poll().early
    assert service.asked[-1][1] == {}
    clock.t = NOW + 3600 - 120
    last = watcher.poll()
    assert (last.early, last.deadline_t) == (False, NOW + 3600)
    service.said = "NONE"
    assert watcher.poll() is None
    clock.t += 1000
    service.said = "TERMINATE_ON_HOST_MAINTENANCE"
    assert watcher.poll().deadline_t == clock.t + 3600


@pytest.mark.parametrize("kind", [PreemptedWatcher, MaintenanceWatcher])
@pytest.mark.parametrize(
    "answer",
    [
        HttpResponse(200, b"TRUE"),
        HttpResponse(200, b"TRUE", {"metadata-flavor": "google"}),
        HttpResponse(200, b"TERMINATE_ON_HOST_MAINTENANCE", {"server": "Google"}),
        HttpResponse(200, b"", FLAVOR),
        HttpResponse(200, b"true", FLAVOR),
        HttpResponse(200, b"TRUE TRUE", FLAVOR),
        HttpResponse(200, b"\xff", FLAVOR),
        HttpResponse(200, b"<html>TRUE</html>", FLAVOR),
        HttpResponse(302, b"TRUE", FLAVOR),
        HttpResponse(401, b"TRUE", FLAVOR),
        HttpResponse(403, b"TRUE", FLAVOR),
        HttpResponse(404, b"TRUE", FLAVOR),
        HttpResponse(503, b"TERMINATE_ON_HOST_MAINTENANCE", FLAVOR),
    ],
)
def test_what_is_not_a_notice(kind, answer, service):
    watcher = kind("http://service", clock=Clock(), send=service)
    service.said = answer
    assert watcher.poll() is None
    assert watcher.errors == 1
    assert watcher.last_error.startswith("http://service: ")


@pytest.mark.parametrize("error", [TimeoutError("slow"), OSError("no route"), KeyError(1)])
def test_poll_never_raises(preempted, service, error):
    service.said = error
    assert preempted.poll() is None
    assert not preempted.answers()
    assert preempted.errors == 2


@examples(300)
@given(
    status=st.sampled_from([200, 200, 200, 201, 301, 404, 500]),
    body=st.binary(),
    headers=st.sampled_from([{}, FLAVOR, FLAVOR | {"etag": "x\r\ny"}]),
)
def test_no_bytes_are_a_notice_or_raise(status, body, headers):
    service = Service(HttpResponse(status, body, headers))
    for kind in (PreemptedWatcher, MaintenanceWatcher):
        assert kind("http://service", clock=Clock(), send=service).poll() is None
