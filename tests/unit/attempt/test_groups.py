"""Which connections are shut down, and which are left alone."""

import contextlib
import os
import socket
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist

from outlast.attempt import groups
from outlast.attempt.groups import Groups, _GroupArguments, lacking
from outlast.attempt.link import STORE_VARIABLE, kept_key, open_store
from outlast.attempt.over import over

OPENED = []


def connect(listener):
    """(ours, theirs): both ends of a new connection."""
    ours = socket.create_connection(listener.getsockname())
    OPENED.extend((ours, listener.accept()[0]))
    return OPENED[-2:]


def is_open(sock):
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.fixture(name="world")
def _world(monkeypatch):
    """Groups that are being watched; ``make(opens)`` makes one."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        store = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        monkeypatch.setenv(STORE_VARIABLE, f"127.0.0.1:{store.getsockname()[1]}")
        monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", lambda call: call())
        groups = Groups()
        groups.watch()
        stack.callback(groups.unwatch)

        def make(opens):
            return dist.distributed_c10d._new_process_group_helper(opens)

        yield groups, make, listener, store
        while OPENED:
            OPENED.pop().close()


def test_only_what_was_opened_for_a_group_is_shut_down(world):
    groups, make, listener, _ = world
    before = connect(listener)
    of_group = make(lambda: connect(listener))
    after = connect(listener)
    groups.break_all(again=False)
    assert [is_open(pair[0]) for pair in (before, of_group, after)] == [True, False, True]
    assert is_open(after[1])
    assert listener.fileno() >= 0


def test_nccl_is_told_where_a_group_is_made(world, monkeypatch):
    """An agent's environment says otherwise, in each attempt."""
    _, make, _, _ = world
    for _ in range(2):
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        assert make(lambda: os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == "0"


def test_a_number_that_is_another_connections_by_now_is_left_alone(world):
    groups, make, listener, _ = world
    of_group = make(lambda: connect(listener))
    number = of_group[0].detach()
    other = connect(listener)
    os.dup2(other[0].fileno(), number)  # closes the group's
    groups.break_all(again=False)
    assert is_open(other[0])
    os.close(number)


def test_the_attempts_store_is_left_alone_at_first(world):
    groups, make, _, store = world
    to_store = make(lambda: socket.create_connection(store.getsockname()))
    OPENED.extend((to_store, store.accept()[0]))
    groups.break_all(again=False)
    assert is_open(to_store)
    groups.break_all(again=True)
    assert not is_open(to_store)


def test_a_group_that_is_being_made_is_broken_too(world):
    groups, make, listener, _ = world
    opened, broken = threading.Event(), threading.Event()
    pairs = []

    def slowly():
        pairs.append(connect(listener))
        opened.set()
        assert broken.wait(30)

    thread = threading.Thread(target=make, args=(slowly,))
    thread.start()
    assert opened.wait(30)
    groups.break_all(again=False)
    broken.set()
    thread.join(30)
    assert not is_open(pairs[0][0])


def test_what_is_torchs_own_is_put_back():
    def seen():
        c10d = dist.distributed_c10d
        ddp = torch.nn.parallel.DistributedDataParallel
        return c10d._new_process_group_helper, c10d.barrier, dist.barrier, ddp.__init__

    before = seen()
    groups = Groups()
    groups.watch()
    assert all(now is not then for now, then in zip(seen(), before, strict=True))
    groups.unwatch()
    assert seen() == before


# --- made again ----------------------------------------------------------------------------------


@pytest.fixture(name="watched")
def _watched(monkeypatch):
    """Groups of a process that is alone in its attempt, as a launcher's environment has it."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    groups = Groups()
    groups.watch()
    yield groups
    groups.unwatch()
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def train(ddp):
    ddp(torch.ones(2, 3)).sum().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def test_a_model_that_is_wrapped_goes_on_in_another_group(watched, monkeypatch):
    dist.init_process_group("gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    calls = []

    def hook(state, bucket):
        calls.append(state)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook("mine", hook)
    before, group = train(ddp), dist.group.WORLD
    assert watched.why_not() == ""
    except_hook = sys.excepthook
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    watched.let_go()
    assert not dist.is_initialized()
    watched.let_go()  # another loss, before the groups were there again
    watched.join()
    assert dist.group.WORLD is not group
    ddp.zero_grad()
    for one, other in zip(train(ddp), before, strict=True):
        assert torch.equal(one, other)
    assert calls == ["mine"] * 2
    assert sys.excepthook is except_hook


KEPT = {"broadcast_buffers": False}


@pytest.mark.parametrize(
    ("what", "are_sent"),
    [
        *(("trained", True), ("at the start", True), ("evaluated", False), ("no_sync", False)),
        *(("kept", False), ("ignored", False), ("hooked", False), ("let go", False)),
    ],
)
@pytest.mark.filterwarnings("ignore:.broadcast_buffers:FutureWarning")
def test_buffers_are_rank_0s_where_the_next_forward_pass_sends_them(watched, what, are_sent):
    dist.init_process_group("gloo")
    model = torch.nn.BatchNorm1d(3)
    if what == "ignored":
        model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_buffers()]
    made = torch.nn.parallel.DistributedDataParallel(model, **(KEPT if what == "kept" else {}))
    if what == "hooked":
        made._register_buffer_comm_hook(None, lambda *_: None)
    x = torch.ones(2, 3)
    if what != "at the start":
        made(x).sum().backward()
    if what == "evaluated":
        with torch.no_grad():
            made(x)
    if what == "no_sync":
        with made.no_sync():
            made(x).sum().backward()
    if what == "let go":
        watched.let_go()
    addresses = {buffer.data_ptr() for buffer in model.buffers()}
    assert watched.sent_buffers() == (addresses if are_sent else set())


def test_a_script_that_speaks_to_others_before_cannot_be_rehearsed(watched):
    dist.init_process_group("gloo")
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    dist.barrier()
    assert watched.why_not() == ""
    dist.all_reduce(torch.ones(1))
    assert "speak to each other" in watched.why_not()


def test_barriers_are_counted_and_can_be_left_out(watched):
    dist.init_process_group("gloo")
    dist.barrier()
    assert watched.num_barriers == 1
    watched.skips_barriers = True
    dist.barrier()
    assert watched.num_barriers == 1
    dist.barrier(async_op=True).wait()  # somebody waits for it
    assert watched.num_barriers == 1


def test_groups_of_the_scripts_own_are_not_made_again(watched):
    assert "no process group" in watched.why_not()
    dist.init_process_group("gloo")
    dist.new_group([0])
    assert "besides the default one" in watched.why_not()


def test_a_store_of_the_scripts_own_is_not_made_again(watched):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert "from the environment" in watched.why_not()


def test_who_joins_others_rehearses(watched, monkeypatch):
    server, port = open_store("127.0.0.1")
    server.set(kept_key(0), "0")
    server.set(kept_key(1), "3")
    monkeypatch.setenv(STORE_VARIABLE, f"127.0.0.1:{port}")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keep = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            master_listen_fd=listener.detach(),
            wait_for_workers=False,
        )
        monkeypatch.setenv("MASTER_PORT", str(keep.port))
        dist.init_process_group("gloo")
    assert watched.is_rehearsal
    assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    assert watched.why_not() == ""


# --- groups that nobody comes to -----------------------------------------------------------------


@pytest.fixture(name="asked")
def _asked(monkeypatch):
    """Groups whose default one is made by ``asked.make``, in place of torch."""
    groups = Groups()
    groups._asked = _GroupArguments("gloo", None, None, None)
    here = types.SimpleNamespace(groups=groups, make=lambda: None, made=[])

    def init(*_, **__):
        here.made.append(groups._noted(lambda: (object(), here.make())))

    monkeypatch.setattr(dist, "init_process_group", init)
    over.begin_again()
    yield here
    over.begin_again()


def test_a_group_that_a_lost_rank_never_comes_to_is_left_behind(asked):
    goes_on = threading.Event()
    asked.make = goes_on.wait
    threading.Timer(0.1, over.happen).start()
    with pytest.raises(ConnectionError, match="over before its groups were made"):
        asked.groups.join()
    over.begin_again()
    asked.make = lambda: None
    asked.groups.join()
    goes_on.set()  # the first one, too late: nobody is to know of it
    until(lambda: not any(one.name == "outlast-groups" for one in threading.enumerate()))
    assert len(asked.made) == 1
    assert len(asked.groups._made) == 1


def test_what_a_group_could_not_be_made_for_is_raised(asked):
    asked.make = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        asked.groups.join()


def until(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it has not come to it")


def test_one_that_is_left_behind_takes_no_name(asked, monkeypatch):
    """torch would say of the next one that there is a group of its name already."""
    registered, raised = [], []
    register = asked.groups._registering(registered.append)

    def late():
        try:
            asked.groups._make_default(asked.groups._num_joined - 1)
            register("0")
        except ConnectionError as error:
            raised.append(str(error))

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)  # it has come through
    thread = threading.Thread(target=late)
    thread.start()
    thread.join()
    assert (registered, len(raised)) == ([], 1)
    register("0")
    assert registered == ["0"]


def test_a_torch_without_what_this_stands_on_is_said(monkeypatch):
    assert lacking() == ""
    monkeypatch.delattr(dist.distributed_c10d, "_default_pg_init_method")
    assert lacking() == "_default_pg_init_method"
    assert "has no _default_pg_init_method" in Groups().why_not()


@pytest.mark.parametrize(
    ("kind", "has_pieces"), [("ProcessGroupNCCL", True), ("ProcessGroupNCCL2", False)]
)
def test_communicators_of_any_kind_are_aborted(world, monkeypatch, kind, has_pieces):
    """There is no GPU here: what stands for a backend writes down what is asked of it."""
    said = []

    class Backend:
        def abort(self):
            said.append("abort")

    if has_pieces:
        Backend._group_start = lambda self: said.append("start")
        Backend._group_end = lambda self: said.append("end")
    group = types.SimpleNamespace(_get_backend=lambda device: Backend())
    monkeypatch.setattr(dist.distributed_c10d, kind, Backend, raising=False)
    names = {Hashed(group): "a", Hashed(types.SimpleNamespace(_get_backend=refuse)): "b"}
    known = types.SimpleNamespace(pg_names=names)
    monkeypatch.setattr(dist.distributed_c10d, "_world", known)
    Groups().break_all(again=False)
    until(lambda: len(said) == 1 + 2 * has_pieces)
    assert said == (["start", "abort", "end"] if has_pieces else ["abort"])


def test_a_group_that_was_aborted_is_forgotten_and_not_shut_down(watched, monkeypatch):
    """torch's watchdog may sleep for a minute, and shutting down waits for it."""
    dist.init_process_group("gloo")
    monkeypatch.setattr(groups, "_nccl_backends", lambda: [types.SimpleNamespace(abort=int)])
    shut_down, calls = dist.ProcessGroup.shutdown, []

    def shutdown(group):
        calls.append(group)

    monkeypatch.setattr(dist.ProcessGroup, "shutdown", shutdown)
    watched.break_all(again=False)
    watched.let_go()
    assert not dist.is_initialized()
    assert not calls
    dist.init_process_group("gloo")
    dist.destroy_process_group()  # by the script itself
    assert len(calls) == 1
    shut_down(calls[0])


class Hashed:
    """A namespace that is a key."""

    def __init__(self, given):
        self.__dict__.update(vars(given))


def refuse(device):
    raise RuntimeError(f"no backend for {device}")
