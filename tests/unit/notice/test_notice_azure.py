"""What Azure's scheduled events say is understood exactly, and nothing else is a notice."""

import itertools
import json
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.notice import Acknowledger, Notice
from outlast.notice.azure import AzureWatcher
from outlast.notice.source import HttpResponse
from thorough import examples

NOW = 1_505_722_800.0  # 2017-09-18T08:20:00Z, a Monday
EVENTS = "http://service/metadata/scheduledevents?api-version=2020-07-01"
COMPUTE = "http://service/metadata/instance/compute?api-version=2021-02-01"


class Clock:
    t = NOW

    def __call__(self):
        return self.t


class Service:
    """The service as a function: each answer can be set, each question is kept."""

    def __init__(self):
        self.asked = []
        self.compute = HttpResponse(200, b'{"name":"set_3","location":"westeurope"}')
        self.events = HttpResponse(200, b'{"DocumentIncarnation":1,"Events":[]}')
        self.post = HttpResponse(200, b"")
        self.sent = []

    def __call__(self, method, url, *, headers, timeout_s, max_body_bytes, body=b""):
        assert headers["Metadata"] == "true"
        self.asked.append((method, url))
        if method == "POST":
            assert (url, headers["Content-Type"]) == (EVENTS, "application/json")
            self.sent.append(json.loads(body))
            answer = self.post
        else:
            answer = {EVENTS: self.events, COMPUTE: self.compute}[url]
        if isinstance(answer, Exception):
            raise answer
        return answer


NUMBERS = itertools.count(2)


