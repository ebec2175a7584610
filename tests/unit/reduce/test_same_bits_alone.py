"""One worker: what a step is made of, and every misuse in one clear line."""

import copy
import random

import numpy as np
import pytest
import torch
from small_shards import batch, net, step
from unit_fakes import bits

from outlast import SameBits
from outlast.data import Shards
from outlast.errors import ConfigError


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_the_gradient_is_the_mean_over_the_shards():
    model = SameBits(net(), shards=4)
    losses = step(model, batch())
    plain = net()
    torch.stack([plain(x).square().mean() for x in batch().parts]).mean().backward()
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(model.loss, torch.stack(losses).double().mean())


def test_the_loss_is_its_own_though_the_script_adds_to_the_first_one():
    model = SameBits(net(), shards=4)
    total, losses = None, []
    for x in model.shards(batch()):
        loss = model(x).square().mean()
        model.backward(loss)
        losses.append(loss.item())
        if total is None:
            total = loss.detach()
        else:
            total += loss.detach()
    torch.testing.assert_close(model.loss.item(), sum(losses) / 4)


def test_a_step_leaves_nothing_to_the_next_and_asks_for_no_zero_grad():
    model = SameBits(net(), shards=4)
    step(model, batch())
    first = gradients(model)
    step(model, batch())
    assert list(map(bits, gradients(model))) == list(map(bits, first))


def test_random_numbers_belong_to_position_and_shard():
    model = SameBits(net(), shards=2)
    drawn = {}
    for position in (0, 8, 0):
        for index, x in enumerate(model.shards(batch(2, position))):
            numbers = float(torch.rand(())), random.random(), float(np.random.rand())
            assert drawn.setdefault((position, index), numbers) == numbers
            model.backward(model(x).mean())
    assert len(set(drawn.values())) == 4
    assert len({numbers[0] for numbers in drawn.values()}) == 4


def test_another_seed_draws_other_numbers():
    drawn = set()
    for seed in (0, 1):
        model = SameBits(net(), shards=1, seed=seed)
        for x in model.shards(batch(1)):
            drawn.add(float(torch.rand(())))
            model.backward(model(x).mean())
    assert len(drawn) == 2


def test_the_scripts_own_random_numbers_go_on_as_if_nothing_had_been():
    model = SameBits(net(torch.nn.Dropout(0.5)), shards=4)
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    expected = float(torch.rand(())), random.random(), float(np.random.rand())
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    step(model, batch())
    assert (float(torch.rand(())), random.random(), float(np.random.rand())) == expected


