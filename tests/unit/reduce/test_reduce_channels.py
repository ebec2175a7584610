"""Messages of models whose loops are open at once have tags of their own."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from outlast import SameBits
from outlast.data import Shards
from outlast.reduce.exchange import GroupChannel


@pytest.fixture(autouse=True)
def group():
    """A process group of one worker, which sends nothing."""
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(threads)


def tags(channel):
    channel.open()
    return channel.first_tag


def test_each_model_has_its_own_and_keeps_it():
    one, other = GroupChannel(None), GroupChannel(None)
    first, second = tags(one), tags(other)
    assert abs(first - second) >= 1 << 20
    assert (tags(one), tags(other)) == (first, second)


def test_the_group_by_name_and_by_default_is_one_group(group):
    assert tags(GroupChannel(None)) != tags(GroupChannel(group))


def test_another_group_counts_anew(group):
    """A worker that is new there has opened none before."""
    one, other = GroupChannel(None), GroupChannel(None)
    found = tags(one), tags(other)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not group
    assert (tags(one), tags(other)) == found
    assert tags(GroupChannel(dist.new_group([0]))) == found[0]


def test_tags_fit_into_gloos_numbers():
    assert max(tags(GroupChannel(None)) for _ in range(1000)) + (1 << 22) < 2**31


def test_a_copy_takes_none_until_it_is_trained():
    """One worker alone may copy; the others count on."""
    one, other = (SameBits(torch.nn.Linear(2, 1), shards=1) for _ in range(2))
    averaged = copy.deepcopy(one)
    found = []
    for model in (one, other, averaged):
        for x in model.shards(Shards([torch.ones(3, 2)], of=1, first=0, position=0)):
            model.backward(model(x).mean())
        found.append(model._channel.first_tag)
    assert found == sorted(set(found))


def test_a_model_may_be_pickled_whole():
    model = SameBits(torch.nn.Linear(2, 1), shards=1)
    for x in model.shards(Shards([torch.ones(3, 2)], of=1, first=0, position=0)):
        model.backward(model(x).mean())
    found = pickle.loads(pickle.dumps(model))
    assert torch.equal(found.module.weight, model.module.weight)
