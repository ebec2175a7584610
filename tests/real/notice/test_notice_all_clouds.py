"""Every cloud's watcher against its server on the loopback, in step: what holds for one holds for
all.

``docs/notices.md`` has the same rows for people; the last test holds the two together.
"""

import queue
import random
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from metadata_servers.alibaba import RELEASE_PATH, AlibabaMetadataServer
from metadata_servers.azure import EVENTS_PATH, AzureMetadataServer
from metadata_servers.gcp import (
    MAINTENANCE_PATH,
    PREEMPTED_PATH,
    STOP_PATH,
    GcpMetadataServer,
)
from metadata_servers.spot_time import (
    TENCENT_PATH,
    VOLCENGINE_PATH,
    TencentMetadataServer,
    VolcengineMetadataServer,
)
from outlast.drill.metadata_server import ACTION_PATH, AnswerFault, AwsMetadataServer
from outlast.notice import Acknowledger, aws, source
from outlast.notice.alibaba import AlibabaWatcher
from outlast.notice.aws import AwsWatcher
from outlast.notice.azure import AzureWatcher
from outlast.notice.gcp import MaintenanceWatcher, PreemptedWatcher, StopWatcher
from outlast.notice.platform import choose
from outlast.notice.source import WatchThread
from outlast.notice.spot_time import TencentWatcher, VolcengineWatcher
from thorough import ALL, seed

WITHIN_S = 60.0
PATIENT_S = 2.0
IMPATIENT_S = 0.3

# By default as many as take ten seconds.
POLLS = 10_000 if ALL else 1_000


class Cloud:
    """One platform: its server, its watcher, and where the notice is."""

    def __init__(self, name, server, watcher, path):
        self.name, self.server, self.watcher, self.path = name, server, watcher, path

    def watch(self, url, timeout_s):
        return self.watcher(url, timeout_s=timeout_s)


CLOUDS = {
    "aws": Cloud("aws", AwsMetadataServer, AwsWatcher, ACTION_PATH),
    "gcp": Cloud("gcp", lambda: GcpMetadataServer(waits=False), PreemptedWatcher, PREEMPTED_PATH),
    "azure": Cloud("azure", AzureMetadataServer, AzureWatcher, EVENTS_PATH),
    "alibaba": Cloud("alibaba", AlibabaMetadataServer, AlibabaWatcher, RELEASE_PATH),
    "tencent": Cloud("tencent", TencentMetadataServer, TencentWatcher, TENCENT_PATH),
    "volcengine": Cloud("volcengine", VolcengineMetadataServer, VolcengineWatcher, VOLCENGINE_PATH),
}


@pytest.fixture(params=CLOUDS)
def cloud(request):
    return CLOUDS[request.param]


@pytest.fixture
def server(cloud):
    with cloud.server() as server:
        yield server


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(aws, "_SOFTER_S", PATIENT_S)  # a loaded machine may miss 0.4 s


@pytest.fixture
def watcher(cloud, server):
    return cloud.watch(server.url, PATIENT_S)


def heard(watcher, within_s=WITHIN_S):
    give_up = time.monotonic() + within_s
    while time.monotonic() < give_up:
        notice = watcher.poll()
        if notice is not None:
            return notice
    return None


# What is spoiled, and what the last error then says; with the rows of the table for people.
SPOILED = {
    "401 or 403": [(AnswerFault(status=401), "401"), (AnswerFault(status=403), "403")],
    "5xx": [(AnswerFault(status=500), "500"), (AnswerFault(status=503), "503")],
    "garbage": [
        (AnswerFault(body=b"<html>terminate TRUE Preempt</html>"), ""),
        (AnswerFault(body=b"\xff" * 100), ""),
        (AnswerFault(body=b'{"action": "terminate", "time": "soon"}'), ""),
        (AnswerFault(raw=b"220 smtp.example.com ESMTP\r\n"), "not HTTP"),
        (AnswerFault(raw=b""), "not HTTP"),
        (AnswerFault(padding_bytes=1 << 20), "larger than"),
        (AnswerFault(status=302, headers=(("Location", "/"),)), "302"),
    ],
}
LATE = {
    "slow": [AnswerFault(delay_s=3.0)],
    "dripping": [AnswerFault(drip_s=0.03), AnswerFault(drip_s=0.1, drip_after_bytes=60)],
}


