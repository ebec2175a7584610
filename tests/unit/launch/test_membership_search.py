"""One that seeks and reaches nobody, on a virtual clock: when it passes a coordinator's number.

The coordinator's counter, the storage that stalls and the machine that seeks run in one heap of
timers; the search and the claims are the runtime's own.
"""

import errno
import heapq
import itertools
import random

import pytest

from outlast.launch.membership import search as searching
from outlast.launch.membership.coordinator import ALIVE_S
from outlast.launch.membership.hub import HANGS, REFUSED
from outlast.launch.membership.messages import Go, Member, Waits
from outlast.launch.membership.search import Search
from outlast.peer.claims import Claim, Claims, SignOfLife
from outlast.policy.membership import MembershipRules
from outlast.policy.succession import REFUSED_S, STRANGER_S, UNREACHED_S

READ_S = 0.01
LAG_S = 0.8  # by which storage answers one machine later than the other after a stall
ELSEWHERE = "cannot be reached: No route to host"


class Memory:
    """As much of a storage as claims need."""

    def __init__(self):
        self.files = {}
        self.problem = None

    def children(self, folder):
        return [name.removeprefix(f"{folder}/") for name in self.files]

    def read(self, name):
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def put(self, name, data):
        self.files[name] = data

    def put_new(self, name, data):
        if self.problem is not None:
            raise self.problem
        return self.files.setdefault(name, data) is data


class World:
    """Time, storage for two machines, the coordinator "a" and one that seeks, "c"."""

    def __init__(
        self,
        monkeypatch,
        *,
        who="stranger",
        seed=0,
        why=REFUSED,
        dial_s=0.001,
        members=(),
        ended=(),
    ):
        self.now_s = 0.0
        self.stalls = []  # (begin, end, whose)
        self.storage = Memory()
        self.claims = Claims(self.storage)
        self.why, self.dial_s = why, dial_s
        self.dialled = 0
        self.told, self.won, self.won_s = [], None, None
        self.attempt, self.go, self.ended, self.hung = 0, None, set(ended), set()
        self.rules = MembershipRules(min_nodes=1, max_nodes=4)
        self.tell = self.end = self.told.append
        a = Member(node="a", host="host-a", address="10.0.0.1:1")
        self.me = Member(node="c", host="host-c", address="10.0.0.3:1")
        if who == "neighbour":
            self.me = Member(node="c", host="host-a", address="10.0.0.1:9")
        elif who == "member":
            self.go = Go(attempt=1, members=(a, self.me), store="10.0.0.1:2")
        assert self.claims.take(
            Claim(
                attempt=1,
                node="a",
                host="host-a",
                address=a.address,
                term="r",
                members=members,
            ),
            0,
        )
        self.is_alive = True
        self._timers, self._order = [], itertools.count()
        monkeypatch.setattr(searching, "time", self)
        monkeypatch.setattr(searching, "random", random.Random(seed))
        self.search = Search(self, self, self.claims, hung_s=10.0)
        self._count(0)

    def monotonic(self):
        return self.now_s

    def later(self, delay_s, function):
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._order), function))

    def run(self, until_s):
        while self._timers and self._timers[0][0] <= until_s and self.won is None:
            self.now_s, _, function = heapq.heappop(self._timers)
            function()
        self.now_s = until_s

    def ask(self, what, then):
        """As the clerk: what storage does is done when it answers."""

        def answer():
            try:
                result, problem = what(), None
            except OSError as error:
                result, problem = None, error
            then(result, problem)

        self.later(self._takes_s("c"), answer)

    def _takes_s(self, whose):
        ends = [
            end for begin, end, who in self.stalls if begin <= self.now_s < end and whose in who
        ]
        return max(ends, default=self.now_s) - self.now_s + READ_S

    def _count(self, count):
        """The coordinator's sign of life, which waits for the one before."""
        takes_s = self._takes_s("a")

        def wrote():
            if self.is_alive:
                self.claims.say_alive(SignOfLife(attempt=1, node="a", count=count))
                self.later(max(ALIVE_S - takes_s % ALIVE_S, 0.0), lambda: self._count(count + 1))

        if self.is_alive:
            self.later(takes_s, wrote)

    @property
    def is_settled(self):
        return self.won is not None

    def dial(self, node, address, failed, *, hops):
        self.dialled += 1
        self.later(self.dial_s, lambda: failed(self.why, False))

    def coordinate_claimed(self, claim):
        self.won, self.won_s = claim, self.now_s