class Two(torch.nn.Module):
    """``used`` is reached by each shard, ``rare`` by those with a positive start, ``never``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.rare, self.never = (torch.nn.Linear(3, 1) for _ in range(3))

    def forward(self, x):
        found = self.used(x)
        return found + self.rare(x) if x[0, 0] > 0 else found


def test_a_parameter_that_some_shards_reach_has_zeros_from_the_others():
    model = SameBits(Two(), shards=8)
    step(model, batch(8))
    positive = [bool(x[0, 0] > 0) for x in batch(8).parts]
    assert 0 < sum(positive) < 8
    plain = Two()
    torch.stack([plain(x).square().mean() for x in batch(8).parts]).mean().backward()
    torch.testing.assert_close(model.module.rare.weight.grad, plain.rare.weight.grad)
    assert model.module.never.weight.grad is None


def test_a_parameter_that_thaws_is_taken_in_and_one_that_freezes_let_go():
    model = SameBits(net(), shards=4)
    first = model.module[0].weight
    first.requires_grad_(False)
    step(model, batch())
    assert first.grad is None
    first.requires_grad_(True)
    step(model, batch())
    assert first.grad is not None


def test_a_loss_scaler_scales_the_gradients_and_not_the_loss():
    plain, scaled = SameBits(net(), shards=4), SameBits(net(), shards=4)
    step(plain, batch())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x in scaled.shards(batch()):
        scaled.backward(scaled(x).square().mean(), scaler)
    assert bits(scaled.loss) == bits(plain.loss)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
    for ours, theirs in zip(gradients(scaled), gradients(plain), strict=True):
        assert bits(ours) == bits(theirs * 1024)
    scaler.unscale_(optimizer)
    assert list(map(bits, gradients(scaled))) == list(map(bits, gradients(plain)))


# --- misuse --------------------------------------------------------------------------------------


def test_a_plain_backward_is_refused():
    model = SameBits(net(), shards=4)
    with pytest.raises(ConfigError, match=r"1.bias got a gradient outside of model.backward"):
        model(torch.randn(2, 3)).mean().backward()
    for x in model.shards(batch()):
        with pytest.raises(ConfigError, match=r"outside of model\.backward"):
            model(x).mean().backward()
        break


def test_a_shard_without_backward_is_refused():
    model = SameBits(net(), shards=4)
    with pytest.raises(ConfigError, match=r"shard 0 of 4 had no model.backward"):
        for _ in model.shards(batch()):
            pass


def test_two_backward_calls_for_a_shard_are_refused():
    model = SameBits(net(), shards=4)
    for x in model.shards(batch()):
        model.backward(model(x).mean())
        with pytest.raises(ConfigError, match="twice for one shard"):
            model.backward(model(x).mean())
        break


def test_a_loop_that_was_left_early_is_refused_at_the_next_and_by_the_optimizer():
    model = SameBits(net(), shards=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    for x in model.shards(batch()):
        model.backward(model(x).mean())
        break
    with pytest.raises(ConfigError, match="the optimizer's step was called before the loop"):
        optimizer.step()
    other.step()
    with pytest.raises(ConfigError, match="left before its end"):
        model.shards(batch())


def test_backward_outside_of_the_loop_is_refused():
    model = SameBits(net(), shards=4)
    with pytest.raises(ConfigError, match="is for the shards of a batch"):
        model.backward(torch.ones((), requires_grad=True))


@pytest.mark.parametrize("loss", [torch.ones(2), 1.0], ids=["two elements", "no tensor"])
def test_a_loss_that_is_none_is_refused(loss):
    model = SameBits(net(), shards=4)
    for _ in model.shards(batch()):
        with pytest.raises(ConfigError, match="a loss is a tensor of one element"):
            model.backward(loss)
        break


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.randn(8, 3), r"takes what outlast.data.Loader\(…, shards=4\)"),
        (batch(8), "cut into 8 shards and the model was wrapped for 4"),
        (Shards([1, 2], of=4, first=1, position=0), r"holds the shards \[0, 1, 2, 3\]"),
    ],
    ids=["a tensor", "other shards", "not ours"],
)
def test_a_batch_that_does_not_fit_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        SameBits(net(), shards=4).shards(given)


def test_other_threads_than_agreed_are_refused():
    model = SameBits(net(), shards=4, threads=1)
    torch.set_num_threads(2)
    with pytest.raises(ConfigError, match="torch now computes with 2 threads"):
        model.shards(batch())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: SameBits(SameBits(net(), shards=2), shards=2), "takes the place of SameBits"),
        (lambda: SameBits(net(torch.nn.SyncBatchNorm(4)), shards=2), "1 is a SyncBatchNorm"),
        (lambda: SameBits(torch.nn.LazyLinear(2), shards=2), "weight has no shape yet"),
        (lambda: SameBits(torch.nn.ReLU(), shards=2), "no parameter that requires a gradient"),
        (lambda: SameBits(net(), shards=0), "shards must be a whole number from 1 on, not 0"),
        (lambda: SameBits(net(), shards=2, seed=-1), "seed must be a whole number"),
        (lambda: SameBits(net(), shards=2, threads=True), "threads must be a whole number"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(build, words):
    with pytest.raises(ConfigError, match=words):
        build()


def test_several_workers_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"init_process_group\(\) before outlast.SameBits"):
        SameBits(net(), shards=4)


def test_a_sparse_gradient_is_refused():
    model = SameBits(torch.nn.EmbeddingBag(5, 3, sparse=True), shards=1)
    for x in model.shards(Shards([torch.zeros(2, 2).long()], of=1, first=0, position=0)):
        with pytest.raises(ConfigError, match="weight has a sparse gradient"):
            model.backward(model(x).mean())
        break


def test_a_gradient_that_comes_twice_is_refused():
    layer = torch.nn.Linear(3, 3)

    def forward(x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return x

    model = SameBits(layer, shards=1)
    for x in model.shards(batch(1)):
        with pytest.raises(ConfigError, match="twice in one backward pass"):
            model.backward(forward(x.requires_grad_()).mean())
        break


def test_shards_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="3 shards from number 2 on"):
        Shards([1, 2, 3], of=4, first=2, position=0)


def test_the_wrapper_goes_when_nobody_holds_it():
    import gc
    import weakref

    model = SameBits(net(), shards=2)
    step(model, batch(2))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Pair(torch.nn.Module):
    """Two parameters whose gradients are views of one memory."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(1, 3))
        self.b = torch.nn.Parameter(torch.ones(1, 3))

    def forward(self, x):
        return (self.a.squeeze(0) + self.b.squeeze(0)) * x