def test_none(watcher):
    for _ in range(3):
        assert watcher.poll() is None
    assert (watcher.polls, watcher.errors) == (3, 0)


def test_notice_and_withdrawn(cloud, server, watcher):
    assert watcher.poll() is None
    deadline_t = server.preempt()
    notice = watcher.poll()
    assert (notice.source, notice.early) == (cloud.name, False)
    assert notice.deadline_t == pytest.approx(deadline_t, abs=WITHIN_S)
    if cloud.name != "gcp":  # which does not say when
        assert notice.deadline_t == deadline_t
    assert watcher.poll() == notice
    server.withdraw()
    assert watcher.poll() is None
    assert watcher.errors == 0


def test_what_kind_of_machine_it_is(server, watcher):
    assert watcher.machine_kind() == ""
    assert watcher.polls == 0
    server.kind = "p5.48xlarge"
    assert watcher.machine_kind() == "p5.48xlarge"
    for faults in SPOILED.values():
        for fault, _ in faults:
            server.inject(fault)
            assert watcher.machine_kind() == "", fault
    server.inject(AnswerFault())
    assert watcher.machine_kind() == "p5.48xlarge"
    assert watcher.poll() is None


@pytest.mark.parametrize("row", SPOILED)
def test_spoiled_answers_are_errors_and_the_notice_is_heard_after_them(cloud, server, row):
    for fault, said in SPOILED[row]:
        watcher = cloud.watch(server.url, PATIENT_S)
        assert watcher.poll() is None
        server.preempt()
        server.inject(fault, path=cloud.path)
        assert watcher.poll() is None, fault
        assert watcher.errors == 1
        assert said in watcher.last_error
        server.inject(AnswerFault())
        assert watcher.poll() is not None
        assert watcher.errors == 1
        server.withdraw()


def test_404(cloud, server, watcher):
    server.preempt()
    server.inject(AnswerFault(status=404), path=cloud.path)
    if cloud.name == "aws":  # the older form of the notice is still there
        server.inject(AnswerFault(status=404), method="GET")
    assert watcher.poll() is None
    assert watcher.errors == (1 if cloud.name in ("gcp", "azure") else 0)


@pytest.mark.parametrize("row", LATE)
def test_late_answers_are_given_up(cloud, server, row):
    for fault in LATE[row]:
        watcher = cloud.watch(server.url, IMPATIENT_S)
        assert any(watcher.answers() for _ in range(100))  # a loaded machine may miss 0.3 s
        watcher.errors = 0
        server.preempt()
        server.inject(fault, path=cloud.path)
        assert watcher.poll() is None
        assert watcher.errors == 1
        assert "no whole answer within" in watcher.last_error
        server.inject(AnswerFault())
        assert heard(watcher) is not None
        server.withdraw()


def test_nobody_listens_or_nobody_accepts(cloud):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        watcher = cloud.watch(url, IMPATIENT_S)
        assert watcher.poll() is None
        assert "no whole answer" in watcher.last_error
    assert watcher.poll() is None
    assert "refused" in watcher.last_error
    assert watcher.errors == 2


def test_another_machine_s_event():
    with AzureMetadataServer() as server:
        watcher = AzureWatcher(server.url, timeout_s=PATIENT_S)
        server.preempt(resources=["set_1", "set_33"])
        assert watcher.poll() is None
        assert watcher.errors == 0
        deadline_t = server.preempt(in_s=60.0, resources=["set_1", "set_3"])
        assert watcher.poll().deadline_t == deadline_t


