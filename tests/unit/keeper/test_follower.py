"""What rank 0's keeper does not decide any more is not waited for, once that is certain."""

import queue

import pytest

from outlast.keeper import between as followers
from outlast.keeper.between import LEADER_GONE, SaveFollower
from outlast.keeper.wire import Hello

LIMIT_S = 30
TRIES = 3


class Hears:
    """An attempt that is past or not, and what has become of its saves."""

    def __init__(self, *, is_past):
        self.past, self.words = is_past, []

    def is_past(self, attempt):
        return self.past

    def left_alone(self, attempt, words):
        self.words.append((attempt, words))

    def unanswered(self, attempt):
        return []


@pytest.mark.parametrize(
    ("error", "is_past", "words"),
    [
        (ConnectionRefusedError, True, [(3, LEADER_GONE)]),
        (ConnectionRefusedError, False, []),  # it may be started again, and the session with it
        (TimeoutError, True, []),  # it may be cut off, and decide all the same
    ],
)
def test_what_has_ended_with_its_attempt_is_left_alone_at_once(monkeypatch, error, is_past, words):
    tries = queue.SimpleQueue()

    def connect(*args, **kwargs):
        tries.put(args)
        raise error

    monkeypatch.setattr(followers, "connect", connect)
    monkeypatch.setattr(followers, "PAUSE_S", 0.001)
    monkeypatch.setattr(followers, "PAUSE_MAX_S", 0.001)
    hears = Hears(is_past=is_past)
    hello = Hello(job="j", attempt=3, rank=1, world_size=2, first_local=1, num_local=1)
    follower = SaveFollower(("10.0.0.1", 1), lambda: b"", None, hears, hello=hello, said=None)
    for _ in range(TRIES):
        tries.get(timeout=LIMIT_S)
    follower.close()
    assert hears.words[:1] == words
