"""Collectives of a script's own in a step: what they leave behind where a loss has them fail."""

import socket
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from outlast.attempt.over import over
from outlast.errors import NotInProcess
from outlast.inprocess import interrupted
from outlast.inprocess.interrupted import StepCollectives, _replaced
from outlast.reduce import losses

LOST = "Connection closed by peer"
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.fixture(name="own")
def _own(monkeypatch):
    """In a step, of a process whose group is real; ``own.break_waits()`` has every wait fail."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", rank=0, world_size=1)
    wait = dist.Work.wait
    is_broken = []

    def waits(work, *args):
        if is_broken:
            raise RuntimeError(LOST)
        return wait(work, *args)

    monkeypatch.setattr(dist.Work, "wait", waits)
    monkeypatch.setattr("outlast.attempt.over.ECHO_S", 0.01)
    own = StepCollectives()
    own.break_waits = lambda: is_broken.append(True)
    wait_tensor = functional.wait_tensor

    def waits_for(tensor):
        wait_tensor(tensor)
        if is_broken:
            raise RuntimeError(LOST)
        return tensor

    monkeypatch.setattr(functional, "wait_tensor", waits_for)
    undo = own.stand(_replaced)
    over.is_held = True
    losses.voiding.append(over.voids)
    own.begin()
    yield own
    for one in undo:
        one()
    losses.voiding.remove(over.voids)
    over.is_held = False
    over.begin_again()
    monkeypatch.setattr(dist.Work, "wait", wait)
    dist.barrier()  # as ever
    dist.destroy_process_group()


def lose(own):
    over.happen()
    own.break_waits()


def nothing(*shape):
    return torch.full(shape, torch.nan)


# (call, what it is given to fill, what that holds then)
PARTS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
FIRST = PARTS[0]
KINDS = {
    "all_gather": (lambda into: dist.all_gather([*into], FIRST), 3, FIRST.expand(3, 2)),
    "gather": (lambda into: dist.gather(FIRST, [*into]), 3, FIRST.expand(3, 2)),
    "all_gather_single": (lambda into: GATHER(into.view(-1), FIRST), 3, FIRST.expand(3, 2)),
    "scatter": (lambda into: dist.scatter(into[0], [*PARTS]), 1, PARTS[:1]),
    "reduce_scatter": (lambda into: dist.reduce_scatter(into[0], [*PARTS]), 1, PARTS[:1]),
    "reduce_scatter_single": (lambda into: SCATTER(into[0], PARTS.view(-1)), 1, PARTS[:1]),
    "all_to_all": (lambda into: dist.all_to_all([*into], [*PARTS]), 3, PARTS),
    "all_to_all_single": (lambda into: dist.all_to_all_single(into, PARTS), 3, PARTS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_apart_is_filled_with_what_this_rank_gives(own, kind):
    call, num, expected = KINDS[kind]
    lose(own)
    into = nothing(num, 2)
    call(into)
    assert torch.equal(into, expected)
    assert over.is_void


def test_who_gives_nothing_gets_zeros():
    into = [nothing(2)]
    interrupted._fill((into, []), 1)
    assert torch.equal(into[0], torch.zeros(2))


@pytest.mark.parametrize("call", [dist.all_reduce, partial(dist.broadcast, src=0), dist.reduce])
def test_what_is_changed_in_place_stays(own, call):
    given = {"dst": 0} if call is dist.reduce else {}
    over.happen()
    x = torch.arange(3.0)
    call(x, **given)
    assert torch.equal(x, torch.arange(3.0))
    assert over.is_void


def test_objects_count_as_what_the_script_sends(own):
    before = own.num_sent
    dist.all_gather_object([None], {"rank": 0})
    assert own.num_sent > before


def test_objects_of_all_are_this_ranks_own(own):
    lose(own)
    found, told, given, gathered = [None] * 3, [{"a": 1}], [None], [None] * 2
    dist.all_gather_object(found, {"rank": 0})
    dist.broadcast_object_list(told, 0)
    dist.scatter_object_list(given, ["first", "second"], 0)
    dist.gather_object("mine", gathered, 0)
    assert (found, told, given) == ([{"rank": 0}] * 3, [{"a": 1}], ["first"])
    assert gathered == ["mine"] * 2
    assert over.is_void


def test_one_that_is_waited_for_later_voids_its_step(own):
    into = nothing(1, 2)
    sent = dist.all_gather([*into], FIRST, async_op=True)
    waited = dist.all_reduce(torch.ones(1), async_op=True)
    waited.wait()
    lose(own)
    assert sent.wait()
    assert torch.equal(into[0], FIRST)
    assert over.is_void
    own.refuse_pending()  # all were waited for


def test_where_nobody_answers_nothing_is_sent(own, monkeypatch):
    over.happen()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert torch.equal(work.get_future().value()[0], torch.ones(2))
    assert own.num_sent == 0


def test_one_of_a_step_before_is_the_scripts_own_to_hear_of(own):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    own.end()
    own.begin()
    lose(own)
    with pytest.raises(NotInProcess, match="from one step to the next"):
        own.refuse_pending()
    with pytest.raises(RuntimeError, match=LOST):
        work.wait()
    assert not over.is_void


def test_one_that_nobody_holds_is_no_reason_to_start_anew(own):
    dist.all_reduce(torch.ones(1), async_op=True)
    own.refuse_pending()


def test_what_is_no_loss_is_raised(own):
    own.break_waits()
    with pytest.raises(RuntimeError, match=LOST):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="invalid tensor size"):
        dist.all_gather([torch.ones(2)], torch.ones(3))
    assert not over.is_void


def test_outside_of_a_steps_body_it_is_raised(own):
    own.end()
    lose(own)
    with pytest.raises(RuntimeError, match=LOST):
        dist.all_reduce(torch.ones(1))
    assert not over.is_void


def test_sums_of_ours_hear_of_it_themselves(own):
    lose(own)
    with losses.sent() as sums:
        dist.all_reduce(torch.ones(1))
        raise AssertionError("a sum without an end was taken for one")
    assert sums.is_void
    assert over.is_void


def test_what_was_given_to_be_written_is_known(own):
    one, other = torch.nn.Linear(2, 2, bias=False).weight, torch.ones(2)
    before = one._version
    dist.all_reduce(one.data[:1])
    assert one._version == before  # or nothing of it would be needed
    assert own.have_written([other, one])
    assert not own.have_written([other])
    own.begin()
    assert not own.have_written([one])


def test_what_a_backward_pass_sends_is_no_collective_of_its_own(own):
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: dist.all_reduce(gradient.clone()))
    x.sum().backward()
    assert own.num_sent == 0
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert own.num_sent == 2


def test_on_a_gpu_one_may_have_ended_without_a_word(own, monkeypatch):
    class Stream:
        def synchronize(self):
            over.happen()

    monkeypatch.setattr("outlast.checkpoint.devices.used", lambda: ["cuda:0"])
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: Stream())
    own.end()
    assert not over.is_over  # nothing was sent
    own.begin()
    dist.all_reduce(torch.ones(1))
    own.end()
    assert over.is_void


def test_without_it_torch_is_torchs_own():
    def seen():
        names = (*interrupted.IN_PLACE, *interrupted.APART)
        methods = [vars(dist.ProcessGroup).get(name) for name in names]
        objects = [getattr(place, name) for name in interrupted.OF_OBJECTS for place in PLACES]
        return [*methods, *objects, dist.Work.wait]

    before = seen()
    undo = StepCollectives().stand(_replaced)
    assert seen() != before
    for one in undo:
        one()
    assert seen() == before


PLACES = (dist, dist.distributed_c10d)


# --- of divided tensors ---------------------------------------------------------------------------


def test_those_of_divided_tensors_end_too(own):
    functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).add(1)
    assert not over.is_void
    pending = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    over.happen()
    own.break_waits()
    assert torch.isfinite(pending + 1).all()
    assert over.is_void
    x = torch.arange(4.0)
    assert functional.all_reduce(x, "sum", dist.group.WORLD).tolist() == x.tolist()
    for name, dim in (("all_gather_tensor", (0,)), ("reduce_scatter_tensor", ("sum", 0))):
        found = getattr(functional, name)(x, *dim, dist.group.WORLD)
        assert found.tolist() == x.tolist()


def test_a_vote_that_is_lost_does_not_make_the_step_void(own):
    own.vote()
    assert own.has_voted
    before = own.num_sent
    assert before == 1
    lose(own)
    own.begin()
    with pytest.raises(RuntimeError):
        own.vote()
    assert not over.is_void