def test_ten_thousand_spoiled_polls_without_a_false_alarm(cloud, server, monkeypatch):
    first = seed()
    choices = random.Random(first)
    quick = [fault for row in SPOILED.values() for fault, _ in row]
    watcher = cloud.watch(server.url, 0.5)
    monkeypatch.setattr(aws, "_LEFT_OUT_S", 0.0)  # the softer questions go through it all too
    for turn in range(POLLS):
        fault = choices.choice([AnswerFault(), *quick])
        if turn % 5000 == 0:
            fault = choices.choice([AnswerFault(delay_s=3.0), AnswerFault(drip_s=0.03)])
        server.inject(fault, method=choices.choice(["", "GET", "PUT"]))
        if cloud.name in ("aws", "alibaba") and choices.random() < 0.1:
            server.expire_tokens()
        if cloud.name == "azure" and choices.random() < 0.1:
            server.preempt(resources=[f"set_{choices.choice([1, 2, 33])}"])
            if choices.random() < 0.1:
                server.withdraw()
        assert watcher.poll() is None, (first, turn, fault)
    assert watcher.polls == POLLS
    assert watcher.errors > POLLS // 4
    server.inject(AnswerFault())
    server.preempt()
    assert heard(watcher).source == cloud.name


# --- how soon ------------------------------------------------------------------------------------


def test_a_notice_is_heard_by_the_second_poll_that_begins_after_it(cloud, server):
    """1.5 polling periods are at most two polls: the one that is due, and none after the next."""
    heard_at = queue.Queue()
    watcher = cloud.watch(server.url, PATIENT_S)
    thread = WatchThread(watcher, lambda notice: heard_at.put(watcher.polls), interval_s=0.05)
    thread.start()
    try:
        until(lambda: watcher.polls >= 3)
        server.preempt()
        announced_at = watcher.polls
        # The poll that was under way may have asked before; the one after it must hear.
        assert heard_at.get(timeout=WITHIN_S) <= announced_at + 1
        assert watcher.errors == 0
    finally:
        thread.stop()


def until(true):
    give_up = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("kind", "path", "announce"),
    [
        (PreemptedWatcher, PREEMPTED_PATH, GcpMetadataServer.preempt),
        (MaintenanceWatcher, MAINTENANCE_PATH, GcpMetadataServer.maintain),
        (StopWatcher, STOP_PATH, GcpMetadataServer.stop_gracefully),
    ],
)
def test_the_question_that_hangs_is_answered_when_there_is_a_notice(kind, path, announce):
    heard_now = queue.Queue()
    with GcpMetadataServer() as server:
        server.stop_gracefully("UNSPECIFIED")  # a machine that has the feature
        # No other question could bring it in time: this one hangs for longer than we wait.
        watcher = kind(server.url, timeout_s=PATIENT_S, hang_s=600)
        thread = WatchThread(watcher, heard_now.put, interval_s=0.05)
        thread.start()
        try:
            assert server.wait_for_hanging(1)
            num_asked = len(server.requests)
            announce(server)
            assert heard_now.get(timeout=WITHIN_S).early is False
            assert server.requests[num_asked] == ("GET", path, 200)
            assert server.wait_for_hanging(1)  # and it goes on listening
            assert (watcher.polls, watcher.errors) == (3, 0)
        finally:
            thread.stop()


def test_a_question_that_hangs_is_renewed():
    with GcpMetadataServer() as server:
        watcher = PreemptedWatcher(server.url, timeout_s=PATIENT_S, hang_s=1)
        thread = WatchThread(watcher, print, interval_s=0.05)
        thread.start()
        until(lambda: len(server.requests) >= 3)
        thread.stop()
        assert watcher.errors == 0


def test_stopping_does_not_wait_for_a_question_that_hangs(monkeypatch):
    monkeypatch.setattr(source, "_JOIN_S", 3600.0)  # if it did, this test would not end
    with GcpMetadataServer() as server:
        watcher = PreemptedWatcher(server.url, timeout_s=PATIENT_S, hang_s=600)
        thread = WatchThread(watcher, print, interval_s=0.05)
        thread.start()
        assert server.wait_for_hanging(1)
        thread.stop()
    until(lambda: not [t for t in threading.enumerate() if t.name == "outlast-notice-gcp"])


