"""Channels over real loopback sockets: each kind of refusal, said once, with the address."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from certificates import authority, machines
from relay import Relay

from outlast.errors import ConfigError, CutShort, SealError
from outlast.peer import channel as channels
from outlast.peer import seal
from outlast.peer.key import Tls

KEY = os.urandom(32)
LIMIT_S = 20.0


@pytest.fixture(name="listener")
def _listener():
    with channels.listen("127.0.0.1") as listener:
        listener.settimeout(LIMIT_S)
        yield listener


@contextlib.contextmanager
def channel_pair(listener, **more):
    """Two channels that talk to each other: the one that connected first."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(
            lambda: channels.accept(listener.accept()[0], KEY, "testing", LIMIT_S, **more)
        )
        one = channels.connect(listener.getsockname(), KEY, "testing", LIMIT_S, **more)
        other = coming.result()
    try:
        yield one, other
    finally:
        one.close()
        other.close()


@contextlib.contextmanager
def raw_and_channel(listener):
    """A bare socket whose handshake was good, what seals on it, and the channel it talks to."""
    with ThreadPoolExecutor(1) as pool, socket.create_connection(listener.getsockname()) as raw:
        coming = pool.submit(lambda: channels.accept(listener.accept()[0], KEY, "testing", LIMIT_S))
        handshake = seal.Handshake(KEY, "testing", connects=True)
        raw.sendall(handshake.hello)
        while not handshake.is_proven:
            handshake.feed(raw.recv(handshake.wanted_bytes))
        raw.sendall(handshake.proof())
        other = coming.result()
        try:
            yield raw, handshake.ends()[0], other
        finally:
            other.close()


def frame(sealer, *parts):
    return b"".join(bytes(part) for part in sealer.seal(*parts))


def said(caplog):
    return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]


def test_messages_go_both_ways_and_the_end_is_none(listener):
    with channel_pair(listener, silence_s=5.0) as (one, other):
        one.send(b"question")
        assert other.receive() == b"question"
        other.send(b"")
        other.send(b"answer" * 1000)
        assert one.receive() == b""
        assert one.receive() == b"answer" * 1000
        other.close()
        assert one.receive() is None
        one.close()
        with pytest.raises(OSError, match="closed"):
            one.receive()
        with pytest.raises(OSError, match="closed"):
            one.send(b"x")


def test_the_sockets_are_set_to_find_a_dead_machine(listener):
    with channel_pair(listener, silence_s=1.5) as ends:
        for end in ends:
            option = end._stream.sock.getsockopt
            assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
            assert option(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
            assert option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 1


def test_bulk_lands_where_it_is_wanted(listener):
    with channel_pair(listener) as (one, other), ThreadPoolExecutor(1) as pool:
        parts = [os.urandom(5 << 20), b"", os.urandom(1234)]
        paced = []
        sending = pool.submit(one.send, b"two parts", parts, pace=paced.append)
        assert other.receive() == b"two parts"
        assert other.bulk_bytes == sum(map(len, parts))
        room = bytearray(other.bulk_bytes)
        with pytest.raises(ValueError, match="there is room for 3"):
            other.receive_into(memoryview(bytearray(3)))
        with pytest.raises(ValueError, match="take the bulk"):
            other.receive()
        other.receive_into(memoryview(room))
        sending.result()
        assert bytes(room) == b"".join(parts)
        assert sum(paced) == len(room)
        assert max(paced) <= channels.PIECE_BYTES
        sending = pool.submit(one.send, b"unwanted", [parts[0]])
        assert other.receive() == b"unwanted"
        other.discard()
        one.send(b"after it")
        assert other.receive() == b"after it"
        sending.result()


def test_nothing_for_a_while_is_no_failure(listener):
    with channel_pair(listener) as (one, other):
        with pytest.raises(TimeoutError, match="sent nothing for"):
            other.receive(timeout_s=0.01)
        one.send(b"late")
        assert other.receive(timeout_s=LIMIT_S) == b"late"


def test_close_wakes_whoever_waits(listener):
    with channel_pair(listener) as (_, other), ThreadPoolExecutor(2) as pool:
        began = threading.Event()

        def wait():
            began.set()
            return other.receive()

        waiting = pool.submit(wait)
        began.wait()
        other.close()
        with contextlib.suppress(ConnectionError):  # closed before it waited
            assert waiting.result(LIMIT_S) is None
        assert other.fileno() == -1


def test_close_wakes_whoever_sends(listener):
    with channel_pair(listener) as (one, _), ThreadPoolExecutor(1) as pool:
        began = threading.Event()
        sending = pool.submit(
            one.send, b"", [bytes(64 << 20)], pace=lambda _: began.set()
        )  # nobody reads
        began.wait()
        one.close()
        with pytest.raises(OSError, match=r"."):
            sending.result(LIMIT_S)
        assert one.fileno() == -1


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda first, second: first + first, "second time \\(replayed\\)"),
        (lambda first, second: second, "out of order"),
        (lambda first, second: first[:-1] + bytes([first[-1] ^ 1]), "altered"),
        (lambda first, second: bytes([first[0] ^ 1]) + first[1:], "altered"),
    ],
)
def test_a_message_that_is_not_the_next_ends_the_channel(listener, caplog, act, words):
    with raw_and_channel(listener) as (raw, sealer, other):
        first, second = frame(sealer, b"first"), frame(sealer, b"second")
        raw.sendall(act(first, second))
        with pytest.raises(SealError, match=words):  # noqa: PT012
            while True:
                assert other.receive() == b"first"
        with pytest.raises(OSError, match="closed"):
            other.receive()
        (line,) = said(caplog)
        host, port = raw.getsockname()
        assert f"{host}:{port}" in line
        assert KEY.hex() not in line


