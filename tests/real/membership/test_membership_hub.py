"""The hub over real sockets: strangers, nonsense, those who stop, those who die."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from certificates import machines
from relay import Relay

from outlast.launch.membership import hub as hubs
from outlast.launch.membership.hub import Hub

KEY = b"k" * 32
PEER = Path(__file__).with_name("hub_peer.py")
FULL = Path(__file__).with_name("hub_full.py")
LIMIT_S = 60


class Heard:
    """A hub, and what it is told."""

    def __init__(self, silence_s=1.0, key=KEY, tls=None):
        self.news = queue.SimpleQueue()
        self.peers = []
        self.failed = []
        self.hub = Hub(key, "127.0.0.1", silence_s, self.failed.append, tls=tls)
        self.hub.on_accepted = self._accepted

    def _accepted(self, peer):
        self.peers.append(peer)
        self.watch(peer)
        self.news.put(("accepted", peer))

    def watch(self, peer):
        peer.on_message = lambda data: self.news.put(("message", data))
        peer.on_closed = lambda why, certain: self.news.put(("closed", why, certain))

    def dial(self, address):
        def begin():
            peer = self.hub.dial(address)
            self.watch(peer)
            peer.on_open = lambda one: self.news.put(("open", one))

        self.hub.call(begin)

    def next(self, kind):
        """The next piece of news, which must be of this kind."""
        news = self.news.get(timeout=LIMIT_S)
        assert news[0] == kind, news
        return news

    def in_thread(self, function):
        """What ``function`` gives in the hub's thread."""
        answer = queue.SimpleQueue()
        self.hub.call(lambda: answer.put(function()))
        return answer.get(timeout=LIMIT_S)


@pytest.fixture
def make():
    made = []

    def one(**options):
        made.append(Heard(**options))
        made[-1].hub.start()
        return made[-1]

    yield one
    for each in made:
        each.hub.close()
        assert not each.failed


@pytest.fixture
def start():
    started = []

    def one(address, key=KEY, silence_s=1.0):
        process = subprocess.Popen(
            [sys.executable, str(PEER), address, key.hex(), str(silence_s)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        return process

    yield one
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def raw(hub):
    host, _, port = hub.hub.address.rpartition(":")
    return socket.create_connection((host, int(port)), LIMIT_S)


def test_messages_go_both_ways_in_order(make):
    one, other = make(), make()
    one.dial(other.hub.address)
    mine = one.next("open")[1]
    theirs = other.next("accepted")[1]
    one.hub.call(lambda: [mine.send(b"%d" % number) for number in range(500)])
    assert [other.next("message")[1] for _ in range(500)] == [b"%d" % n for n in range(500)]
    other.hub.call(lambda: theirs.send(b"back"))
    assert one.next("message")[1] == b"back"
    one.hub.call(mine.close)
    assert other.next("closed")[2]


def test_another_key_is_refused_and_logged(make, caplog):
    one, other = make(key=b"x" * 32), make()
    one.dial(other.hub.address)
    assert not one.next("closed")[1].startswith("open")
    deadline = time.monotonic() + LIMIT_S
    while "was refused" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "does not hold this job's key" in caplog.text
    assert other.news.empty()
    assert KEY.hex() not in caplog.text


def test_nonsense_is_dropped_and_others_are_served(make, caplog):
    one, other = make(), make()
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, os.urandom(4096)):
        with raw(other) as sock:
            sock.sendall(nonsense)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):  # its hello, then the end
                    pass
    assert "was refused" in caplog.text
    one.dial(other.hub.address)
    one.next("open")
    other.next("accepted")


def test_half_open_strangers_keep_nobody_out(make, monkeypatch):
    monkeypatch.setattr(hubs, "STRANGERS_MAX", 8)
    monkeypatch.setattr(hubs, "HANDSHAKE_S", LIMIT_S)  # only by making way do they go
    one, other = make(silence_s=LIMIT_S), make()
    strangers = [raw(other) for _ in range(40)]
    one.dial(other.hub.address)
    one.next("open")  # not refused: a closed door would be taken for a dead machine
    other.next("accepted")
    for sock in strangers:
        sock.close()


