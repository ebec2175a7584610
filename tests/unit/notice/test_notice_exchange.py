"""One answer, read as HTTP/1.1 says, in whatever pieces it comes."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.notice import source
from thorough import examples

LIMIT = 100


def read(raw, cuts=(), limit=LIMIT):
    """The answer in ``raw``, received in pieces that end at ``cuts``."""
    places = sorted({0, len(raw), *(cut for cut in cuts if 0 < cut < len(raw))})
    pieces = [raw[a:b] for a, b in itertools.pairwise(places)]

    class Sock:
        def receive(self):
            return pieces.pop(0) if pieces else b""

    return source._ResponseReader(Sock(), limit).answer()


WHOLE = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nETag: a: b\r\n\r\nTRUE",
    "until the end": b"HTTP/1.0 200 OK\r\netag: a: b\r\n\r\nTRUE",
    "chunks": b"HTTP/1.1 200 OK\r\nETag:a: b\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nTR\r\n02;x=y\r\nUE\r\n0\r\n\r\n",
    "line feeds alone": b"HTTP/1.1 200 OK\nContent-Length: 4\nEtag: a: b\n\nTRUE",
    "go on first": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\neTag: a: b\r\n\r\nTRUE",
    "no reason": b"HTTP/1.1 200\r\nContent-Length: 4\r\nETag: a: b\r\n\r\nTRUE and more",
}


@pytest.mark.parametrize("name", WHOLE)
@given(cuts=st.lists(st.integers(0, 120)))
@examples(30)
def test_a_whole_answer_in_any_pieces(name, cuts):
    found = read(WHOLE[name], cuts)
    assert (found.status, found.body, found.headers["etag"]) == (200, b"TRUE", "a: b")


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body(status):
    assert read(f"HTTP/1.1 {status} Nothing\r\n\r\nTRUE".encode()).body == b""


BROKEN = {
    "cut in the head": (b"HTTP/1.1 200 OK\r\nContent-", "not HTTP"),
    "nothing": (b"", "not HTTP"),
    "no status": (b"HTTP/1.1 OK\r\n\r\n", "not HTTP"),
    "another protocol": (b"HTTP/2 200\r\n\r\n", "not HTTP"),
    "a status out of range": (b"HTTP/1.1 700 What\r\n\r\n", "not HTTP"),
    "a negative length": (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nTRUE", "not HTTP"),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 4, 4\r\n\r\nTRUE", "not HTTP"),
    "cut in the body": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nTRUE", "1 bytes are missing"),
    "announced too large": (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n", "larger than 100"),
    "too large": (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, "larger than 100"),
    "chunks too large": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n"
        + b"x" * 64
        + b"\r\n40\r\n"
        + b"x" * 64,
        "larger than 100",
    ),
    "a chunk without its size": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nTRUE\r\n",
        "size of a chunk",
    ),
    "cut before the last chunk": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nTRUE\r\n",
        "cut short",
    ),
    "cut in a chunk": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nTR",
        "cut short",
    ),
    "a chunk that goes on": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nTRUE\r\n0\r\n\r\n",
        "end of a chunk",
    ),
    "an endless head": (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "not HTTP"),
    "an endless size": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 20_000,
        "a chunk is missing",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_whole_answer_is_an_error_that_quotes_nothing(name):
    raw, said = BROKEN[name]
    with pytest.raises(ConnectionError, match=said) as caught:
        read(raw, range(0, len(raw), 1000))
    assert "TRUE" not in str(caught.value)


@given(raw=st.binary(max_size=300), head=st.booleans())
@examples(300)
def test_no_bytes_raise_anything_else(raw, head):
    begin = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" if head else b""
    with contextlib.suppress(OSError):
        assert len(read(begin + raw).body) <= LIMIT
