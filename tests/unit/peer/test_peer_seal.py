"""Sealed frames: what is taken is exactly what was sent, in its order; all else is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import CutShort, OutlastError, SealError
from outlast.peer import seal
from thorough import examples

KEY = bytes(range(32))
OTHER_KEY = bytes(32)


def meet(one, other):
    """Two handshakes that hear each other; what each side can seal and unseal with."""
    assert other.feed(one.hello) == b""
    assert one.feed(other.hello + other.proof()) == b""
    assert other.feed(one.proof()) == b""
    assert one.is_proven
    assert other.is_proven
    return one.ends(), other.ends()


def pair(key=KEY, purpose="testing", **more):
    one = seal.Handshake(key, purpose, connects=True, **more)
    other = seal.Handshake(key, purpose, connects=False, **more)
    return meet(one, other)


def frame(sealer, *parts):
    return b"".join(bytes(part) for part in sealer.seal(*parts))


def test_both_directions_carry_messages():
    (to_b, from_b), (to_a, from_a) = pair()
    assert from_a.feed(frame(to_b, b"one", b" two")) == [b"one two"]
    assert from_b.feed(frame(to_a, b"answer") + frame(to_a)) == [b"answer", b""]
    from_a.finish()
    from_b.finish()


@settings(deadline=None)
@given(
    payloads=st.lists(st.lists(st.binary(max_size=6000), max_size=3), max_size=6),
    cuts=st.lists(st.integers(1, 7000), min_size=1, max_size=8),
)
def test_a_stream_cut_anywhere_gives_the_same_messages(payloads, cuts):
    (sealer, _), (_, unsealer) = pair()
    stream = b"".join(frame(sealer, *parts) for parts in payloads)
    found, at, turn = [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        found += unsealer.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    unsealer.finish()
    assert found == [b"".join(parts) for parts in payloads]


@examples(300)
@given(
    payloads=st.lists(st.binary(max_size=300), min_size=1, max_size=4),
    where=st.integers(0),
    flip=st.integers(1, 255),
)
def test_a_changed_byte_is_refused_and_nothing_after_it_is_read(payloads, where, flip):
    (sealer, _), (_, unsealer) = pair()
    frames = [frame(sealer, payload) for payload in payloads]
    stream = bytearray(b"".join(frames))
    where %= len(stream)
    stream[where] ^= flip
    starts = [sum(map(len, frames[:n])) for n in range(len(frames) + 1)]
    num_whole = sum(end <= where for end in starts[1:])
    found = []
    with pytest.raises(SealError):  # noqa: PT012
        for byte in stream:
            found += unsealer.feed(bytes([byte]))
        unsealer.finish()
    assert found == payloads[:num_whole]


@settings(deadline=None)
@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(
        lambda order: order != list(range(len(order)))
    )
)
def test_frames_out_of_their_order_are_refused(order):
    (sealer, _), (_, unsealer) = pair()
    frames = [frame(sealer, b"message %d" % n) for n in range(6)]
    found = []
    with pytest.raises(SealError) as refused:  # noqa: PT012
        for number in order:
            found += unsealer.feed(frames[number])
    good = len(found)
    assert found == [b"message %d" % n for n in range(good)]
    expected = "second time" if order[good] < good else "out of order"
    assert expected in str(refused.value)


@settings(deadline=None)
@given(cut=st.integers(1))
def test_a_stream_that_ends_inside_a_frame_is_cut_short(cut):
    (sealer, _), (_, unsealer) = pair()
    whole = frame(sealer, b"the whole message")
    unsealer.feed(whole[: -(cut % (len(whole) - 1) + 1)])
    with pytest.raises(CutShort):
        unsealer.finish()


def test_what_a_connection_carried_fits_no_other():
    (sealer, _), _ = pair()
    recorded = frame(sealer, b"pay twice")
    (_, _), (_, unsealer) = pair()
    with pytest.raises(SealError, match="altered"):
        unsealer.feed(recorded)


def test_what_was_sent_back_is_refused():
    nonce = bytes(32)  # even where both nonces are the same
    (sealer, unsealer), _ = pair(nonce=nonce)
    with pytest.raises(SealError):
        unsealer.feed(frame(sealer, b"mine"))


def test_another_key_is_refused_on_both_sides():
    one = seal.Handshake(KEY, "testing", connects=True)
    other = seal.Handshake(OTHER_KEY, "testing", connects=False)
    other.feed(one.hello)
    with pytest.raises(SealError, match="does not hold this job's key"):
        one.feed(other.hello + other.proof())
    with pytest.raises(SealError, match="does not hold this job's key"):
        other.feed(one.proof())
    assert not one.is_proven
    assert not other.is_proven
    with pytest.raises(ValueError, match="not proven"):
        one.ends()


def test_another_purpose_is_refused_also_when_its_name_is_changed_on_the_way():
    one = seal.Handshake(KEY, "members", connects=True)
    other = seal.Handshake(KEY, "copies!", connects=False)
    with pytest.raises(SealError, match="came for 'members'"):
        other.feed(one.hello)
    other = seal.Handshake(KEY, "copies!", connects=False)
    other.feed(one.hello.replace(b"members", b"copies!"))
    with pytest.raises(SealError):
        one.feed(other.hello.replace(b"copies!", b"members") + other.proof())
    with pytest.raises(SealError):
        other.feed(one.proof())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda hello: b"GET / HTTP/1.1\r\n" + hello, "does not speak this protocol"),
        (lambda hello: hello[:4] + b"\x63" + hello[5:], "version 99"),
        (lambda hello: hello[:5] + b"a" + hello[6:], "wrong role"),
        (lambda hello: hello[:6] + b"\x00" + hello[7:], "no purpose"),
        (lambda hello: hello[:6] + b"\xff" + hello[7:], "no purpose"),
    ],
)
def test_a_hello_that_is_none_is_refused_after_seven_bytes(change, words):
    one = seal.Handshake(KEY, "testing", connects=True)
    other = seal.Handshake(KEY, "testing", connects=False)
    with pytest.raises(SealError, match=words):
        other.feed(change(one.hello)[:7])


@settings(deadline=None)
@given(data=st.binary(max_size=2000), cuts=st.integers(1, 50))
def test_a_stranger_makes_us_hold_little_and_proves_nothing(data, cuts):
    one = seal.Handshake(KEY, "testing", connects=False)
    for start in range(0, len(data), cuts):
        assert 0 < one.wanted_bytes <= seal.HELLO_BYTES_MAX
        assert len(one._came) <= seal.HELLO_BYTES_MAX
        try:
            assert one.feed(data[start : start + cuts]) == b""
        except SealError:
            break
    assert not one.is_proven


@settings(deadline=None)
@given(start=st.integers(0, 200))
def test_a_stranger_who_knows_the_hello_gets_no_further_than_the_proof(start):
    one = seal.Handshake(KEY, "testing", connects=False)
    one.feed(seal.Handshake(OTHER_KEY, "testing", connects=True).hello)
    assert one.wanted_bytes == seal.HEAD_BYTES
    with pytest.raises(SealError, match="key"):
        one.feed(bytes([start % 256]) * 10_000_000)
    assert len(one._came) <= seal.HEAD_BYTES


def test_what_follows_the_handshake_is_given_back():
    one = seal.Handshake(KEY, "testing", connects=True)
    other = seal.Handshake(KEY, "testing", connects=False)
    other.feed(one.hello)
    one.feed(other.hello + other.proof())
    sealer, _ = one.ends()
    rest = other.feed(one.proof() + frame(sealer, b"at once"))
    assert other.ends()[1].feed(rest) == [b"at once"]


def test_a_proof_with_a_message_in_it_is_refused():
    one = seal.Handshake(KEY, "testing", connects=True)
    other = seal.Handshake(KEY, "testing", connects=False)
    other.feed(one.hello)
    one.feed(other.hello + other.proof())
    with pytest.raises(SealError, match="carries a message"):
        other.feed(b"".join(seal.Sealer(one._pair()[0], first=0).seal(b"x"))[: seal.HEAD_BYTES])


def test_a_message_that_is_too_large_is_refused_on_both_sides():
    (sealer, _), (_, unsealer) = pair()
    unsealer._max = 10
    with pytest.raises(SealError, match="11 bytes, where 10"):
        unsealer.feed(frame(sealer, bytes(11)))
    with pytest.raises(ValueError, match="at most"):
        sealer.seal(bytes(seal.MAX_PAYLOAD_BYTES), b"1")


def test_bulk_is_checked_as_a_whole_and_refused_where_none_is_taken():
    (sealer, _), (_, unsealer) = pair()
    bulk = bytes(range(256)) * 100
    head = b"".join(sealer.seal(bulk_bytes=len(bulk)))
    mac = sealer.bulk()
    mac.update(memoryview(bulk)[:1000])
    mac.update(memoryview(bulk)[1000:])
    assert unsealer.head(head) == (0, len(bulk))
    check = unsealer.bulk()
    check.update(bulk)
    check.check(mac.tag())
    altered = unsealer.bulk()
    altered.update(bulk[:-1] + b"\x00")
    with pytest.raises(SealError, match="bulk data were altered"):
        altered.check(mac.tag())
    with pytest.raises(SealError, match="none is taken"):
        pair_feed_bulk()


def pair_feed_bulk():
    (sealer, _), (_, unsealer) = pair()
    unsealer.feed(b"".join(sealer.seal(bulk_bytes=1 << 40)))


def test_parts_are_not_copied():
    (sealer, _), _ = pair()
    part = memoryview(bytearray(100_000))
    assert any(buffer is part for buffer in sealer.seal(part))


@pytest.mark.parametrize("purpose", ["", "x" * 65, "é"])
def test_a_purpose_is_a_short_plain_word(purpose):
    with pytest.raises(ValueError, match=r"."):
        seal.Handshake(KEY, purpose, connects=True)


def test_the_errors_are_what_callers_catch():
    assert issubclass(SealError, OutlastError)
    assert issubclass(SealError, ValueError)
    assert issubclass(CutShort, ConnectionError)
