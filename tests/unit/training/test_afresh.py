"""What was restored is given again where it has changed, and only there."""

import pytest
import torch

from outlast.attempt.link import LocalLink
from outlast.checkpoint.tree import flatten
from outlast.script.objects import Objects
from outlast.training.afresh import SMALL_BYTES, Afresh, held

LARGE = SMALL_BYTES // 4 + 64  # elements of float32


class Plain:
    def __init__(self):
        self.count = 3

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Given:
    """A session's objects after a resume, and what they are given again."""

    def __init__(self, *, is_whole=True):
        self.model = torch.nn.Embedding(LARGE, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.plain = Plain()
        self.step()
        named = {"model": self.model, "optimizer": self.optimizer, "plain": self.plain}
        objects = Objects(named)
        source = {key: clone(value) for key, value in objects.capture().items()}
        objects.put(source)
        self.again = []
        give = held(objects, source)
        self.afresh = Afresh(objects, LocalLink())
        self.afresh.restored(
            lambda keys: (self.again.extend(keys), give(keys)), 7, is_whole=is_whole
        )
        self.before = clone(objects.capture())
        self.objects = objects

    def step(self):
        self.model(torch.tensor([1, 5])).square().sum().backward()
        self.optimizer.step()

    def is_as_before(self):
        (now, tensors), (then, others) = (
            flatten(state, "all") for state in (self.objects.capture(), self.before)
        )
        same = tensors.keys() == others.keys()
        return same and now == then and all(torch.equal(tensors[k], others[k]) for k in tensors)


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, clone(one)) for key, one in value.items())
    return [clone(one) for one in value] if isinstance(value, list) else value


def one_weight(given):
    given.model.weight.data[LARGE // 2 + 1] = 9.0


def moments(given):
    given.optimizer.state[given.model.weight]["momentum_buffer"].data.mul_(0.0)


def no_moments(given):
    given.optimizer.state.clear()


@pytest.mark.parametrize("change", [one_weight, moments, no_moments])
def test_tensors_are_read_again_of_what_has_changed(change, capsys):
    given = Given()
    change(given)
    assert given.afresh.is_changed()
    given.afresh.put_back()
    key = "model" if change is one_weight else "optimizer"
    assert given.again == [key]
    assert given.is_as_before()
    assert f"put back to step 7 ({key})" in capsys.readouterr().err
    assert not given.afresh.is_changed()


def test_of_plain_data_no_tensor_is_read(capsys):
    given = Given()
    given.optimizer.param_groups[0]["lr"], given.plain.count = 0.1, 4
    given.afresh.put_back()
    assert given.again == []
    assert given.is_as_before()
    assert given.plain.count == 3
    assert "(optimizer, plain)" in capsys.readouterr().err


@pytest.mark.parametrize("is_whole", [True, False])
def test_where_nothing_has_changed_nothing_is_said(is_whole, capsys):
    given = Given(is_whole=is_whole)
    with torch.no_grad():
        given.model.weight.mul_(1.0)  # written to, and the same
    given.afresh.put_back()
    assert given.is_as_before()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("way", ["counter", "data"])
def test_in_front_of_the_first_loop_a_sample_is_looked_at(way):
    given = Given(is_whole=False)
    if way == "counter":
        with torch.no_grad():
            given.model.weight[LARGE // 2 + 1] = 9.0
    else:
        given.model.weight.data.mul_(0.5)
    given.afresh.put_back()
    assert given.again == ["model"]
    assert given.is_as_before()


def test_once_released_changes_are_the_scripts_own():
    given = Given()
    given.afresh.release()
    one_weight(given)
    given.afresh.put_back()
    assert given.again == []
    assert given.afresh.is_changed()
