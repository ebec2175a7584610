"""Workers are lost, stay away and come back at any moment: each sample stays counted once.

One machine of four places, with all that a worker leaves in memory, offers, takes over and hands
out; what there is none of is processes, weights and random numbers. Drawn are who is lost, when,
whose places stay empty, and who had come into an attempt before it was over.
"""

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from outlast.attempt import beat
from outlast.attempt.beat import BEATS_VARIABLE, EMPTY_VARIABLE, Basis, Descent, Own
from outlast.checkpoint.plan import OWN
from outlast.data import feed
from outlast.data.audit import History
from outlast.data.feed import BATCH, TRAIL, open_feed, take_over
from outlast.data.loader import Loader
from outlast.data.trail import Trail, read_record
from outlast.inprocess import handover
from outlast.inprocess.living import Moment, Packer, of_all, unpack
from outlast.policy.regain import StateOffer, decide
from outlast.script.objects import BoundaryState
from outlast.training import passage as module
from outlast.training.passage import Home, Passage
from thorough import examples

PLACES = 4
SHARDS = 12
NOTHING = BoundaryState(step=0, data={}, tensors={}, lazy=frozenset(), order={})


@pytest.fixture(name="_no_random", autouse=True)
def _no_random(monkeypatch):
    monkeypatch.setattr(module.random_state, "restore", lambda _: None)