def test_altered_bulk_is_refused(listener, caplog):
    with raw_and_channel(listener) as (raw, sealer, other):
        head = b"".join(sealer.seal(b"bulk comes", bulk_bytes=100))
        mac = sealer.bulk()
        mac.update(bytes(100))
        raw.sendall(head + bytes(99) + b"\x01" + mac.tag())
        assert other.receive() == b"bulk comes"
        with pytest.raises(SealError, match="bulk data were altered"):
            other.receive_into(memoryview(bytearray(100)))
        assert len(said(caplog)) == 1


@pytest.mark.parametrize("num_bytes", [1, 44, 45, 80])
def test_half_a_message_is_cut_short_and_no_refusal(listener, caplog, num_bytes):
    with raw_and_channel(listener) as (raw, sealer, other):
        raw.sendall(frame(sealer, b"never in full")[:num_bytes])
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(CutShort):
            other.receive()
        assert not said(caplog)


def accepted(listener, key=KEY, purpose="testing", timeout_s=LIMIT_S):
    """What accepting the next connection raised."""
    try:
        channels.accept(listener.accept()[0], key, purpose, timeout_s).close()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(
    ("key", "purpose", "here", "there"),
    [
        (os.urandom(32), "testing", "does not hold this job's key", "may have another"),
        (KEY, "other", "left before", "came for 'other'"),
    ],
    ids=["key", "purpose"],
)
def test_a_wrong_key_or_purpose_is_refused_on_both_sides(
    listener, caplog, key, purpose, here, there
):
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(accepted, listener)
        with pytest.raises(SealError, match=here) as refused:
            channels.connect(listener.getsockname(), key, purpose, LIMIT_S)
        error = accepting.result()
    assert isinstance(error, SealError)
    assert there in str(error)
    assert len(said(caplog)) == 2
    assert f"127.0.0.1:{listener.getsockname()[1]}" in str(refused.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "does not speak this protocol"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "does not speak this protocol"),
        (seal.MAGIC + b"\x09c\x07", "version 9"),
        (b"OL", "left before it said"),
        (seal.Handshake(KEY, "testing", connects=True).hello, "left without proving"),
        (seal.Handshake(KEY, "testing", connects=True).hello + bytes(1000), "key"),
    ],
    ids=["http", "tls", "version", "short", "hello", "no proof"],
)
def test_a_stranger_is_refused_once(listener, caplog, data, words):
    with (
        ThreadPoolExecutor(1) as pool,
        socket.create_connection(listener.getsockname()) as raw,
    ):
        accepting = pool.submit(accepted, listener)
        raw.sendall(data)
        with contextlib.suppress(OSError):  # it has been refused and closed by now
            raw.shutdown(socket.SHUT_WR)
        error = accepting.result()
    assert isinstance(error, SealError)
    assert words in str(error)
    (line,) = said(caplog)
    assert words in line


