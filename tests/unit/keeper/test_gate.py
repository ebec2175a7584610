"""The gate asks until there is an answer, and storage that hangs holds nobody but its thread."""

import queue
import threading

import pytest

from outlast.keeper.fence import PASSES, FenceVerdict, Gate, Judgement

LIMIT_S = 60
WAITS = Judgement(FenceVerdict.WAIT, "not yet")


class Fence:
    """Gives the answers that it is given, the last one again and again."""

    place = "/shared/job"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = queue.SimpleQueue()
        self.reigns = []

    def told(self, attempt, reign):
        self.reigns.append((attempt, reign))

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
    gate = make(Fence(WAITS, OSError(5, "no"), WAITS, PASSES))
    gate.ask("save", 4, answers.put)
    assert answers.get(timeout=LIMIT_S) == ""
    assert gate.why("save") == ""
    assert gate.forget("save") == ""


def test_a_refusal_is_told_in_words(make):
    answers = queue.SimpleQueue()
    make(Fence(Judgement(FenceVerdict.REFUSE, "claimed by others"))).ask("save", 4, answers.put)
    assert answers.get(timeout=LIMIT_S) == "claimed by others"


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
    fence, told = Fence(answer), []
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

    fence, told, other = Fence(hang), [], queue.SimpleQueue()
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
    fence = Fence(WAITS, PASSES)
    gate = make(fence, again_s=LIMIT_S)
    gate.ask("save", 4, answers.put)
    fence.asked.get(timeout=LIMIT_S)
    gate.told(5, "ours")
    assert answers.get(timeout=LIMIT_S / 2) == ""
    assert fence.reigns == [(5, "ours")]
