"""Which connections are shut down, and which are left alone."""

import contextlib
import os
import socket
import threading

import pytest
import torch.distributed as dist

from outlast.attempt.link import STORE_VARIABLE
from outlast.training.breaking import Groups

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
        stack.enter_context(groups.watched())

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


def test_torchs_own_function_is_put_back(monkeypatch):
    before = dist.distributed_c10d._new_process_group_helper
    with Groups().watched():
        assert dist.distributed_c10d._new_process_group_helper is not before
    assert dist.distributed_c10d._new_process_group_helper is before
