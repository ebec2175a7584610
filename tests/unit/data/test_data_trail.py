"""The record of what was handed out: a repeat, a loss and a swap are found, with their step."""

import json
import random

import crowd
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.data import Loader, Stream, open_feed
from outlast.data.audit import History
from outlast.data.feed import TRAIL, take_over
from outlast.data.loader import Slices
from outlast.data.order import ids_at, permute, places_of, sample_ids
from outlast.data.stream import Portions
from outlast.data.trail import FINDINGS_MAX, KEPT, LOT, Trail, expected, read_record
from thorough import examples

SIZE, BATCH, STEPS = 23, 6, 20


def rows(batch):
    return batch.tolist()


class Planted(Slices):
    """Asks the data set for other samples than those whose turn it is."""

    def __init__(self, loader):
        super().__init__(loader)
        self._plant = loader.plant

    def ids(self, position, count):
        return self._plant(position, super().ids(position, count))


class Altered(Loader):
    """A loader with a bug."""

    def __init__(self, plant, dataset=range(SIZE)):
        self.plant = plant
        super().__init__(dataset, global_batch=BATCH, seed=5)

    def _slices(self):
        return Planted(self)


LONGER = sample_ids(0, (STEPS + 9) * BATCH, size=SIZE, seed=5, shuffle=True)
ORDER = LONGER[: STEPS * BATCH]


def at(place, change):
    """A plant that changes the sample at one place of the job."""

    def plant(position, ids):
        if position <= place < position + len(ids):
            ids[place - position : place - position + 1] = change
        return ids

    return plant


def both(*plants):
    def plant(position, ids):
        for one in plants:
            ids = one(position, ids)
        return ids

    return plant


def run(plant, changes=((2, 7), (3, 0), (1, 4), (3, 9)), **settings):
    job = crowd.Crowd(lambda: Altered(plant, **settings), rows)
    for world_size, num_steps in changes:
        job.stint(world_size, num_steps, ahead=1)
    assert len(job.steps) == STEPS
    return job


def said(job):
    return [(fault.what, fault.step, fault.sample) for fault in job.verdict().faults]


def test_an_undisturbed_run_is_proved():
    job = run(lambda _, ids: ids)
    verdict = job.verdict()
    assert verdict.proved
    assert (verdict.steps, verdict.samples) == (STEPS, STEPS * BATCH)
    assert [(s.step, s.steps, s.world_size) for s in verdict.stretches] == [
        (0, 7, 2),
        (7, 4, 1),
        (11, 9, 3),
    ]
    for step in (1, 8, STEPS):
        assert job.history().ids(step) == job.steps[step - 1]


