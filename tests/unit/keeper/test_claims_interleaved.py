"""Two claim one number, and their keepers look: every order of the single storage operations.

What runs are the real claims and the real fence. Each of them is brought forward by one operation
at a time: it is begun anew, is given what it was answered before, and stopped at the next one.
"""

import itertools

import pytest

from outlast.keeper.conclude import Fence, FenceVerdict
from outlast.peer.claims import Claim, Claims, claimed, claimed_numbers, name_of

NUMBER = 5
REIGNS = ("majority", "minority")


class Memory:
    """A storage with what both real ones promise; the attempt before is claimed."""

    def __init__(self):
        self.files = {name_of(NUMBER - 1): b"{}"}

    def children(self, folder):
        return sorted(name.removeprefix(f"{folder}/") for name in self.files)

    def read(self, name):
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def put_new(self, name, data):
        return self.files.setdefault(name, data) is data

    def describe(self, name=""):
        return name


class Stopped(BaseException):
    """The next operation is not to be done yet."""


class Actor:
    """Something that asks storage, one operation at a time."""

    def __init__(self, storage, act):
        self.storage, self.act = storage, act
        self.answers = []
        self.result = None
        self.is_done = False

    def step(self):
        left, is_new = iter(self.answers), True

        def ask(operation, *arguments):
            nonlocal is_new
            answer = next(left, None)
            if answer is None:
                if not is_new:
                    raise Stopped
                is_new = False
                try:
                    answer = (getattr(self.storage, operation)(*arguments), None)
                except OSError as error:
                    answer = (None, error)
                self.answers.append(answer)
            if answer[1] is not None:
                raise answer[1]
            return answer[0]

        try:
            self.result = self.act(Asked(ask))
            self.is_done = True
        except Stopped:
            pass


class Asked:
    """A storage whose operations go through ``ask``."""

    def __init__(self, ask):
        self._ask = ask

    def describe(self, name=""):
        return name

    def __getattr__(self, operation):
        return lambda *arguments: self._ask(operation, *arguments)


def claim(term, storage, known):
    made = Claim(attempt=NUMBER, node=term, host="", address="", term=term)
    return Claims(storage).take(made, known)


def look(term, storage):
    fence = Fence(storage, told_s=0.0)
    fence.told(NUMBER, term)
    return fence.judge(NUMBER).verdict


def actors(storage):
    """(who claims), (whose keepers look), each in the order of REIGNS."""
    return (
        [Actor(storage, lambda one, r=term: claim(r, one, NUMBER - 1)) for term in REIGNS],
        [Actor(storage, lambda one, r=term: look(r, one)) for term in REIGNS],
    )


def run(schedule):
    """(whether each has the claim, what each keeper was told) after everybody is done."""
    storage = Memory()
    claiming, looking = actors(storage)
    everybody = [*claiming, *looking]
    for place in [*schedule, *itertools.chain.from_iterable([range(4)] * 6)]:
        if not everybody[place].is_done:
            everybody[place].step()
    assert all(one.is_done for one in everybody)
    winner = claimed(storage, NUMBER).term
    return [one.result for one in claiming], [one.result for one in looking], winner


def schedules(first):
    """Every order of six operations, beginning with ``first``'s."""
    return (
        (first, *rest)
        for rest in itertools.product(range(4), repeat=6)
        if all(rest.count(place) <= 3 for place in range(4))
    )


@pytest.mark.parametrize("first", range(4))
def test_one_has_the_number_and_only_its_keeper_commits(first):
    seen = set()
    for schedule in schedules(first):
        won, told, winner = run(schedule)
        assert won == [term == winner for term in REIGNS], schedule
        for term, verdict in zip(REIGNS, told, strict=True):
            assert verdict is not FenceVerdict.COMMIT or term == winner, schedule
            assert verdict is not FenceVerdict.REFUSE or term != winner, schedule
        seen.add((winner, *told))
    assert len(seen) > 3  # both have won, and keepers have looked too early


@pytest.mark.parametrize("stalls", range(3))
def test_a_claim_whose_operations_stall_is_refused_when_it_comes_late(stalls):
    """Somebody else has claimed, trained and committed meanwhile, and the next number as well."""
    storage = Memory()
    late = Actor(storage, lambda one: claim("majority", one, NUMBER - 1))
    for _ in range(stalls):
        late.step()
    was_first = late.is_done
    for number, known in ((NUMBER, NUMBER - 1), (NUMBER + 1, NUMBER)):
        made = Claim(attempt=number, node="m", host="", address="", term="minority")
        assert Claims(storage).take(made, known) != was_first
        if was_first:
            break
    while not late.is_done:
        late.step()
    assert late.result == was_first
    assert look("majority", storage) is (FenceVerdict.COMMIT if was_first else FenceVerdict.REFUSE)
    assert claimed_numbers(storage)[1:] == ([NUMBER] if was_first else [NUMBER, NUMBER + 1])


def test_the_one_that_asks_again_after_a_lost_answer_has_it():
    storage = Memory()
    assert claim("majority", storage, NUMBER - 1)
    assert claim("majority", storage, NUMBER - 1)
    assert look("majority", storage) is FenceVerdict.COMMIT