def test_gradients_that_share_memory_are_each_counted_once():
    parts = [torch.full((3,), float(number)) for number in range(4)]
    model = SameBits(Pair(), shards=4)
    for x in model.shards(Shards(parts, of=4, first=0, position=0)):
        model.backward(model(x).square().sum())
    plain = Pair()
    torch.stack([plain(x).square().sum() for x in parts]).mean().backward()
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_that_is_frozen_keeps_no_gradient_of_before():
    model = SameBits(net(), shards=4)
    step(model, batch())
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    step(model, batch(position=1))
    assert frozen.grad is None


def test_parameters_that_come_after_the_wrapping_are_refused():
    model = SameBits(net(), shards=4)
    step(model, batch())
    model.module.append(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="other parameters since it was wrapped"):
        step(model, batch(position=1))


def trained(model, positions):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for position in positions:
        step(model, batch(position=position))
        optimizer.step()
    return [bits(tensor) for tensor in model.state_dict().values()]


def test_a_copy_trains_as_the_model_does_and_for_itself():
    model = SameBits(net(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2)), shards=4, seed=5)
    trained(model, [0])
    found = copy.deepcopy(model)
    expected = trained(model, [1, 2])
    assert trained(found, [1, 2]) == expected
    assert trained(model, [3]) != expected
    assert [bits(tensor) for tensor in found.state_dict().values()] == expected


def test_an_average_of_a_model_may_be_made_in_the_middle_of_a_step():
    model = SameBits(net(), shards=4)
    for x in model.shards(batch()):
        averaged = torch.optim.swa_utils.AveragedModel(model)
        model.backward(model(x).square().mean())
    assert averaged.module.loss is None
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_a_frozen_average_may_be_copied_and_is_refused_where_it_is_trained():
    frozen = copy.deepcopy(SameBits(net(), shards=4)).requires_grad_(False)
    again = copy.deepcopy(frozen)
    assert bits(again(torch.ones(1, 3))) == bits(frozen(torch.ones(1, 3)))
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        again.shards(batch())
    again.requires_grad_(True)
    assert trained(again, [0, 1]) == trained(SameBits(net(), shards=4), [0, 1])


def test_a_copy_shares_the_process_group():
    class Group:
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle a process group")

    model = SameBits(net(), shards=4, process_group=Group())
    assert copy.deepcopy(model)._group is model._group


# --- gradients that somebody else has touched ----------------------------------------------------


class Seen(torch.nn.Module):
    """A convolution, whose memory format may change, and a layer behind it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(12, 1)

    def forward(self, x):
        return self.last(self.first(x).flatten(1)).square().mean()


def pictures(position):
    generator = torch.Generator().manual_seed(position)
    parts = [torch.randn(2, 2, 4, 4, generator=generator) for _ in range(4)]
    return Shards(parts, of=4, first=0, position=position)


def point_elsewhere(module):
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data * 1.0


@pytest.mark.parametrize(
    "touch",
    [
        point_elsewhere,
        lambda module: module.double().float(),
        lambda module: module.to(memory_format=torch.channels_last),
    ],
    ids=["data", "cast and back", "channels last"],
)
def test_gradients_are_those_of_the_step_whatever_was_done_to_the_last_ones(touch):
    """Once a gradient's memory was another one, each later step got that one's values."""
    model = SameBits(Seen(), shards=4)
    for position in range(3):
        for x in model.shards(pictures(position)):
            model.backward(model(x))
        plain = Seen()
        torch.stack([plain(x) for x in pictures(position).parts]).mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, check_stride=False)
            assert ours.grad.stride() == ours.stride()
        if position == 0:
            touch(model.module)


def test_workers_whose_parameters_are_laid_out_differently_are_refused():
    class Told:
        def __init__(self, *words):
            self.layouts = lambda: list(words)

    model = SameBits(Seen(), shards=4)
    with pytest.raises(ConfigError, match="rank 0 and of rank 1 differ in what is trained"):
        model._compare_layouts(Told(1.0, 2.0))
    for x in model.shards(pictures(0)):
        model.backward(model(x))
    model._compare_layouts(Told(1.0, 2.0))  # compared already: nobody looks any more
    word = model._layout_word
    model.module.first.to(memory_format=torch.channels_last)
    model.shards(pictures(1))
    assert model._layout_word != word
    with pytest.raises(ConfigError, match="in the same way on all workers"):
        model._compare_layouts(Told(1.0, 2.0))
