"""A loop that a framework runs: its turns, and where it goes on.

The session is a stand-in that iterates the turns as ``steps()`` does: by the feed of a loader that
has a state of its own, of which a turn may be left out.
"""

import itertools
import types

import pytest
import torch

from outlast.data import Loader, open_feed
from outlast.errors import ConfigError
from outlast.training.driven import Driven

SIZE, BATCH = 20, 4  # five batches an epoch


class Counts:
    """A framework's own."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Sampler(torch.utils.data.RandomSampler):
    """Makes its generator where it is first iterated, as Accelerate's does."""

    epoch = 0

    def __iter__(self):
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch)
        yield from super().__iter__()

    def set_epoch(self, epoch):
        self.epoch = epoch


class Job:
    """A process of it; goes on from ``state``."""

    def __init__(self, state=None, left_out=()):
        self.step, self.left_out, self.state = 0, left_out, state
        self._on = types.SimpleNamespace(link=types.SimpleNamespace(rank=0, world_size=1))
        self.counts = Counts()
        data = torch.arange(SIZE)
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=Sampler(data))
        self.driven = Driven(self, loader, self.counts, per_turn=2)
        self.driven.begin()

    def steps(self, turns):
        self.feed = open_feed(turns, rank=0, world_size=1)
        if self.state is not None:
            self.feed.restore(self.state)
            self.step = self.state["step"]
        while True:
            if self.step + 1 in self.left_out:
                self.feed.pass_over(self.step)
                self.left_out = ()
            try:
                turn = next(self.feed)
            except StopIteration:
                return
            yield turn
            self.step += 1
            self.saved = {**self.feed.state(), "step": self.step}

    def turn(self):
        """Two batches' worth of samples; the step is complete behind it."""
        found = [self.driven.batch().tolist() for _ in range(2)]
        self.counts.value += 1
        self.driven.boundary()
        return found


def epoch_of(job, number, num=SIZE // BATCH):
    job.driven.enter_epoch(number)
    return [job.driven.batch().tolist() for _ in range(num)]


def is_whole(batches):
    """Whether each sample came once."""
    return sorted(itertools.chain(*batches)) == list(range(SIZE))


def test_each_epoch_has_all_of_its_batches_and_then_ends():
    job = Job()
    for number in range(3):
        assert is_whole(epoch_of(job, number))
        with pytest.raises(StopIteration):
            job.driven.batch()
        job.driven.boundary()


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("epoch", [0, 1])
def test_it_goes_on_in_the_midst_of_an_epoch(epoch, at):
    calm, cut = Job(), Job()
    for job in (calm, cut):
        for number in range(epoch):
            epoch_of(job, number)
            job.driven.boundary()
        job.driven.enter_epoch(epoch)
        for _ in range(at):
            job.turn()
    again = Job(cut.saved)
    assert again.driven.place == (epoch, 2 * at)
    assert again.counts.value == at
    assert again.step == epoch + at
    again.driven.enter_epoch(epoch)
    left = SIZE // BATCH - 2 * at
    wanted = [calm.driven.batch().tolist() for _ in range(left)]
    assert [again.driven.batch().tolist() for _ in range(left)] == wanted
    again.driven.boundary()
    calm.driven.boundary()
    assert epoch_of(again, epoch + 1) == epoch_of(calm, epoch + 1)


def test_at_an_epochs_end_it_goes_on_with_the_next():
    job = Job()
    epoch_of(job, 0)
    job.driven.boundary()
    again = Job(job.saved)
    assert again.driven.place == (1, 0)
    assert epoch_of(again, 1) == epoch_of(job, 1)


def test_a_framework_may_begin_in_a_later_epoch():
    calm, later = Job(), Job()
    epoch_of(calm, 0)
    assert epoch_of(later, 1) == epoch_of(calm, 1)
    assert epoch_of(later, 2) == epoch_of(calm, 2)


def test_what_is_left_of_an_epoch_that_is_left_does_not_come():
    job = Job()
    epoch_of(job, 0, num=2)
    job.driven.enter_epoch(1)  # before its first batch there is a boundary, as in a framework
    job.driven.boundary()
    again = Job(job.saved)
    assert again.driven.place == (1, 0)
    wanted = epoch_of(Job(), 0)
    assert is_whole(epoch_of(job, 1))
    found = epoch_of(again, 1)
    assert is_whole(found)
    assert found != wanted


def test_an_epoch_can_be_left_whose_loaders_processes_persist():
    loader = torch.utils.data.DataLoader(
        torch.arange(SIZE), batch_size=BATCH, num_workers=1, persistent_workers=True
    )
    feed = open_feed(loader, rank=0, world_size=1)
    first = next(feed).tolist()
    feed.leave_epoch()
    found = [next(feed).tolist() for _ in range(SIZE // BATCH)]
    feed.close()
    assert is_whole(found)
    assert found[0] == first
    assert feed.epoch == 1


def test_a_turn_that_a_rollback_leaves_out_is_so_many_batches():
    whole = epoch_of(Job(), 0)
    job = Job(left_out=(2,))
    job.driven.enter_epoch(0)
    job.turn()
    assert job.driven.batch().tolist() == whole[4]


def test_the_end_is_a_step_or_none():
    job = Job()
    job.driven.enter_epoch(0)
    job.driven.batch()
    job.driven.end(is_complete=True)
    assert job.step == 1
    assert job.driven.is_over
    other = Job()
    other.driven.end(is_complete=False)
    assert other.step == 0


def test_a_loader_of_the_whole_job_is_refused():
    job = Job()
    with pytest.raises(ConfigError, match="no epochs of a framework"):
        Driven(job, Loader(range(8), global_batch=2), Counts())
