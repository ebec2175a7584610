"""Gradients in the making: what a boundary has besides parameters, taken there and put back."""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from outlast.script.gradients import KEY, WAIT_STEPS_MAX, ScriptGradients
from thorough import examples

STEPS = 24
CLEARS = ("after", "before", "before, in place", "model")


class Momentum:
    """An optimizer with no hooks; in place, or past the counters."""

    def __init__(self, parameters, data):
        self.parameters = list(parameters)
        self.data = data
        self.velocity = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self):
        for p, velocity in zip(self.parameters, self.velocity, strict=True):
            if p.grad is not None:
                velocity.mul_(0.9).add_(p.grad)
                (p.data if self.data else p).sub_(0.1 * velocity)

    def zero_grad(self, set_to_none=True):
        for p in self.parameters:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def state_dict(self):
        return {"velocity": self.velocity}

    def load_state_dict(self, state):
        self.velocity = copy.deepcopy(state["velocity"])


KINDS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.05),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "in place": lambda ps: Momentum(ps, data=False),
    "data": lambda ps: Momentum(ps, data=True),
}


class Loop:
    """Models with an optimizer each, which steps after so many batches, from an offset on."""

    def __init__(self, plans):
        torch.manual_seed(1)
        self.plans = plans
        self.models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)) for _ in plans]
        self.optimizers = [
            KINDS[plan["kind"]](model.parameters())
            for plan, model in zip(plans, self.models, strict=True)
        ]
        self.named = {f"m{n}": one for n, one in enumerate(self.models)}
        self.named |= {f"o{n}": one for n, one in enumerate(self.optimizers)}
        self.gradients = ScriptGradients(lambda: self.named)

    def body(self, step):
        batch = torch.full((2, 3), float(step)).sin()
        for plan, model, one in zip(self.plans, self.models, self.optimizers, strict=True):
            place = (step + plan["offset"]) % plan["every"]
            clear = one if plan["clears"] != "model" else model
            if plan["clears"].startswith("before") and place == 0:
                one.zero_grad(set_to_none="place" not in plan["clears"])
            if plan["delayed"] and place == 0:  # with what the batches before have given
                one.step()
                clear.zero_grad()
            model(batch).square().mean().backward()
            if not plan["delayed"] and place == plan["every"] - 1:
                one.step()
                if not plan["clears"].startswith("before"):
                    clear.zero_grad()

    def run(self, first, last):
        taken = []
        for step in range(first, last):
            self.gradients.handed_out()
            self.body(step)
            assert self.gradients.have_moved
            self.gradients.completed(step + 1)
            state = {name: one.state_dict() for name, one in self.named.items()}
            found = self.gradients.accumulated()
            held = [p for model in self.models for p in model.parameters()]
            quickly = self.gradients.accumulated(held)
            assert quickly.keys() == found.keys()
            assert self.gradients.are_unused or not found
            taken.append(copy.deepcopy((state, found)))
        return taken

    @property
    def weights(self):
        return [p.detach() for model in self.models for p in model.parameters()]


plans = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(list(KINDS)),
        "every": st.integers(1, 5),
        "offset": st.integers(0, 3),
        "clears": st.sampled_from(CLEARS),
        "delayed": st.booleans(),
    }
)


@given(plans=st.lists(plans, min_size=1, max_size=3), at=st.integers(1, STEPS - 1))
@examples(200)
def test_whoever_goes_on_from_a_boundary_ends_with_the_same_bits(plans, at):
    calm = Loop(plans)
    calm.gradients.open(0)
    taken = calm.run(0, STEPS)
    calm.gradients.close()
    state, found = taken[at - 1]
    again = Loop(plans)
    for name, one in again.named.items():
        one.load_state_dict(state[name])
    again.gradients.open(at)
    again.gradients.resumed({KEY: found}, 1, 1, 0)
    again.gradients.restore()
    again.run(at, STEPS)
    again.gradients.close()
    assert all(map(torch.equal, calm.weights, again.weights))


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("clears", CLEARS)
def test_gradients_that_are_used_are_not_kept(clears, every):
    plan = {"kind": "SGD", "every": every, "offset": 0, "clears": clears, "delayed": False}
    loop = Loop([plan])
    loop.gradients.open(0)
    kept = [bool(found) for _, found in loop.run(0, 12)]
    loop.gradients.close()
    assert kept == [bool((step + 1) % every) for step in range(12)]