def event(kind="Preempt", in_s=30.0, **changes):
    return {
        "EventId": f"id of {kind}",
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["set_2", "set_3"],
        "NotBefore": formatdate(NOW + in_s, usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    } | changes


def listed(*events):
    document = {"DocumentIncarnation": next(NUMBERS), "Events": list(events)}
    return HttpResponse(200, json.dumps(document).encode())


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watcher(service, clock):
    return AzureWatcher("http://service", clock=clock, send=service)


def test_nothing_is_scheduled_and_the_name_is_asked_once(watcher, service):
    for _ in range(3):
        assert watcher.poll() is None
    assert service.asked == [("GET", EVENTS), ("GET", COMPUTE), ("GET", EVENTS), ("GET", EVENTS)]
    assert (watcher.polls, watcher.errors) == (3, 0)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_what_ends_the_machine_is_hard_and_due_at_not_before(watcher, service, kind):
    service.events = listed(event(kind, 600 if kind != "Preempt" else 30))
    notice = watcher.poll()
    assert notice == Notice(
        source="azure",
        action=kind.lower(),
        deadline_t=NOW + (600 if kind != "Preempt" else 30),
        heard_t=NOW,
        detail=notice.detail,
        event=f"id of {kind}",
    )
    assert notice.detail.startswith(f"Azure: {kind} at 2017-09-18T08:")


def test_a_freeze_is_early_and_has_no_deadline(watcher, service):
    service.events = listed(event("Freeze"))
    notice = watcher.poll()
    assert (notice.action, notice.early, notice.deadline_t) == ("freeze", True, None)


@pytest.mark.parametrize("changes", [{"EventStatus": "Started"}, {"NotBefore": ""}])
def test_what_has_begun_is_due_now_and_does_not_move(watcher, service, clock, changes):
    service.events = listed(event(**changes))
    assert watcher.poll().deadline_t == NOW
    clock.t += 5
    assert watcher.poll().deadline_t == NOW


def test_what_is_days_ahead_is_early_until_twenty_minutes_are_left(watcher, service, clock):
    service.events = listed(event("Redeploy", 86_400.0))
    first = watcher.poll()
    assert (first.early, first.deadline_t) == (True, NOW + 86_400)
    clock.t = NOW + 86_400 - 1200
    last = watcher.poll()
    assert (last.early, last.deadline_t, last.event) == (False, NOW + 86_400, first.event)


@pytest.mark.parametrize(
    "other",
    [
        event(Resources=["set_2"]),
        event(Resources=[]),
        event(Resources=["set_33", "reset_3", "set_3 "]),
        event("Lunch"),
        event(EventStatus="Completed"),
        event(EventStatus="Canceled", NotBefore=""),
    ],
)
def test_other_machines_and_other_events_are_no_notice(watcher, service, other):
    service.events = listed(other)
    assert watcher.poll() is None
    assert watcher.errors == 0


def test_names_are_the_same_in_any_case(watcher, service):
    service.events = listed(event(Resources=["SET_3"]))
    assert watcher.poll() is not None


def test_of_several_the_one_due_first_is_told_and_none_moves(watcher, service, clock):
    events = [event("Freeze"), event("Reboot", 900), event("Terminate", 300), event("Preempt", 400)]
    service.events = listed(*events)
    first = watcher.poll()
    assert first.action == "terminate"
    clock.t += 10
    assert watcher.poll() == first


@pytest.mark.parametrize(
    "answer",
    [
        HttpResponse(200, b""),
        HttpResponse(200, b"null"),
        HttpResponse(200, b"{}"),
        HttpResponse(200, b'{"Events":[]}'),
        HttpResponse(200, b'{"DocumentIncarnation":"1","Events":[]}'),
        HttpResponse(200, b'{"DocumentIncarnation":1,"Events":{}}'),
        HttpResponse(200, b"<html>Preempt set_3</html>"),
        listed({"EventType": "Preempt", "Resources": ["set_3"]}),
        listed(event(Resources="set_3")),
        listed(event(NotBefore="soon")),
        listed(event(NotBefore="Mon, 99 Sep 2017 08:22:00 GMT")),
        listed(event(NotBefore="Mon, 01 Jan 0001 00:00:00 GMT")),
        listed(event(in_s=-40 * 86_400)),
        HttpResponse(400, listed(event()).body),
        HttpResponse(403, listed(event()).body),
        HttpResponse(404, b""),
        HttpResponse(429, b""),
        HttpResponse(500, listed(event()).body),
    ],
)
def test_what_is_not_a_notice(watcher, service, answer):
    service.events = answer
    assert watcher.poll() is None
    assert watcher.errors == 1
    assert watcher.last_error.startswith("http://service: ")
    service.events = listed(event())
    assert watcher.poll() is not None


@pytest.mark.parametrize(
    "answer",
    [
        HttpResponse(200, b"{}"),
        HttpResponse(200, b'{"name":""}'),
        HttpResponse(500, b""),
        TimeoutError("slow"),
    ],
)
def test_without_its_own_name_nothing_is_heard_and_it_is_asked_again(watcher, service, answer):
    service.events = listed(event())
    right, service.compute = service.compute, answer
    assert watcher.poll() is None
    assert not watcher.answers()
    assert watcher.errors == 2
    service.compute = right
    assert watcher.poll() is not None


def test_while_the_service_is_switched_on_it_is_asked_again(watcher, service):
    service.events = TimeoutError("no whole answer within 1 s")
    for _ in range(120):
        assert watcher.poll() is None
    assert service.asked == [("GET", EVENTS)] * 120
    service.events = listed(event())
    assert watcher.poll() is not None


def test_approval(watcher, service):
    assert isinstance(watcher, Acknowledger)
    service.events = listed(event(Resources=["SET_3"]))
    notice = watcher.poll()
    assert watcher.acknowledge(notice) is True
    assert service.sent == [{"StartRequests": [{"EventId": "id of Preempt"}]}]
    for answer in (
        HttpResponse(400, b""),
        HttpResponse(500, b""),
        TimeoutError("slow"),
        ValueError(),
    ):
        service.post = answer
        assert watcher.acknowledge(notice) is False


def test_an_event_of_other_machines_too_is_not_approved(watcher, service):
    """Approved by one, it begins on all that it names, and they may not have saved."""
    service.events = listed(event(Resources=["set_2", "set_3"]))
    assert watcher.acknowledge(watcher.poll()) is False
    assert service.sent == []


@pytest.mark.parametrize("not_before", ["soon", formatdate(NOW + 40 * 86_400, usegmt=True)])
def test_an_event_that_cannot_be_read_does_not_hide_another(watcher, service, not_before):
    service.events = listed(event("Redeploy", NotBefore=not_before), event())
    assert watcher.poll().action == "preempt"
    assert watcher.errors == 1


@pytest.mark.parametrize(("source", "name"), [("aws", "x"), ("azure", "")])
def test_only_its_own_events_are_approved(watcher, service, source, name):
    notice = Notice(
        source=source, action="preempt", deadline_t=1.0, heard_t=0.0, detail="", event=name
    )
    assert watcher.acknowledge(notice) is False
    assert service.asked == []


@examples(300)
@given(status=st.sampled_from([200, 200, 200, 201, 400, 404, 500]), body=st.binary())
def test_no_bytes_are_a_notice_or_raise(status, body):
    service = Service()
    service.events = HttpResponse(status, body)
    assert AzureWatcher("http://service", clock=Clock(), send=service).poll() is None


@examples(300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("Started"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["Events", "DocumentIncarnation", "EventId", "Resources", "x"]),
                inner,
                max_size=5,
            )
        ),
        max_leaves=20,
    )
)
def test_no_document_that_is_nearly_right_is_a_notice_or_raises(document):
    service = Service()
    service.events = HttpResponse(200, json.dumps(document).encode())
    assert AzureWatcher("http://service", clock=Clock(), send=service).poll() is None