class Board:
    """The attempt's store, as one rank sees it."""

    def __init__(self, values, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self._values = values

    def publish(self, key, value):
        self._values[key] = value

    def fetch(self, key, _):
        return self._values[key]


class Streams:
    """There are no random numbers."""

    def resumed(self, *_, **__):
        """See above."""

    restore = forget = resumed


class Worker:
    """A process; of the session's position in the data it has what a passage uses."""

    is_tied = False
    record = None

    def __init__(self, place):
        self.place = place
        self.step = self._batch = 0
        self.moment = self.mirror = None
        self._entrusted = []
        self._packer = Packer(OWN)
        self.trail = Trail()
        self._feed = None
        objects = SimpleNamespace(
            optimizers=list, put=lambda _: None, bits=SimpleNamespace(any_size=True)
        )
        home = Home(*[lambda: NOTHING] * 8)
        self._passage = Passage(SimpleNamespace(why_not=""), objects, self, None, home)

    @contextlib.contextmanager
    def runs(self, machine):
        """Within, this process' environment and memory are those of now."""
        empty = " ".join(map(str, machine.empty)) if self.place == machine.taken[0] else ""
        given = {"LOCAL_RANK": str(self.place), EMPTY_VARIABLE: empty, BEATS_VARIABLE: machine.dir}
        with mock.patch.dict(os.environ, given):
            beat._entrusted[:] = self._entrusted
            yield
            self._entrusted = [*beat._entrusted]

    @property
    def is_in_hand(self):
        return self._passage.is_in_hand

    # --- what a passage does with a session's position -------------------------------------------

    def completed(self):
        self.step += 1

    def put_generators(self, held):
        """There are none."""

    def tell(self, books):
        """The agent is another test's."""

    def begin_again(self, step, *, in_hand):
        self._feed.begin_again(step, in_hand=in_hand)

    def move(self, own_of, saved_by, books, step, *, is_same):
        link = books.link
        saved, self.trail = take_over(
            lambda rank: own_of(rank)["data"], saved_by, link.rank, link.world_size
        )
        self.open(link, step)
        self._feed.restore(saved["position"])
        self._batch = saved[BATCH]

    # --- in an attempt ---------------------------------------------------------------------------

    def open(self, link, step):
        loader = Loader(range(50), global_batch=12, seed=3, shards=SHARDS)
        whose = {"rank": link.rank, "world_size": link.world_size}
        self._feed = open_feed(loader, trail=self.trail, step=step, **whose)
        self.step = step

    def offer(self):
        moments = [self.moment] if self.moment else []
        found = handover._offer(moments, beat.read_own(), lives=self.moment is not None, part=0)
        return msgspec.structs.replace(found, is_grouped=True)

    def tell_own(self, link, plan):
        found = self.moment if self.moment and self.moment.step == plan.step else None
        handover._publish_own(link, plan, found, beat.read_own())

    def begin(self, link, descent):
        """The first attempt."""
        self.open(link, 0)
        self._passage._rank, self._passage._descent = link.rank, descent

    def come_in(self, on, regained):
        """Take over, as who was in the attempt before or as who was not."""
        if self._feed is not None:
            self.step = self._passage._take_over(on, self.step)
        else:
            own_of, saved_by = regained.own_of, regained.world_size
            self.move(own_of, saved_by, on.books, regained.step, is_same=False)
            self._passage._rank, self._passage._descent = on.link.rank, on.books.descent

    def keep(self, link, descent):
        """From here on it has what is the attempt's."""
        blob = self.moment.own if self.is_in_hand else self._own(self.step)
        self.mirror = Own(descent, link.rank)
        self._link, self._descent = link, descent
        self._note(blob)

    def takes_batch(self, until):
        """A step begins, and has come so far."""
        if not self.is_in_hand:
            next(self._feed)
            self._batch += 1
        self._passage.is_in_hand = True
        self._ahead = self._own(self.step + 1)
        for late in (False, True)[:until]:
            self.mirror.pending(self.step + 1, self._ahead, late=late)

    def ends_step(self):
        self._passage.is_in_hand = False
        self.step += 1
        self._note(self._ahead)

    def word(self):
        one = self.moment
        whose = {"timeline": one.timeline, "attempt": one.attempt, "step": one.step}
        return handover.PartingWord(**whose, rest=one.rest, own=one.own)

    def _own(self, step):
        data = feed.place(1, self._feed, self.trail.uncounted(), self._batch)
        return self._packer.pack({"data": data, "step": step, "random": {}})

    def _note(self, own):
        self.moment = Moment(self._descent, self._link, self.step, of_all(NOTHING), own)
        self.moment.settle(lambda: NOTHING)
        self.mirror.final(self.step, own, self.moment.rest)


class Machine:
    """The agent: who is in which attempt.

    Args:
        directory: where workers leave what they know.
        data: what draws.
    """

    def __init__(self, directory, data):
        self.dir, self._data = str(directory), data
        self.workers = {place: Worker(place) for place in range(PLACES)}
        self.attempt, self.timeline, self.log = 1, 1, []
        self._form()
        for worker, link in self._with_links():
            descent = Descent(1, 1, PLACES)
            with worker.runs(self):
                worker.begin(link, descent)
                worker.keep(link, descent)
        self._train(1)

    @property
    def taken(self):
        return sorted(self.workers)

    @property
    def empty(self):
        return [place for place in range(PLACES) if place not in self.workers]

    def _draw(self, *choices):
        return self._data.draw(st.sampled_from(choices))

    def _some(self, things, least=0):
        things = sorted(things)
        picked = st.sets(st.sampled_from(things), min_size=least) if things else st.just(set())
        return sorted(self._data.draw(picked))

    def _form(self):
        self._board = {}

    def _with_links(self):
        size = len(self.workers)
        return [
            (self.workers[place], Board(self._board, rank, size))
            for rank, place in enumerate(self.taken)
        ]

    def _train(self, steps):
        for _ in range(steps):
            for worker in self.workers.values():
                with worker.runs(self):
                    worker.takes_batch(2)
            for worker in self.workers.values():
                worker.ends_step()

    def _lose(self, places):
        for place in places:
            del self.workers[place]

    def lose_some(self):
        """At a boundary, or in a step: the others have ended it, or not, or some of them have."""
        lost = set(self._some(self.taken, least=1)[: len(self.workers) - 1])
        stages = {place: self._draw(2, 0, 1) for place in sorted(lost)}
        self.log.append(f"lost within a step: {stages}")
        for place, worker in self.workers.items():
            with worker.runs(self):
                worker.takes_batch(stages.get(place, 2))
        if set(stages.values()) == {2}:  # all had made their part
            for place in self._some(self.taken):
                self.log.append(f"{place} has ended it")
                self.workers[place].ends_step()
        self._lose(lost)

    def part(self):
        """Nobody is lost: all come to a boundary, as newcomers wait."""
        self.log.append("they move on")
        parting = handover.Parting()
        for worker, link in self._with_links():
            link.publish(f"{handover._KEY}/{link.rank}/own", msgspec.msgpack.encode(worker.word()))
        for worker, link in self._with_links():
            with worker.runs(self):
                beat.entrust(handover.take(link, parting))

    def come_in(self):
        """The next attempt: places are taken again or not, and more may be lost on the way."""
        self.attempt += 1
        for new in self._some(self.empty):
            self.workers[new] = Worker(new)
        self.log.append(f"attempt {self.attempt}: {self.taken}")
        self._form()
        pairs = self._with_links()
        offers: list[StateOffer] = []
        for worker, _ in pairs:
            with worker.runs(self):
                offers.append(worker.offer())
        plan = decide(offers, ())
        assert plan.step is not None, (plan.why_not, self.log)
        for worker, link in pairs:
            with worker.runs(self):
                worker.tell_own(link, plan)
        own_of = lambda rank: unpack(self._board[handover._own_key(rank)])  # noqa: E731
        self._check(plan.step, (own_of(rank)["data"][TRAIL] for rank in range(plan.world_size)))
        late = self._some(self.taken) if self._draw(False, True) else []
        has_come = self._some(late)  # to the state, and has noted nothing
        self.log.append(f"from {plan}; not in it: {late}, half in it: {has_come}")
        basis = Basis(plan.attempt, plan.step, plan.world_size)
        descent = Descent(self.timeline, self.attempt, len(pairs), basis)
        for worker, link in pairs:
            if worker.place in late and worker.place not in has_come:
                continue
            regained = SimpleNamespace(
                step=plan.step,
                attempt=plan.attempt,
                world_size=plan.world_size,
                own_of=own_of,
                state={},
                moment=None,
                has_new=False,
            )
            books = SimpleNamespace(descent=descent, link=link)
            sources = SimpleNamespace(regain=lambda *_, found=regained, **__: found)
            on = SimpleNamespace(link=link, books=books, sources=sources, streams=Streams())
            with worker.runs(self):
                worker.come_in(on, regained)
                if worker.place not in late:
                    worker.keep(link, descent)
        if late:
            self._lose_on_the_way(late)
            return False
        self._check_here()
        return True

    def _lose_on_the_way(self, late):
        lost = self._some(late, least=1)
        if not any(one.moment for place, one in self.workers.items() if place not in lost):
            lost = []  # else there is no history any more
        self.log.append(f"lost on the way: {lost}")
        self._lose(lost)
        for place in late:
            worker = self.workers.get(place)
            if worker is not None and worker.moment is None:  # it joins the next one instead
                self.workers[place] = Worker(place)

    def go_on(self):
        self._train(self._draw(0, 1, 2))
        self._check_here()

    def _check_here(self):
        moments = [worker.moment for worker in self.workers.values()]
        (step,) = {one.step for one in moments}
        self._check(step, (unpack(one.own)["data"][TRAIL] for one in moments))

    def _check(self, step, trails):
        verdict = History(map(read_record, trails), step).verdict()
        assert verdict.proved, (verdict.faults, self.log)


@given(data=st.data())
@examples(150)
def test_each_sample_stays_counted_once(tmp_path_factory, data):
    machine = Machine(tmp_path_factory.mktemp("beats"), data)
    for _ in range(data.draw(st.integers(1, 6))):
        while not machine.come_in():
            pass
        machine.go_on()
        if machine.empty and data.draw(st.booleans()):
            machine.part()
        else:
            machine.lose_some()