def test_a_stranger_who_says_nothing_is_let_go_in_time(listener):
    with socket.create_connection(listener.getsockname()):
        assert isinstance(accepted(listener, timeout_s=0.05), TimeoutError)


def test_nobody_there_is_an_os_error(listener):
    address = listener.getsockname()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        channels.connect(address, KEY, "testing", LIMIT_S)


@pytest.fixture(name="certificates", scope="module")
def _certificates(tmp_path_factory):
    """``(job, stranger)``: Tls files of two authorities."""
    return [authority(tmp_path_factory.mktemp(name)) for name in ("job", "stranger")]


def test_tls_carries_messages_and_bulk_both_ways_at_once(listener, certificates):
    data = os.urandom(3 << 20)

    def exchange(end):
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(end.send, b"bulk", [data] * 4)
            assert end.receive() == b"bulk"
            room = memoryview(bytearray(end.bulk_bytes))
            end.receive_into(room)
            sending.result()
            return bytes(room) == data * 4

    with channel_pair(listener, tls=certificates[0]) as ends, ThreadPoolExecutor(2) as pool:
        with pytest.raises(TimeoutError):
            ends[0].receive(timeout_s=0.01)
        assert list(pool.map(exchange, ends)) == [True, True]


def test_a_host_of_the_same_authority_cannot_stand_between_two(listener, tmp_path):
    """It has a certificate, and not the job's key: it may pass on what it can read of."""
    job, other, stranger = machines(tmp_path, ["job", "other", "stranger"])
    relay = Relay(listener.getsockname(), stranger)
    with contextlib.closing(relay), ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(
            lambda: channels.accept(listener.accept()[0], KEY, "testing", LIMIT_S, tls=job)
        )
        with pytest.raises(SealError):
            channels.connect(relay.address, KEY, "testing", LIMIT_S, tls=other)
        with pytest.raises(SealError):
            accepting.result()
    assert b"OLPR" in relay.seen  # it did read


def test_machines_with_certificates_of_their_own_speak_to_each_other(listener, tmp_path):
    job, other = machines(tmp_path, ["job", "other"])
    relay = Relay(listener.getsockname())  # passes on what is sealed between the two
    with contextlib.closing(relay), ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(
            lambda: channels.accept(listener.accept()[0], KEY, "testing", LIMIT_S, tls=job)
        )
        mine = channels.connect(relay.address, KEY, "testing", LIMIT_S, tls=other)
        theirs = accepting.result()
        with contextlib.closing(mine), contextlib.closing(theirs):
            mine.send(b"weights")
            assert theirs.receive(LIMIT_S) == b"weights"
    assert relay.seen
    assert b"weights" not in relay.seen


@pytest.mark.parametrize("stranger_has_tls", [True, False])
def test_another_authoritys_tls_is_refused(listener, certificates, stranger_has_tls):
    tls = certificates[1] if stranger_has_tls else None
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(
            lambda: channels.accept(
                listener.accept()[0], KEY, "testing", LIMIT_S, tls=certificates[0]
            )
        )
        with pytest.raises((SealError, OSError)):
            channels.connect(listener.getsockname(), KEY, "testing", LIMIT_S, tls=tls)
        with pytest.raises(SealError, match="TLS is not this job's"):
            accepting.result()


@pytest.mark.parametrize("missing", ["ca", "cert", "key"])
def test_tls_files_that_cannot_be_used_are_named(certificates, tmp_path, missing):
    files = {name: getattr(certificates[0], name) for name in ("cert", "key", "ca")}
    for content in (None, "no certificate"):
        files[missing] = tmp_path / "broken.pem"
        if content:
            files[missing].write_text(content)
        with pytest.raises(ConfigError, match=r"peer.tls_key"):
            Tls(**files).client()