def test_a_save_waits_for_the_boundary_behind_the_optimizers_step():
    plan = {"kind": "AdamW", "every": 4, "offset": 0, "clears": "after", "delayed": False}
    loop = Loop([plan])
    loop.gradients.open(0)
    assert loop.gradients.foreseen(1) == 1  # nothing is known yet
    loop.run(0, 8)
    assert [loop.gradients.foreseen(step) for step in range(9, 14)] == [12, 12, 12, 12, 16]
    (one,) = loop.gradients._seen.values()
    one.period = WAIT_STEPS_MAX * 2
    assert loop.gradients.foreseen(9) == 9
    loop.gradients.close()


def test_a_batch_that_was_only_looked_at_has_moved_nothing():
    for every in (1, 3):
        plan = {"kind": "AdamW", "every": every, "offset": 0, "clears": "after", "delayed": False}
        loop = Loop([plan])
        loop.gradients.open(0)
        for step in range(7):
            loop.gradients.handed_out()
            assert not loop.gradients.have_moved
            loop.body(step)
            assert loop.gradients.have_moved
            loop.gradients.completed(step + 1)
        loop.gradients.close()


def test_a_graph_that_was_replayed_may_have_moved_what_no_optimizer_speaks_of():
    model = nn.Linear(2, 1)
    gradients = ScriptGradients(lambda: {"model": model})
    gradients.open(0)
    for _ in range(2):
        gradients.handed_out()
        assert not gradients.have_moved
        gradients.replayed()
        assert gradients.have_moved
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # heard: the graphs are of something else
    gradients.handed_out()
    gradients.replayed()
    assert not gradients.have_moved
    gradients.close()


def test_gradients_of_other_numbers_of_workers_are_left_out_and_said(capsys):
    model = nn.Linear(2, 1)
    gradients = ScriptGradients(lambda: {"model": model})
    gradients.resumed({KEY: {"model/weight": torch.ones(1, 2)}}, 2, 3, 0)
    gradients.restore()
    assert model.weight.grad is None
    assert "of 2 workers; this attempt has 3: they are left out" in capsys.readouterr().err


@pytest.mark.parametrize("sums", ["gradient_sync", "all_reduce"])
def test_what_fsdp2_has_not_summed_yet(sums):
    from torch.distributed.fsdp import fully_shard

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        # With replica groups, of one worker each: what is summed within them is kept apart.
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
        for part in (*model, model):
            fully_shard(part, mesh=mesh if sums == "all_reduce" else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradients = ScriptGradients(lambda: {"model": model, "optimizer": optimizer})
        gradients.open(0)
        return model, optimizer, gradients

    def run(model, optimizer, gradients, first, last):
        for step in range(first, last):
            gradients.handed_out()
            getattr(model, f"set_requires_{sums}")((step + 1) % 4 == 0)
            assert not gradients.have_moved
            model(torch.full((2, 3), float(step)).sin()).square().mean().backward()
            if (step + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            assert gradients.have_moved
            gradients.completed(step + 1)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        calm = build()
        run(*calm, 0, 6)
        state = copy.deepcopy(calm[0].state_dict())
        found = copy.deepcopy(calm[2].accumulated(list(calm[0].parameters())))
        run(*calm, 6, 8)
        again = build()
        again[0].load_state_dict(state)
        again[2].resumed({KEY: found}, 1, 1, 0)
        again[2].restore()
        run(*again, 6, 8)
        for one, other in zip(calm[0].parameters(), again[0].parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())
        calm[2].close()
        again[2].close()
    finally:
        dist.destroy_process_group()
