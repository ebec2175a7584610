"""What agents say to each other: everything round and back, nothing else becomes anything."""

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import ipc
from outlast.launch.membership.messages import (
    Departs,
    Fixed,
    Go,
    JobEnded,
    Join,
    Member,
    Ready,
    Welcome,
    changed,
    changes,
    decode,
    encode,
)


def member(number):
    return Member(
        node=f"{number:012x}", host=f"h{number}", address=f"10.0.0.1:{number}", labels={"rack": "r"}
    )


def go_of(attempt, numbers):
    members = tuple(member(number) for number in numbers)
    return Go(attempt=attempt, members=members, store="10.0.0.1:9", term=f"r{attempt}")


@pytest.mark.parametrize(
    "message",
    [
        Join(node="a", host="b", address="c:1", attempt=3, warming=True),
        Ready(attempt=7),
        Fixed(machines=3),
        Welcome(node="a", min_nodes=2, max_nodes=4),
        Departs(node="a", host="h", goes_on=False),
        JobEnded(exit_code=75, reason="drained"),
        go_of(3, range(4)),
    ],
)
def test_round_and_back(message):
    assert decode(encode(message)) == message


def test_ten_thousand_machines_fit_into_one_message():
    go = go_of(1, range(10_240))
    data = encode(go)
    assert len(data) < 1 << 20
    assert decode(data) == go


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        decode(b"\x00" + data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"type": "Nonsense"}',
        b'{"type": "Ready", "attempt": "seven"}',
        b'{"type": "Join", "node": 1, "host": "h", "address": "a:1", "attempt": 0}',
        b'{"type": "Over", "exit_code": 0}',
        b'{"a":' * 100_000,
        b"\xff\xfe{}",
        zlib.compress(b"[]"),
        zlib.compress(encode(Ready()))[:-3],
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        decode(data)


def test_a_packed_message_that_would_fill_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(ipc, "MAX_UNPACKED_BYTES", 1 << 16)
    bomb = zlib.compress(json.dumps({"type": "Over", "reason": "x" * (1 << 20)}).encode())
    with pytest.raises(ValueError, match="larger than"):
        decode(bomb)


def test_what_has_changed_says_the_whole_list():
    before = go_of(4, range(200))
    after = go_of(5, [*range(20), *range(36, 200), 300, 301])
    short = changes(before, after)
    assert changed(before, decode(encode(short))) == after
    assert len(encode(short)) < 1000


def test_where_the_order_has_changed_or_few_are_there_the_list_is_sent():
    before = go_of(4, range(200))
    assert changes(before, go_of(5, [1, 0, *range(2, 200)])) is None
    assert changes(go_of(4, range(4)), go_of(5, range(3))) is None
    assert changes(None, before) is None
