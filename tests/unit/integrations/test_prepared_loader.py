"""A loader that Accelerate has prepared: its batches, and the place that it goes on from.

It is iterated as a session does, by the feed of a loader with a state. What it is compared with is
Accelerate's own iteration, over epochs, with random numbers drawn by the collator and by the loop.
"""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

from outlast.data import open_feed, random_state
from outlast.errors import ConfigError
from outlast.integrations.accelerate import _AcceleratorCounts, _prepared, session_of

SIZE, BATCH, EPOCHS = 22, 4, 3
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")  # of torchdata's


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(SIZE))


def noisy(rows):
    return torch.tensor(rows) + torch.rand(len(rows))


def made(data=range(SIZE), seed=3, **given):
    """A prepared loader, as a script makes it in each run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(seed)
    config = DataLoaderConfiguration(**{"dispatch_batches": False} | given)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    shuffle = True if isinstance(data, range) else None
    loader = accelerator.prepare(DataLoader(data, BATCH, shuffle=shuffle, collate_fn=noisy))
    return accelerator, loader


def seen(accelerator, batch):
    """What a loop's body knows of a batch; it draws."""
    state = accelerator.gradient_state
    return batch.tolist(), state.end_of_dataloader, state.remainder, torch.rand(1).item()


def own_run(**given):
    accelerator, loader = made(**given)
    return [seen(accelerator, batch) for _ in range(EPOCHS) for batch in loader]


class Loops:
    """The loops of a session, one an epoch; stops behind ``num`` batches."""

    def __init__(self, state=None, *, again=False, **given):
        self.accelerator, self.loader = made(**given)
        self.first = 0
        self.feed = None
        if state is not None:
            self.first, position, counts, random = state
            _AcceleratorCounts(self.accelerator).load_state_dict(counts)
            self.feed = self._open()
            (self.feed.again if again else self.feed.restore)(position)
            random_state.restore(random)

    def _open(self):
        feed = open_feed(_prepared(self.loader, self.accelerator), rank=0, world_size=1)
        feed.max_epochs = feed.epoch + 1
        return feed

    def run(self, num=None, *, to_its_end=False):
        """With ``to_its_end`` the epoch that batch ``num`` ends has ended when it stops."""
        found = []
        for epoch in range(self.first, EPOCHS):
            self.feed = self.feed or self._open()
            for batch in self.feed:
                found.append(seen(self.accelerator, batch))
                if len(found) == num and not to_its_end:
                    self._stop(epoch)
                    return found
            if len(found) == num:
                self._stop(epoch)
                return found
            self.feed.close()
            self.feed = None
        return found

    def _stop(self, epoch):
        random = random_state.capture()
        counts = _AcceleratorCounts(self.accelerator).state_dict()
        self.state = epoch, self.feed.state(), counts, random


KINDS = {
    "plain": {},
    "seedable": {"use_seedable_sampler": True},
    "stateful": {"use_seedable_sampler": True, "use_stateful_dataloader": True},
    "stream": {"data": Stream()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_undisturbed_it_is_accelerates_own(kind):
    assert Loops(**KINDS[kind]).run() == own_run(**KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [1, 4, 5, 6, 7, 12, 17])
def test_from_each_place_it_goes_on_as_it_would_have(kind, num):
    wanted = own_run(**KINDS[kind])
    first = Loops(**KINDS[kind])
    assert first.run(num) == wanted[:num]
    assert Loops(first.state, seed=9, **KINDS[kind]).run() == wanted[num:]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_had_ended_is_counted_once(kind):
    num = 12  # of the second epoch's last batch
    wanted = own_run(**KINDS[kind])
    first = Loops(**KINDS[kind])
    assert first.run(num, to_its_end=True) == wanted[:num]
    counted = first.loader.iteration
    resumed = Loops(first.state, seed=9, **KINDS[kind])
    assert resumed.loader.iteration == counted == 2
    assert resumed.run() == wanted[num:]
    assert resumed.loader.iteration == EPOCHS


@pytest.mark.parametrize("kind", ["plain", "seedable"])
def test_behind_an_epochs_end_its_last_batch_is_there_once_more(kind):
    """For the code behind the loop, which reads what its body sets."""
    num = 12
    wanted = own_run(**KINDS[kind])
    first = Loops(**KINDS[kind])
    first.run(num, to_its_end=True)
    resumed = Loops(first.state, seed=9, again=True, **KINDS[kind])
    (newest,) = resumed.feed.newest
    samples = [int(one) for one in wanted[num - 1][0]]  # the rest is drawn as they are collated
    assert newest.int().tolist() == samples
    assert resumed.run() == wanted[num:]


def test_in_the_midst_of_an_epoch_there_is_no_last_batch():
    first = Loops()
    first.run(3)
    assert Loops(first.state, again=True).feed.newest == []


def test_a_loader_is_adapted_once():
    accelerator, loader = made()
    assert _prepared(loader, accelerator) is _prepared(loader, accelerator)
    inner = loader.base_dataloader
    assert _prepared(inner, accelerator) is inner


def test_an_order_that_is_drawn_and_not_kept_is_refused():
    accelerator, loader = made(use_stateful_dataloader=True)
    with pytest.raises(ConfigError, match="leave use_stateful_dataloader out"):
        _prepared(loader, accelerator)


def test_without_a_prepared_model_there_is_no_session():
    accelerator, _ = made()
    with pytest.raises(ConfigError, match=r"behind accelerator\.prepare"):
        session_of(accelerator)