def test_a_machine_without_a_graceful_shutdown_is_asked_again_each_minute(monkeypatch):
    with GcpMetadataServer() as server:
        watcher = StopWatcher(server.url, timeout_s=PATIENT_S)
        assert watcher.answers()
        for _ in range(3):
            assert watcher.poll() is None
        assert watcher.errors == 0
        assert len(server.requests) == 1
        server.stop_gracefully()  # switched on meanwhile
        assert watcher.poll() is None
        monkeypatch.setattr(watcher, "_absent_until", 0.0)
        notice = watcher.poll()
        assert (notice.action, notice.deadline_t, notice.early) == ("stop", None, False)
        server.inject(AnswerFault(body=b"<html>PENDING_STOP</html>"))
        assert watcher.poll() is None
        assert watcher.errors == 1


def test_a_group_that_ends_its_machine_is_heard_before_the_spot_service():
    with AwsMetadataServer() as server:
        watcher = AwsWatcher(server.url, timeout_s=PATIENT_S)
        server.set_target_state("InService")
        server.recommend_rebalance()
        assert watcher.poll().action == "rebalance"
        server.set_target_state("Terminated")
        notice = heard_hard(watcher)
        assert (notice.action, notice.deadline_t) == ("terminate", None)
        assert "Auto Scaling" in notice.detail
        deadline_t = server.preempt()
        assert watcher.poll().deadline_t == deadline_t
        assert watcher.errors == 0


def heard_hard(watcher):
    for _ in range(20):  # every fifth poll asks for it
        notice = watcher.poll()
        if notice is not None and not notice.early:
            return notice
    return None


def test_azure_s_slow_first_answer_is_waited_for_by_asking_again():
    with AzureMetadataServer(first_answer_s=2.0) as server:
        watcher = AzureWatcher(server.url, timeout_s=IMPATIENT_S)
        server.preempt(in_s=60.0)
        assert watcher.poll() is None
        assert "no whole answer" in watcher.last_error
        assert heard(watcher) is not None


def test_azure_s_event_is_approved():
    with AzureMetadataServer() as server:
        watcher = AzureWatcher(server.url, timeout_s=PATIENT_S)
        assert isinstance(watcher, Acknowledger)
        deadline_t = server.preempt(in_s=60.0)
        notice = watcher.poll()
        assert notice.deadline_t == deadline_t
        server.inject(AnswerFault(status=500), method="POST")
        assert not watcher.acknowledge(notice)
        server.inject(AnswerFault(raw=b""), method="POST")
        assert not watcher.acknowledge(notice)
        server.inject(AnswerFault())
        assert watcher.acknowledge(notice)
        begun = watcher.poll()
        assert begun.event == notice.event
        assert begun.deadline_t < deadline_t


@pytest.mark.parametrize("mode", ["normal", "hardened", "old"])
def test_alibaba_s_modes_are_all_heard(mode):
    with AlibabaMetadataServer(mode=mode) as server:
        watcher = AlibabaWatcher(server.url, timeout_s=PATIENT_S)
        assert watcher.poll() is None
        deadline_t = server.preempt()
        assert watcher.poll().deadline_t == deadline_t
        server.expire_tokens()
        assert watcher.poll().deadline_t == deadline_t
        server.withdraw(empty=True)
        assert watcher.poll() is None
        assert watcher.errors == 0


# --- which platform ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["normal", "hardened", "old"])
def test_auto_knows_alibaba_in_each_mode(tmp_path, mode):
    with AlibabaMetadataServer(mode=mode) as server:
        chosen = choose("auto", server.url, root=tmp_path, environ={})
        assert [watcher.name for watcher in chosen.watchers] == ["alibaba"]


