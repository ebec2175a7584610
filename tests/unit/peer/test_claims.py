"""Claims on real directories: one winner, whatever numbers were tried; errors are errors."""

import threading

import pytest
from unit_fakes import at_once

from outlast.peer.claims import KEPT, Claim, Claims, Clerk, SignOfLife
from outlast.storage import Directory


def claim_of(number, node="a"):
    return Claim(
        attempt=number, node=node, host="h", address="10.0.0.1:1", term=node, members=(node,)
    )


@pytest.fixture
def claims(tmp_path):
    return Claims(Directory(tmp_path))


def test_the_first_takes_it_and_the_second_try_finds_it(claims):
    assert claims.newest() is None
    assert claims.take(claim_of(1), 0)
    assert claims.take(claim_of(1), 0)
    assert not claims.take(claim_of(1, "b"), 0)
    assert claims.newest() == claim_of(1)


def test_those_who_have_tried_different_numbers_meet(claims):
    assert claims.take(claim_of(1), 0)
    assert claims.take(claim_of(5, "a"), 1)
    assert not claims.take(claim_of(7, "b"), 1)
    assert claims.newest() == claim_of(5)
    assert claims.take(claim_of(7, "b"), 5)  # it has seen whose 5 is


def test_a_number_that_is_passed_cannot_be_taken(claims):
    assert claims.take(claim_of(9), 0)
    assert not claims.take(claim_of(8), 0)


@pytest.mark.parametrize("numbers", [(1, 1), (1, 2), (2, 5)])
def test_of_two_at_once_one_wins(claims, tmp_path, numbers):
    for turn in range(30):
        base = 10 * turn
        known = claims.newest_number()

        def race(which, base=base, known=known):
            claim = claim_of(base + numbers[which], "ab"[which])
            return Claims(Directory(tmp_path)).take(claim, known)

        won = at_once(2, race)
        assert set(won) <= {True, False}
        assert not all(won)
        if numbers[0] == numbers[1]:
            assert any(won)
        claims.take(claim_of(base + 9, "c"), claims.newest_number())


def test_a_claim_that_cannot_be_read_counts_by_its_number(claims, tmp_path):
    assert claims.take(claim_of(1), 0)
    folder = tmp_path / "membership"
    (folder / "attempt-000000000002.json").write_bytes(b"\xff{")
    (folder / "attempt-2.json").write_text("{}")
    (folder / "alive.json").write_text("{half")
    assert claims.newest() == Claim(attempt=2, node="", host="", address="")
    assert claims.newest_number() == 2
    assert claims.alive() is None
    assert not claims.take(claim_of(2), 1)
    assert claims.take(claim_of(3), 2)


def test_old_claims_go_and_the_newest_stay(claims):
    for number in range(1, 21):
        assert claims.take(claim_of(number), number - 1)
    claims.forget_old()
    assert claims.newest() == claim_of(20)
    assert claims.newest_number() == 20
    assert len(claims._numbers()) == KEPT


def test_signs_of_life(claims):
    assert claims.alive() is None
    sign = SignOfLife(attempt=3, node="a", count=7, over=True, exit_code=76, reason="gave up")
    claims.say_alive(sign)
    assert claims.alive() == sign


class Broken:
    """A storage on which nothing works."""

    def __getattr__(self, name):
        def fail(*_):
            raise OSError(5, f"no {name}")

        return fail


@pytest.fixture
def clerk():
    answers = []
    came = threading.Condition()

    def answer(function):
        with came:
            answers.append(function)
            came.notify()

    one = Clerk(answer)

    def wait():
        with came:
            assert came.wait_for(lambda: answers, 10)
            answers.pop(0)()

    one.wait = wait
    yield one
    one.close(5)


def test_errors_of_storage_are_answers(clerk):
    told = []
    claims = Claims(Broken())
    clerk.ask(lambda: claims.take(claim_of(1), 0), lambda *answer: told.append(answer))
    assert clerk.is_busy
    clerk.wait()
    assert not clerk.is_busy
    ((result, problem),) = told
    assert result is None
    assert isinstance(problem, OSError)


def test_a_failure_of_ours_is_one_of_storage_and_the_next_question_is_answered(clerk):
    told = []
    clerk.ask(lambda: 1 / 0, lambda *answer: told.append(answer))
    clerk.ask(lambda: 7, lambda *answer: told.append(answer))
    clerk.wait()
    clerk.wait()
    assert isinstance(told[0][1], OSError)
    assert told[1] == (7, None)