def test_more_machines_at_once_than_strangers_are_let_in(make, monkeypatch):
    monkeypatch.setattr(hubs, "STRANGERS_MAX", 4)
    monkeypatch.setattr(hubs, "QUIET_S", LIMIT_S)
    one, other = make(silence_s=LIMIT_S), make()
    for _ in range(60):
        one.dial(other.hub.address)
    for _ in range(60):
        one.next("open")
        other.next("accepted")


@pytest.mark.parametrize(("hard", "taken"), [(500, 100), (60, None)], ids=["raised", "full"])
def test_one_with_few_descriptors_takes_more_or_says_so_once(hard, taken):
    process = subprocess.Popen(
        [sys.executable, str(FULL), "60", str(hard)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process, contextlib.ExitStack() as opened:
        opened.callback(process.kill)
        host, _, port = process.stdout.readline().strip().rpartition(":")
        for _ in range(100):
            opened.enter_context(socket.create_connection((host, int(port)), LIMIT_S))
        deadline = time.monotonic() + LIMIT_S
        seen, again = [], 0
        while again < 20:  # tries in vain, of which each could be warned of
            process.stdin.write("how\n")
            process.stdin.flush()
            before, seen = seen, process.stdout.readline().split(maxsplit=2)
            again = again + 1 if seen == before else 0
            assert time.monotonic() < deadline
            time.sleep(hubs.FULL_S)
    if taken:
        assert seen == ["0", str(taken)]
    else:
        assert seen[0] == "1"
        assert int(seen[1]) < 60
        assert seen[2].startswith("machines wait, connections cannot be taken")


def test_a_name_is_not_looked_up_in_the_thread(make):
    one, other = make(), make()
    one.dial(other.hub.address.replace("127.0.0.1", "localhost"))
    assert one.next("closed")[1] == "has no usable address"


def test_one_that_does_not_read_is_let_go(make, monkeypatch):
    monkeypatch.setattr(hubs, "UNSENT_MAX", 1 << 20)
    one, other = make(silence_s=LIMIT_S), make(silence_s=LIMIT_S)
    one.dial(other.hub.address)
    mine = one.next("open")[1]
    other.next("accepted")
    blocked = threading.Event()
    other.hub.call(lambda: blocked.wait(LIMIT_S))
    order = []

    def flood():
        mine.on_closed = lambda why, certain: (
            order.append("closed"),
            one.news.put(("closed", why)),
        )
        for _ in range(400):
            mine.send(b"x" * 100_000)
        order.append("sent")  # nobody is called back in the middle of it

    one.hub.call(flood)
    assert one.next("closed")[1] == "does not read what it is sent"
    assert order == ["sent", "closed"]
    blocked.set()


def test_a_stopped_process_hangs_and_is_not_lost_and_a_killed_one_is_at_once(
    make, start, monkeypatch
):
    monkeypatch.setattr(hubs, "HUNG", 3.0)
    monkeypatch.setattr(hubs, "HUNG_S", 3.0)
    one = make(silence_s=1.0)
    process = start(one.hub.address)
    peer = one.next("accepted")[1]
    peer.on_hung = lambda is_hung: one.news.put(("hung", is_hung))
    assert one.next("message")[1] == b"here"
    os.kill(process.pid, signal.SIGSTOP)
    assert one.next("hung")[1]  # three times the limit of a kernel's silence, which was not seen
    os.kill(process.pid, signal.SIGCONT)
    assert not one.next("hung")[1]
    one.hub.call(lambda: peer.send(b"still here"))
    assert process.stdout.readline() == "still here\n"
    process.kill()
    _, why, certain = one.next("closed")
    assert (why, certain) == ("has ended", True)


def test_who_breaks_off_is_not_taken_for_dead(make):
    one, other = make(), make()
    one.dial(other.hub.address)
    mine, theirs = one.next("open")[1], other.next("accepted")[1]
    one.hub.call(mine.part)
    assert other.next("closed")[1:] == ("has broken off the connection", False)
    assert theirs.is_closed
    one.dial(other.hub.address)
    one.next("open")
    theirs = other.next("accepted")[1]
    unread = threading.Event()
    one.hub.call(lambda: unread.wait(LIMIT_S))
    nonsense = b"\0" * 100_000  # more than is read at once
    other.in_thread(lambda: other.hub.write(theirs, nonsense))
    unread.set()
    _, why, certain = one.next("closed")
    assert "was refused" in why
    assert why != hubs.REFUSED
    assert not certain
    assert other.next("closed")[1:] == ("has broken off the connection", False)


def test_nobody_there_is_said_so(make):
    one = make()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    one.dial(address)
    _, why, certain = one.next("closed")
    assert why == hubs.REFUSED
    assert not certain
    one.dial("nowhere")
    assert one.next("closed")[1] == "has no usable address"


def test_a_timer_that_fails_ends_the_hub_and_is_told():
    one = Heard()
    one.hub.start()
    one.hub.call(lambda: 1 / 0)
    deadline = time.monotonic() + LIMIT_S
    while not one.failed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(one.failed[0], ZeroDivisionError)
    one.hub.close()


def test_a_closed_hub_writes_into_nobodys_file(tmp_path):
    hub = Heard().hub
    hub.start()
    number = hub._waker_fd
    hub.close()
    with (tmp_path / "file").open("wb") as file:
        os.dup2(file.fileno(), number)  # as whoever opens a file next may be given that number
        try:
            hub.call(lambda: None)
        finally:
            os.close(number)
    assert (tmp_path / "file").read_bytes() == b""


def in_words(address):
    return f"{address[0]}:{address[1]}"


def seen_between(one, other, tls=None):
    """A relay in front of ``other``, which ``one`` has dialled."""
    host, _, port = other.hub.address.rpartition(":")
    relay = Relay((host, int(port)), tls)
    one.dial(in_words(relay.address))
    return relay


@pytest.mark.parametrize("has_tls", [True, False])
def test_under_tls_nobody_on_the_way_reads_what_agents_say(make, tmp_path, has_tls):
    files = machines(tmp_path, ["one", "other"]) if has_tls else [None, None]
    one, other = (make(tls=tls) for tls in files)
    relay = seen_between(one, other)
    mine, theirs = one.next("open")[1], other.next("accepted")[1]
    for number in range(50):
        one.hub.call(lambda number=number: mine.send(b"who leaves %d" % number))
        other.hub.call(lambda number=number: theirs.send(b"who comes %d" % number + b"." * 40_000))
    for number in range(50):
        assert other.next("message")[1] == b"who leaves %d" % number
        assert one.next("message")[1].startswith(b"who comes %d." % number)
    assert relay.seen
    assert (b"who leaves" in relay.seen) is not has_tls
    one.hub.call(mine.close)
    assert other.next("closed")[2] is True  # as without
    relay.close()


def test_a_host_of_the_same_authority_cannot_stand_between_agents(make, tmp_path):
    files = machines(tmp_path, ["one", "other", "stranger"])
    one, other = make(tls=files[0]), make(tls=files[1])
    relay = seen_between(one, other, files[2])
    assert "somebody is between" in one.next("closed")[1]
    assert b"OLPR" in relay.seen
    assert other.news.empty()
    relay.close()


def test_with_tls_and_without_do_not_mix(make, tmp_path):
    (tls,) = machines(tmp_path, ["one"])
    one, other = make(tls=tls), make()
    one.dial(other.hub.address)
    assert "TLS" in one.next("closed")[1]
    other.dial(one.hub.address)
    other.next("closed")
    assert not one.peers
    assert not other.peers


def test_certificates_that_are_gone_end_a_connection_and_not_the_hub(make, tmp_path):
    """They are renewed while a job runs: each connection reads them anew."""
    tls, again = machines(tmp_path, ["one", "again"])
    one, other = make(tls=tls), make(tls=tls)
    kept = tls.cert.read_bytes()
    tls.cert.write_text("")
    one.dial(other.hub.address)
    assert "TLS" in one.next("closed")[1]
    tls.cert.write_bytes(again.cert.read_bytes())
    tls.key.write_bytes(again.key.read_bytes())
    one.dial(other.hub.address)
    one.next("open")
    assert other.next("accepted")
    assert kept != tls.cert.read_bytes()