def test_auto_takes_whoever_answers_as_it_should(cloud, server, tmp_path):
    chosen = choose("auto", server.url, root=tmp_path, environ={})
    assert chosen.watchers[0].name == cloud.name
    assert f"notices from {cloud.name} at {server.url} (" in chosen.reason
    assert chosen.reason.endswith(f": it answers as {cloud.name}'s does")
    server.preempt()
    assert heard(chosen.watchers[0]) is not None


def test_auto_takes_nobody_at_a_web_server(tmp_path):
    with AwsMetadataServer() as server:
        server.inject(AnswerFault(body=b"<html>it works</html>"))
        chosen = choose("auto", server.url, root=tmp_path, environ={})
        assert chosen.watchers == ()
        assert all(f"{name}: " in chosen.reason for name in CLOUDS)
        assert "\n" not in chosen.reason


# --- the table for people ------------------------------------------------------------------------

SLOW_ROWS = ("nothing in time", "a byte now and then")
TABLE = Path(__file__).parents[3] / "docs/notices.md"
COLUMNS = (
    *("EC2", "Google Cloud", "Azure", "Alibaba Cloud"),
    *("Tencent Cloud", "Volcengine, BytePlus"),
)


def table():
    """Row → cells, of the table that has the clouds for its columns."""
    lines = TABLE.read_text().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| it says | EC2 |"))
    rows = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = dict(zip(CLOUDS, cells, strict=True))
    assert lines[head] == f"| it says | {' | '.join(COLUMNS)} |"
    return rows


def announce_softly(cloud, server):
    if cloud.name == "aws":
        server.recommend_rebalance()
    else:
        server.preempt(kind="Freeze")


def announce_and_spoil(fault):
    def arrange(cloud, server):
        server.preempt()
        # EC2's notice is at two places, and both are spoiled.
        server.inject(fault, **({"method": "GET"} if cloud.name == "aws" else {"path": cloud.path}))

    return arrange


def withdraw(cloud, server):
    server.preempt()
    server.withdraw()


SCENES = {
    "nothing": lambda cloud, server: None,
    "a notice": lambda cloud, server: server.preempt(),
    "softer word": announce_softly,
    "a notice, and takes it back": withdraw,
    "401": announce_and_spoil(AnswerFault(status=401)),
    "403": announce_and_spoil(AnswerFault(status=403)),
    "404": announce_and_spoil(AnswerFault(status=404)),
    "5xx": announce_and_spoil(AnswerFault(status=503)),
    "a redirect": announce_and_spoil(AnswerFault(status=302, headers=(("Location", "/"),))),
    "nothing in time": announce_and_spoil(AnswerFault(delay_s=30.0)),
    "a byte now and then": announce_and_spoil(AnswerFault(drip_s=0.1)),
    "garbage": announce_and_spoil(AnswerFault(body=b"<html>TRUE</html>")),
    "an empty answer": announce_and_spoil(AnswerFault(body=b"")),
    "another machine's event": lambda cloud, server: server.preempt(resources=["set_1"]),
}


def test_the_table_has_these_rows():
    assert list(table()) == list(SCENES)


@pytest.mark.parametrize("row", SCENES)
def test_each_cell_of_the_table_begins_with_what_happens(cloud, server, row):
    cell = table()[row][cloud.name]
    if cell == "–":
        return
    if row == "softer word" and cloud.name == "gcp":
        server.maintain("MIGRATE_ON_HOST_MAINTENANCE")
        watcher = MaintenanceWatcher(server.url, timeout_s=PATIENT_S)
    else:
        watcher = cloud.watch(server.url, 0.5 if row in SLOW_ROWS else PATIENT_S)
        assert any(watcher.answers() for _ in range(100))
        watcher.errors = 0
        SCENES[row](cloud, server)
    notice = watcher.poll()
    if notice is not None:
        happened = "early notice" if notice.early else "notice"
    else:
        happened = "error" if watcher.errors else "no notice"
    assert re.match(f"{happened}(,|;|:|$)", cell), (happened, cell)
