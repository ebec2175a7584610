"""What a session tells about a run's bits."""

import pytest
import torch

from outlast import SameBits
from outlast.training.bits import Bits
from outlast.training.objects import Objects


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
    assert not Objects({"model": same.module}).bits.any_size


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