@pytest.mark.parametrize("place", [0, 5, 41, 42, 43, 66, STEPS * BATCH - 1])
def test_a_repeat_in_place_of_another(place):
    due = ORDER[place]
    came = next(one for one in ORDER[place // SIZE * SIZE :] if one != due)
    job = run(at(place, [came]))
    step = place // BATCH + 1
    assert said(job) == [("repeat", step, came), ("loss", step, due)]
    assert job.history().ids(step) == job.steps[step - 1]
    turn = ORDER.index(came, place // SIZE * SIZE) // BATCH + 1
    assert f"its turn is step {turn}" in job.verdict().faults[0].text


@pytest.mark.parametrize("place", [0, 3, 43, STEPS * BATCH - 1])
def test_a_loss(place):
    job = run(at(place, []))
    step = place // BATCH + 1
    assert ("loss", step, ORDER[place]) in said(job)
    assert {fault.step for fault in job.verdict().faults} == {step}
    assert job.verdict().samples == STEPS * BATCH - 1
    assert len(job.history().ids(step)) == BATCH - 1


@pytest.mark.parametrize("place", [0, 3, 43, STEPS * BATCH - 1])
def test_a_sample_too_many(place):
    job = run(at(place, [ORDER[place]] * 2))
    step = place // BATCH + 1
    faults = said(job)
    assert ("repeat", step, ORDER[place]) in faults
    assert {fault[1] for fault in faults} == {step}
    assert job.verdict().samples == STEPS * BATCH + 1
    assert sorted(job.history().ids(step)) == sorted(job.steps[step - 1])


def test_many_samples_too_many():
    job = run(at(STEPS * BATCH - 1, [3, 4, 5, 6]))
    assert job.history().ids(STEPS) == job.steps[-1]


@pytest.mark.parametrize(("one", "other"), [(0, 1), (2, 5), (13, 70), (0, 119), (41, 42)])
def test_a_swap(one, other):
    job = run(both(at(one, [ORDER[other]]), at(other, [ORDER[one]])))
    (fault,) = job.verdict().faults
    assert (fault.what, fault.step, fault.last_step) == (
        "swap",
        one // BATCH + 1,
        other // BATCH + 1,
    )
    assert str(ORDER[one]) in fault.text
    assert str(ORDER[other]) in fault.text


class Wide:
    """Has more samples than it says."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index


def test_a_sample_that_does_not_exist():
    assert ("stranger", 2, 99) in said(run(at(9, [99]), dataset=Wide()))


def shifted(position, ids):
    """From place 50 on, everything comes one place early: the one at 50 is lost."""
    places = range(position, position + len(ids))
    return [LONGER[place + (place >= 50)] for place in places]


def test_a_loss_that_moves_all_that_follows():
    faults = run(shifted).verdict().faults
    assert (faults[0].step, faults[0].last_step) == (9, 9)
    lost = [(fault.step, fault.sample) for fault in faults if fault.what == "loss"]
    assert lost[0] == (9, ORDER[50])


class Early(Slices):
    """In order, and from sample 50 on the one after it."""

    def ids(self, position, count):
        return [place + (place >= 50) for place in range(position, position + count)]


class Late(Slices):
    """In order, and from sample 50 on the one before it."""

    def ids(self, position, count):
        return [place - (place >= 50) for place in range(position, position + count)]


def in_order(kind, num_steps):
    class Shifted(Loader):
        def _slices(self):
            return kind(self)

    def build():
        return Shifted(range(10_000), global_batch=BATCH, shuffle=False)

    return crowd.Crowd(build, rows).stint(1, num_steps)


@pytest.mark.parametrize("num_steps", [20, 100])
def test_what_has_not_had_its_turn_yet_is_neither_a_repeat_nor_lost(num_steps):
    job = in_order(Early, num_steps)
    faults = [fault for fault in job.verdict().faults if fault.what != "more"]
    assert [(f.step, f.sample) for f in faults if f.what == "loss"] == [(9, 50)]
    assert {fault.what for fault in faults} == {"loss", "out of turn"}
    assert ("out of turn", 9, 51) in said(job)


def test_what_is_only_late_is_not_called_lost():
    faults = in_order(Late, 100).verdict().faults
    assert [(f.step, f.sample) for f in faults if f.what == "repeat"] == [(9, 49)]
    assert {fault.what for fault in faults} == {"repeat", "out of turn", "more"}


class Twice(Loader):
    """Hands a batch out twice, as a loader would that lost count of what it had prefetched."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            yield batch
            if number == 3:
                yield batch


class Dropping(Loader):
    """Loses a batch on the way."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number != 3:
                yield batch


@pytest.mark.parametrize(("kind", "step"), [(Twice, 5), (Dropping, 4)])
def test_a_whole_batch_too_often_or_never(kind, step):
    job = crowd.Crowd(lambda: kind(range(100), global_batch=4, seed=2), rows)
    job.stint(2, 8)
    verdict = job.verdict()
    assert verdict.faults[0].step == step
    assert job.history().ids(step) == job.steps[step - 1]
    assert not verdict.proved


def test_many_faults_are_counted_and_the_first_one_is_named():
    job = crowd.Crowd(lambda: Altered(lambda position, ids: ids[::-1]), rows)
    job.stint(1, 100)
    faults = job.verdict().faults
    assert faults[0].step == 1
    assert faults[-1].what == "more"
    assert len(job.saved[0][TRAIL]["findings"]) == FINDINGS_MAX
    with pytest.raises(ValueError, match="too many"):
        job.history().ids(3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slice_that_no_worker_had_is_missed_though_nobody_noted_it(rank):
    """Two workers that do not agree on how many they are."""
    job = run(lambda _, ids: ids, changes=((2, STEPS),))
    record = read_record(job.saved[rank][TRAIL])
    (fault,) = History([record], STEPS).verdict().faults
    assert (fault.what, fault.step, fault.last_step) == ("uncounted", 1, STEPS)
    assert "120 samples should have come, the workers had 60" in fault.text


def test_a_record_that_was_altered_does_not_add_up():
    job = run(lambda _, ids: ids)
    stretch = job.saved[0][TRAIL]["stretches"][1]
    stretch["digest"] = f"{int(stretch['digest'], 16) ^ 1:032x}"
    (fault,) = job.verdict().faults
    assert (fault.what, fault.step, fault.last_step) == ("uncounted", 8, 11)


def test_steps_without_a_record_are_not_called_proved():
    job = run(lambda _, ids: ids)
    records = [read_record(one[TRAIL]) for one in job.saved]
    late = History(records, STEPS + 5).verdict()
    assert [(f.what, f.step, f.last_step) for f in late.faults] == [("not covered", 21, 25)]
    for record in records:
        del record.stretches[0]
    (fault, *_) = History(records, STEPS).verdict().faults
    assert (fault.what, fault.step, fault.last_step) == ("not covered", 1, 7)
    assert not History([], 0).verdict().proved


def test_a_loop_that_was_left_in_a_step_and_begun_again():
    trail = Trail()
    first = open_feed(Loader(range(40), global_batch=4), rank=0, world_size=1, trail=trail)
    for _ in range(3):
        next(first)  # the third one's step was not completed
    loader = Loader(range(40), global_batch=4, seed=8)
    second = open_feed(loader, rank=0, world_size=1, trail=trail, step=2)
    for _ in range(2):
        next(second)
    history = History([read_record(trail.state())], 4)
    assert history.verdict().proved
    assert [(one.step, one.steps) for one in history.stretches] == [(0, 2), (2, 2)]


@pytest.mark.parametrize("batch", [4, 700])
def test_what_is_told_at_each_step_is_counted_as_if_it_were_not(batch):
    trails = quiet, told = Trail(), Trail()
    order = {"kind": "outlast", "size": 40 * batch, "seed": 1, "shuffle": False}
    begun = {"position": 0, "global_batch": batch, "world_size": 1, "order": order}
    for trail in trails:
        trail.begin(step=0, slice_of_batch=(0, batch), **begun)
    for step in range(40):
        ids = np.arange(step * batch, (step + 1) * batch)
        ids[0] += step in (3, 17, 18, 39)  # another sample than the one whose turn it was
        for trail in trails:
            trail.took(ids if step != 20 else ids[:-1])
        told.uncounted()
        assert told.state() == quiet.state() or step % 13
        if step == 25:  # another worker takes over from what was told
            state = json.loads(json.dumps(told.uncounted()))
            assert "lot" in state
    assert told.state() == quiet.state()
    assert [one["step"] for one in told.state()["findings"]] == [4, 18, 19, 21, 40]
    taken = Trail()
    taken.restore(state, [state])
    assert taken.state()["stretches"] == msgspec.to_builtins(read_record(state).stretches)
    assert [one["step"] for one in taken.state()["findings"]] == [4, 18, 19, 21]


def test_samples_that_were_skipped_between_two_loops_are_found():
    trail = Trail()
    loader = Loader(range(40), global_batch=4)
    first = open_feed(loader, rank=0, world_size=1, trail=trail)
    for _ in range(3):
        next(first)
    second = open_feed(loader, rank=0, world_size=1, trail=trail, step=2)
    next(second)
    (fault,) = History([read_record(trail.state())], 3).verdict().faults
    assert fault.text == (
        "step 3 goes on at sample 12 of the job and what was before it ended at 8: the 4 before it "
        "are in no step that was completed"
    )


def test_a_worker_that_stays_and_one_that_takes_over_a_place_have_one_record():
    trails = [Trail(), Trail()]
    feeds = [
        open_feed(Loader(range(40), global_batch=4), rank=rank, world_size=2, trail=trails[rank])
        for rank in range(2)
    ]
    for feed in feeds:
        next(feed), next(feed)
    at_two = {"position": feeds[1].state(), TRAIL: trails[1].state()}
    for feed in feeds:
        next(feed)  # the third step is interrupted, and in the next attempt once more
    for _ in range(2):
        assert trails[0].state() == trails[0].state()
        feeds[0].begin_again(2, in_hand=True)
        _, trails[1] = take_over(lambda _: at_two, 2, 1, 2)
        feeds[1] = open_feed(
            Loader(range(40), global_batch=4), rank=1, world_size=2, trail=trails[1], step=2
        )
        feeds[1].restore(at_two["position"])
        next(feeds[1])
    for feed in feeds:
        next(feed)
    history = History([read_record(trail.state()) for trail in trails], 4)
    assert history.verdict().proved, history.verdict().faults
    assert [(one.step, one.steps) for one in history.stretches] == [(0, 2), (2, 2)]


def streamed():
    return Stream(lambda shard: iter(range(9)), num_shards=2, global_batch=4)


def mapped():
    return Loader(range(40), global_batch=4)


@pytest.mark.parametrize("build", [streamed, mapped])
@pytest.mark.parametrize("after", [0, 3])
def test_samples_that_were_taken_before_the_first_step_are_missed(build, after):
    trail = Trail()
    if after:  # another loader's loop comes first
        other = Loader(range(7), global_batch=2, seed=3)
        feed = open_feed(other, rank=0, world_size=1, trail=trail)
        for _ in range(after):
            next(feed)
    loader = build()
    next(iter(loader))  # a look at a batch, before the session
    feed = open_feed(loader, rank=0, world_size=1, trail=trail, step=after)
    next(feed)
    (fault,) = History([read_record(trail.state())], after + 1).verdict().faults
    assert (fault.what, fault.step) == ("uncounted", after + 1)
    assert fault.text == (
        f"step {after + 1} begins at sample 4 of the job: the 4 before it are in no step that was "
        "completed"
    )


def stints(num, *, sizes, seeds=(1,)):
    """Records of so many attempts of one step, each by one to three workers."""
    saved, position = [], 0
    for number in range(num):
        seed = seeds[number * len(seeds) // num]
        if number and seed != seeds[(number - 1) * len(seeds) // num]:
            position = 0  # of another loader
        order = {"kind": "outlast", "size": SIZE, "seed": seed, "shuffle": True}
        world_size, whole = 1 + number % 3, sizes[number % len(sizes)]
        now = []
        for rank in range(world_size):
            _, trail = (
                take_over(saved.__getitem__, len(saved), rank, world_size)
                if saved
                else ({}, Trail())
            )
            first, stop = whole * rank // world_size, whole * (rank + 1) // world_size
            trail.begin(
                step=number,
                position=position,
                global_batch=whole,
                world_size=world_size,
                slice_of_batch=(first, stop),
                order=order,
            )
            trail.took(expected(order, np.arange(position + first, position + stop)))
            now.append({TRAIL: trail.state()})
        saved, position = now, position + whole
    return saved, History([read_record(one[TRAIL]) for one in saved], num)


def test_a_run_of_hundreds_of_changes_stays_small_and_is_proved():
    num = 3 * KEPT
    saved, history = stints(num, sizes=[4])
    assert history.verdict().proved
    assert history.verdict().samples == 4 * num
    assert KEPT < len(history.stretches) <= 2 * KEPT + 1
    assert len(msgspec.json.encode(saved[0])) < 40_000
    assert history.ids(1) == sample_ids(0, 4, size=SIZE, seed=1, shuffle=True)


def test_joined_stretches_of_several_batch_sizes():
    _, history = stints(3 * KEPT, sizes=[3, 4])
    assert history.verdict().proved
    with pytest.raises(ValueError, match="not known any more"):
        history.ids(1)


def test_joined_stretches_of_two_orders():
    _, history = stints(3 * KEPT, sizes=[4], seeds=(1, 2, 3, 4, 5, 6))
    assert history.verdict().proved
    assert len(history.stretches) > KEPT


def test_lots_of_ids():
    trail = Trail()
    feed = open_feed(
        Loader(range(10**9), global_batch=LOT // 2, seed=1, collate_fn=len),
        rank=0,
        world_size=1,
        trail=trail,
    )
    for _ in range(5):
        next(feed)
    verdict = History([read_record(trail.state())], 5).verdict()
    assert verdict.proved
    assert verdict.samples == 5 * LOT // 2


# --- streams -------------------------------------------------------------------------------------


def items(shard):
    return range(shard * 100, shard * 100 + 50)


class PlantedPortions(Portions):
    plant = None

    def __iter__(self):
        for number, portion in enumerate(super().__iter__()):
            yield from self.plant(number, portion)


class AlteredStream(Stream):
    def __init__(self, plant):
        super().__init__(items, num_shards=4, sizes=[50] * 4, global_batch=8, lanes=4, buffer=3)
        self.plant = plant

    def _portions(self):
        portions = super()._portions()
        portions.__class__ = type("Bug", (PlantedPortions,), {"plant": staticmethod(self.plant)})
        return portions


def repeat(number, portion):
    return [portion] * (2 if number == 3 else 1)


def lose(number, portion):
    return [portion] * (number != 3)


def swap(number, portion):
    samples, numbers, points = portion
    if number == 3:
        numbers = np.frombuffer(numbers, np.int64)[[1, 0, *range(2, len(numbers) // 8)]].tobytes()
    return [(samples, numbers, points)]


@pytest.mark.parametrize(("plant", "step"), [(repeat, 5), (lose, 4), (swap, 4)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_stream_with_a_bug(plant, step, world_size):
    job = crowd.Crowd(lambda: AlteredStream(plant), rows)
    job.stint(world_size, 10)
    faults = job.verdict().faults
    assert faults[0].step == step
    assert not job.verdict().proved
    if plant is swap:
        assert {(fault.what, fault.step, fault.last_step) for fault in faults} == {("swap", 4, 4)}


def test_a_hundred_changes_between_one_worker_and_four():
    rng = random.Random(8)
    builds = {
        "loader": lambda: Loader(range(SIZE), global_batch=8, seed=1),
        "stream": lambda: Stream(
            lambda shard: [items(shard)[:7]] * 9, num_shards=9, global_batch=8, pack=4, buffer=5
        ),
    }
    for build in builds.values():
        job = crowd.Crowd(build, rows)
        for _ in range(100):
            job.stint(rng.randrange(1, 5), rng.randrange(3), ahead=rng.randrange(2))
        assert job.steps == crowd.Crowd(build, rows).stint(1, len(job.steps)).steps
        assert job.verdict().proved


# --- what it stands on ---------------------------------------------------------------------------


@examples(100)
@given(size=st.integers(1, 2000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
def test_places_are_ids_backwards(size, seed, epoch):
    order = {"size": size, "seed": seed, "epoch": epoch}
    ids = permute(np.arange(size), **order)
    assert np.array_equal(places_of(ids, **order), np.arange(size))


@examples(100)
@given(
    size=st.integers(1, 200),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
    places=st.lists(st.integers(0, 2000), min_size=1, max_size=50),
)
def test_ids_in_any_order_of_places(size, seed, shuffle, places):
    order = {"size": size, "seed": seed, "shuffle": shuffle}
    one_by_one = [sample_ids(place, 1, **order)[0] for place in places]
    assert ids_at(np.array(places), **order).tolist() == one_by_one


@examples(50)
@given(lanes=st.integers(1, 6), per_lane=st.integers(1, 4), since=st.integers(0, 9))
def test_a_streams_numbers_are_each_step_once(lanes, per_lane, since):
    whole, first = lanes * per_lane, since * lanes
    order = {"kind": "stream", "lanes": lanes, "global_batch": whole, "since": first}
    for step in range(3):
        here = np.arange(first + step * whole, first + (step + 1) * whole)
        assert sorted(expected(order, here).tolist()) == here.tolist()


class Worker:
    """One of a job's, which lives through the loss of others, or takes a lost one's place."""

    def __init__(self, rank):
        self.rank, self.in_hand = rank, False
        self.trail = Trail()
        self.feed = self.opened(0)

    def opened(self, step):
        loader = Loader(range(SIZE), global_batch=BATCH, seed=5)
        return open_feed(loader, rank=self.rank, world_size=3, trail=self.trail, step=step)

    def step(self):
        if not self.in_hand:
            next(self.feed)
        self.in_hand = False

    def own(self):
        return {"position": self.feed.state(), TRAIL: self.trail.state()}

    def lives_through(self, how, saved, step):
        if how == "has a batch in hand" and not self.in_hand:
            next(self.feed)
            self.in_hand = True
        if how == "starts anew":
            data, self.trail = take_over(saved.__getitem__, 3, self.rank, 3)
            self.feed, self.in_hand = self.opened(step), False
            self.feed.restore(data["position"])
        else:
            self.feed.begin_again(step, in_hand=self.in_hand)


HOW = ("starts anew", "is at the boundary", "has a batch in hand")
losses = st.tuples(
    st.integers(1, STEPS - 1), st.lists(st.sampled_from(HOW), min_size=3, max_size=3)
)


@given(losses=st.lists(losses, max_size=6))
@examples(100)
def test_who_lives_through_a_loss_counts_as_who_takes_a_place(losses):
    workers = [Worker(rank) for rank in range(3)]
    for step in range(1, STEPS + 1):
        for worker in workers:
            worker.step()
        saved = [worker.own() for worker in workers]
        for _, each in (one for one in losses if one[0] == step):
            for worker, how in zip(workers, each, strict=True):
                worker.lives_through(how, saved, step)
            # A batch that is in hand belongs to a step that is not complete.
            saved = [saved[one.rank] if one.in_hand else one.own() for one in workers]
    verdict = History([read_record(worker.own()[TRAIL]) for worker in workers], STEPS).verdict()
    assert verdict.proved, verdict.faults
    for worker in workers:
        worker.feed.close()