@pytest.fixture
def world(monkeypatch):
    return lambda **more: World(monkeypatch, **more)


@pytest.mark.parametrize("who", ["stranger", "member", "neighbour"])
@pytest.mark.parametrize(("why", "dial_s"), [(REFUSED, 0.001), (ELSEWHERE, 2.0)])
@pytest.mark.parametrize("stall_s", [0.9, 1.9, 5.0, 10.0, 60.0])
def test_a_stall_of_storage_is_no_silence_of_the_coordinator(world, who, why, dial_s, stall_s):
    for turn in range(30):
        one = world(who=who, seed=turn, why=why, dial_s=dial_s)
        one.search.begin()
        begin_s = (3.0, 30.0)[turn % 2] + turn / 12  # it looks often at first
        end_s = begin_s + stall_s
        one.stalls += [(begin_s, end_s, "c"), (begin_s, end_s + LAG_S, "a")]
        one.run(end_s + 20)
        assert one.won is None, (turn, one.won_s)
        assert one.dialled > 5


def test_storage_that_stalls_for_the_coordinator_alone_is_borne_by_strangers(world):
    one = world()
    one.stalls.append((5.05, 15.05, "a"))
    one.search.begin()
    one.run(60)
    assert one.won is None


@pytest.mark.parametrize(
    ("more", "limit_s"),
    [
        # A neighbour believes the kernel that both have.
        ({"who": "neighbour"}, REFUSED_S),
        ({"who": "member"}, 6.0),  # the rules' patience
        ({"who": "member", "members": ("a", "b", "c")}, 6.0),
        ({"who": "member", "members": ("a", "b", "c"), "ended": "b"}, REFUSED_S),
        ({"who": "member", "members": ("a", "c")}, REFUSED_S),
        ({"who": "member", "why": ELSEWHERE, "dial_s": 2.0}, UNREACHED_S),
        ({"members": ("a",), "ended": "a"}, REFUSED_S),
        ({}, STRANGER_S),
        ({"why": ELSEWHERE, "dial_s": 2.0}, STRANGER_S),
        ({"why": HANGS}, STRANGER_S),
    ],
    ids=[
        "neighbour",
        "member",
        "member, beside others",
        "member, beside others that have ended",
        "the only other member",
        "member, not reached",
        "stranger, that saw it end",
        "stranger",
        "stranger, not reached",
        "stranger, hangs",
    ],
)
def test_one_that_is_gone_is_believed_gone(world, more, limit_s):
    one = world(**more)
    one.is_alive = False
    one.search.begin()
    one.run(60)
    assert one.won is not None
    assert one.won.attempt == 2
    assert limit_s < one.won_s < limit_s + (4.0 if limit_s > REFUSED_S else 3.0)


def test_storage_that_is_always_slow_hides_nobody_s_death(world):
    one = world()
    one.stalls += [(2.0 * n, 2.0 * (n + 1), "ac") for n in range(60)]
    one.is_alive = False
    one.search.begin()
    one.run(120)
    assert one.won is not None


def test_a_claim_that_cannot_be_read_counts_by_its_number(world):
    one = world()
    one.is_alive = False
    one.storage.files["membership/attempt-000000000003.json"] = b""
    one.search.begin()
    one.run(60)
    assert one.won.attempt == 4
    assert one.dialled == 0
    waits = Waits(words="the coordinator of attempt 3, whose claim cannot be read")
    assert waits in one.told


def test_a_claim_that_cannot_be_read_and_whose_coordinator_lives_is_left_alone(world):
    one = world()
    one.storage.files["membership/attempt-000000000003.json"] = b"{"
    one.search.begin()
    one.run(60)
    assert one.won is None


@pytest.mark.parametrize("claimed", [True, False], ids=["a next one", "the first"])
def test_why_a_claim_cannot_be_made_is_said(world, claimed):
    one = world()
    one.is_alive = False
    if not claimed:
        del one.storage.files["membership/attempt-000000000001.json"]
    one.storage.problem = OSError(errno.ENOSPC, "No space left on device")
    one.search.begin()
    one.run(60)
    assert one.won is None
    words = [one.words for one in one.told]
    vain = "storage to take the claim of an attempt ([Errno 28] No space left on device)"
    assert vain in words
    assert set(words[words.index(vain) :]) == {vain}  # it is said once, and not in turns
    one.storage.problem = None
    one.run(100)
    assert one.won is not None
