"""Only the newest attempt commits, by its own term; and the gate that asks until this is known."""

import queue
import threading

import msgspec
import pytest

from outlast.keeper.conclude import PASSES, TERMS_MAX, Fence, FenceVerdict, Gate, Judgement
from outlast.peer.claims import name_of
from outlast.storage import Directory


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture(name="storage")
def _storage(tmp_path):
    return Directory(tmp_path)


@pytest.fixture(name="clock")
def _clock():
    return Clock()


@pytest.fixture(name="fence")
def _fence(storage, clock):
    return Fence(storage, told_s=3.0, clock=clock)


def claim(storage, number, term, members=()):
    data = msgspec.json.encode({"attempt": number, "node": "n", "reign": term, "members": members})
    assert storage.put_new(name_of(number), data)


def test_our_own_claim_lets_us_commit(storage, fence):
    fence.told(4, "ours")
    claim(storage, 4, "ours")
    assert fence.judge(4) == PASSES
    assert fence.judge(4) == PASSES


def test_a_number_that_others_have_claimed_is_refused(storage, fence):
    fence.told(4, "ours")
    claim(storage, 4, "theirs")
    verdict, words = fence.judge(4)
    assert verdict is FenceVerdict.REFUSE
    assert words.startswith("attempt 4 was claimed by other machines")


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff{", b'{"reign": 5}', b'{"reign": ""}'])
def test_a_claim_that_says_nobodys_name_is_not_ours(storage, fence, data):
    fence.told(4, "")
    storage.put(name_of(4), data)
    assert fence.judge(4).verdict is FenceVerdict.REFUSE


def test_an_agent_that_runs_the_job_alone_need_not_have_told_of_its_last_attempt(storage, fence):
    """It was killed between the claim and the word to its keeper."""
    fence.told(4, "ours")
    claim(storage, 4, "ours", ["ours"])
    claim(storage, 5, "ours", ["ours"])
    assert fence.judge(4) == PASSES


@pytest.mark.parametrize(("term", "members"), [("ours", ["a"]), ("b", ["b"]), ("ours", [])])
def test_one_that_others_take_part_in_may_have_begun_without_us(
    storage, fence, clock, term, members
):
    fence.told(4, "ours")
    claim(storage, 4, "ours", ["a", "b"])
    claim(storage, 5, term, members)
    assert fence.judge(4).verdict is FenceVerdict.WAIT
    clock.now_s += 4.0
    assert fence.judge(4).verdict is FenceVerdict.REFUSE


def test_one_that_is_not_there_yet_is_waited_for(storage, fence):
    claim(storage, 3, "ours")
    fence.told(4, "ours")
    assert fence.judge(4) == (FenceVerdict.WAIT, "attempt 4 is not claimed yet")
    claim(storage, 4, "ours")
    assert fence.judge(4) == PASSES


def test_a_keeper_that_was_told_nothing_waits(storage, fence):
    claim(storage, 4, "ours")
    assert fence.judge(4).verdict is FenceVerdict.WAIT
    fence.told(4, "ours")
    assert fence.judge(4) == PASSES


def test_an_attempt_that_went_on_elsewhere_is_refused_after_a_while(storage, fence, clock):
    fence.told(4, "ours")
    claim(storage, 5, "theirs")
    assert fence.judge(4).verdict is FenceVerdict.WAIT
    clock.now_s += 2.9
    assert fence.judge(4).verdict is FenceVerdict.WAIT
    clock.now_s += 0.2
    verdict, words = fence.judge(4)
    assert verdict is FenceVerdict.REFUSE
    assert words.startswith("attempt 5 has begun without this machine")


def test_each_newer_number_is_waited_for_anew(storage, fence, clock):
    fence.told(4, "ours")
    claim(storage, 5, "theirs")
    assert fence.judge(4).verdict is FenceVerdict.WAIT
    clock.now_s += 2.9
    claim(storage, 6, "theirs")
    assert fence.judge(4).verdict is FenceVerdict.WAIT
    clock.now_s += 2.9
    assert fence.judge(4).verdict is FenceVerdict.WAIT


@pytest.mark.parametrize("first", ["ours", "another's"])
def test_what_an_attempt_has_left_is_committed_in_the_next(storage, fence, first):
    fence.told(4, first)
    claim(storage, 4, first)
    claim(storage, 5, "ours")
    assert fence.judge(4).verdict is FenceVerdict.WAIT
    fence.told(5, "ours")
    assert fence.judge(4) == PASSES


def test_what_is_left_of_the_half_that_lost_the_number_is_refused(storage, fence):
    """Though it takes part in the next attempt: somebody else went on from there."""
    fence.told(4, "ours")
    claim(storage, 4, "theirs")
    fence.told(5, "theirs")
    claim(storage, 5, "theirs")
    assert fence.judge(4).verdict is FenceVerdict.REFUSE
    assert fence.judge(5) == PASSES


def test_one_terms_attempts_stand_for_each_other(storage, fence):
    """A claim that was made up for may skip a number."""
    fence.told(4, "ours")
    fence.told(5, "ours")
    claim(storage, 5, "ours")
    assert fence.judge(4) == PASSES


def test_the_next_attempts_claim_is_waited_for_too(storage, fence):
    fence.told(4, "ours")
    claim(storage, 4, "ours")
    assert fence.judge(4) == PASSES
    fence.told(5, "heir")
    assert fence.judge(4) == (FenceVerdict.WAIT, "attempt 5 is not claimed yet")


def test_storage_that_fails_is_no_answer(storage, fence, monkeypatch):
    def fail(_):
        raise OSError(5, "Input/output error")

    fence.told(4, "ours")
    claim(storage, 4, "ours")
    monkeypatch.setattr(storage, "children", fail)
    with pytest.raises(OSError, match="Input/output"):
        fence.judge(4)


def test_a_claim_is_read_once(storage, fence, monkeypatch):
    fence.told(4, "ours")
    claim(storage, 4, "ours")
    assert fence.judge(4) == PASSES
    monkeypatch.setattr(storage, "read", None)
    assert fence.judge(4) == PASSES


def test_only_so_many_terms_are_remembered(storage, fence):
    for number in range(1, 3 * TERMS_MAX):
        fence.told(number, "ours")
        claim(storage, number, "ours")
        assert fence.judge(number) == PASSES
    assert len(fence._terms) == TERMS_MAX
    assert len(fence._ours) <= TERMS_MAX


# --- the gate asks until there is an answer, and storage that hangs holds nobody but its thread ---

LIMIT_S = 60
WAITS = Judgement(FenceVerdict.WAIT, "not yet")


class FakeFence:
    """Gives the answers that it is given, the last one again and again."""

    place = "/shared/job"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = queue.SimpleQueue()
        self.terms = []

    def told(self, attempt, term):
        self.terms.append((attempt, term))

    def judge(self, attempt):
        self.asked.put(attempt)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer


@pytest.fixture
def make():
    gates = []

    def one(fence, again_s=0.001):
        gates.append(Gate(fence, again_s))
        return gates[-1]

    yield one
    for gate in gates:
        gate.stop()
        gate._thread.join(LIMIT_S)
        assert not gate._thread.is_alive()


def test_it_asks_until_it_knows(make):
    answers = queue.SimpleQueue()
    gate = make(FakeFence(WAITS, OSError(5, "no"), WAITS, PASSES))
    gate.ask("save", 4, answers.put)
    assert answers.get(timeout=LIMIT_S) == ""
    assert gate.why("save") == ""
    assert gate.forget("save") == ""


def test_a_refusal_is_told_in_words(make):
    answers = queue.SimpleQueue()
    gate = make(FakeFence(Judgement(FenceVerdict.REFUSE, "claimed by others")))
    assert gate.refused(4) == ""
    gate.ask("save", 4, answers.put)
    assert answers.get(timeout=LIMIT_S) == "claimed by others"
    assert gate.refused(4) == "claimed by others"
    assert gate.refused(5) == ""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (WAITS, "not yet"),
        (OSError(5, "Input/output error"), "/shared/job cannot be read: Input/output error"),
        (ZeroDivisionError("ours"), "/shared/job cannot be read: ours"),
    ],
    ids=["waits", "error", "bug"],
)
def test_why_it_waits_is_known_and_it_can_be_given_up(make, answer, words):
    fence, told = FakeFence(answer), []
    gate = make(fence)
    gate.ask("save", 4, told.append)
    for _ in range(3):
        fence.asked.get(timeout=LIMIT_S)
    assert gate.why("save").endswith(words)
    assert gate.forget("save").endswith(words)
    assert not told


def test_storage_that_hangs_holds_nobody_and_is_no_answer(make):
    hangs = threading.Event()

    def hang():
        hangs.wait(LIMIT_S)
        return PASSES

    fence, told, other = FakeFence(hang), [], queue.SimpleQueue()
    gate = make(fence)
    gate.ask("one", 4, told.append)
    assert fence.asked.get(timeout=LIMIT_S) == 4
    gate.ask("other", 5, other.put)
    assert "not answered" in gate.why("one")
    assert "not answered" in gate.forget("one")
    hangs.set()
    assert other.get(timeout=LIMIT_S) == ""
    assert not told  # it was given up while storage hung


def test_word_of_a_new_attempt_makes_it_ask_at_once(make):
    answers = queue.SimpleQueue()
    fence = FakeFence(WAITS, PASSES)
    gate = make(fence, again_s=LIMIT_S)
    gate.ask("save", 4, answers.put)
    fence.asked.get(timeout=LIMIT_S)
    gate.told(5, "ours")
    assert answers.get(timeout=LIMIT_S / 2) == ""
    assert fence.terms == [(5, "ours")]
