"""What a session tells about a run's bits."""

import pytest
import torch
import torch.distributed as dist

from outlast import SameBits
from outlast.reduce.same_bits import Bits
from outlast.script.objects import Objects


@pytest.fixture
def same(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    threads = torch.get_num_threads()
    yield SameBits(torch.nn.Linear(2, 1), shards=4)
    torch.set_num_threads(threads)


def test_the_wrapper_is_taken_off_and_known(same):
    objects = Objects({"model": same})
    assert list(objects.capture()["model"]) == ["weight", "bias"]
    assert objects.bits.any_size
    assert objects.bits.facts() == [same.facts]


def test_a_wrapper_that_was_not_named_is_found(same):
    assert Objects({"model": same.module}).bits.any_size
    assert not Objects({"model": torch.nn.Linear(2, 1)}).bits.any_size


def test_another_number_of_workers_is_no_news_with_it(same, capsys):
    bits = Bits([same])
    bits.tell_of_resume(bits.facts(), 0, 4, 3)
    assert capsys.readouterr().err == ""


def test_another_number_of_workers_is_told_without_it(capsys):
    Bits().tell_of_resume((), 0, 4, 3)
    assert "resumed with 3 in place of 4 workers" in capsys.readouterr().err
    Bits().tell_of_resume((), 1, 4, 3)
    assert capsys.readouterr().err == ""


def test_other_facts_are_told_once(same, capsys):
    saved = [{**same.facts, "shards": "8"}]
    Bits([same]).tell_of_resume(saved, 0, 4, 4)
    words = "the run's bits may differ from here on: other shards: 8 and 4 than before"
    assert words in capsys.readouterr().err
    Bits([same]).tell_of_resume(saved, 2, 4, 4)
    assert capsys.readouterr().err == ""


def test_a_checkpoint_without_facts_says_nothing(same, capsys):
    Bits([same]).tell_of_resume((), 0, 4, 4)
    assert capsys.readouterr().err == ""


DDP = torch.nn.parallel.DistributedDataParallel


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


UNUSED = {"find_unused_parameters": True}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "give it find_unused_parameters=True, or"),
        (UNUSED, ""),
        ({**UNUSED, "static_graph": True}, "find_unused_parameters=True and no static_graph, or"),
        ({"static_graph": True}, "find_unused_parameters=True and no static_graph, or"),
    ],
    ids=["as it comes", "unused", "unused and static", "static"],
)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true")  # and static_graph
@pytest.mark.parametrize("named", ["the wrapper", "the model", "one around it", "compiled"])
def test_ddp_that_lays_out_its_buckets_anew_is_told(group, capsys, options, remedy, named):
    ddp = DDP(torch.nn.Linear(2, 1), **options)
    given = {
        "the wrapper": ddp,
        "the model": ddp.module,
        "one around it": torch.nn.Sequential(ddp),
        "compiled": torch.compile(ddp),
    }[named]
    Objects({"model": given}).bits.tell_at_start(0, 3)
    told = capsys.readouterr().err
    assert remedy in told
    assert bool(told) is bool(remedy)


def test_ddp_is_nobodys_business_with_two_workers_or_around_another_model(group, capsys):
    class Mine(DDP):
        """A subclass counts too."""

    ddp = Mine(torch.nn.Linear(2, 1))
    Objects({"model": ddp.module}).bits.tell_at_start(0, 2)
    Objects({"model": torch.nn.Linear(2, 1)}).bits.tell_at_start(0, 3)
    Objects({"model": ddp.module}).bits.tell_at_start(1, 3)
    assert capsys.readouterr().err == ""
    Objects({"model": ddp.module}).bits.tell_at_start(0, 3)
    assert "DDP on 3 workers" in capsys.readouterr().err
