"""Which epoch a run begins with, from what a run before had come to."""

import json

import pytest

from outlast.errors import ConfigError
from outlast.script.callsite import KEY, Epochs


def again(epochs):
    """The epochs of the next run, through a checkpoint."""
    return Epochs({KEY: json.loads(json.dumps(epochs.state()))})


def go(epochs, num, *, until=None, loop=0, saved_loop=0, loops=1, leave=False):
    """A call of epochs(num) with so many loops in each; the epochs gone through, and the loop.

    It is cut off in the epoch ``until``, or left there by break.
    """
    first, loop = epochs.begin(num, loop, saved_loop)
    gone = []
    for epoch in range(first, num):
        epochs.enter(epoch, loop)
        gone.append(epoch)
        loop += loops
        if epoch == until:
            if leave:
                epochs.end(num, loop, is_left=True)
            return gone, loop
    epochs.end(max(first, num), loop, is_left=False)
    return gone, loop


@pytest.mark.parametrize("loops", [0, 1, 3])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_run_begins_with_the_epoch_that_was_under_way(loops, epoch):
    epochs = Epochs()
    _, loop = go(epochs, 3, until=epoch, loops=loops, loop=5)
    for _ in range(2):
        epochs = again(epochs)
        first, before = epochs.begin(3, 5, loop)
        assert (first, before) == (epoch, loop - loops)
        assert epochs.is_known
        epochs.enter(first, before)


def test_calls_follow_each_other():
    epochs = Epochs()
    _, loop = go(epochs, 2)
    _, loop = go(epochs, 3, loop=loop, until=1)
    assert loop == 4
    epochs = again(epochs)
    gone, at = go(epochs, 2, saved_loop=loop)
    assert (gone, at) == ([], 2)
    gone, at = go(epochs, 3, loop=at, saved_loop=loop)
    assert (gone, at) == ([1, 2], 5)
    epochs = again(epochs)
    for num, end in ((2, 2), (3, 5)):
        assert go(epochs, num, saved_loop=5) == ([], end)
    assert go(epochs, 2, loop=5, saved_loop=5) == ([0, 1], 7)  # one that the script did not have


@pytest.mark.parametrize("leave", [True, False])
def test_the_newest_call_goes_on(leave):
    epochs = Epochs()
    _, loop = go(epochs, 4 if leave else 2, until=1 if leave else None, leave=leave)
    first, before = again(epochs).begin(4, 0, loop)
    assert (first, before) == ((1, 1) if leave else (2, 2))
    # Unless a loop has followed it, or another call.
    assert go(again(epochs), 4, saved_loop=loop + 1) == ([], loop)
    _, loop = go(epochs, 1, loop=loop)
    assert go(again(epochs), 4, saved_loop=loop)[0] == []


def test_fewer_epochs_than_were_gone_through():
    epochs = Epochs()
    _, loop = go(epochs, 5, until=3)
    assert go(again(epochs), 2, saved_loop=loop)[0] == []


def test_a_checkpoint_of_a_script_without_epochs():
    for saved in (None, {}, {KEY: None}):
        epochs = Epochs(saved)
        assert epochs.begin(3, 4, 6) == (0, 4)
        assert not epochs.is_known


def test_one_at_a_time():
    epochs = Epochs()
    epochs.begin(3, 0, 0)
    with pytest.raises(ConfigError, match="while another one is under way"):
        epochs.begin(3, 0, 0)
