"""torch's stores connect without a question to a name server."""

import contextlib
import socket
import sys
import types

import pytest

from outlast.attempt import early as module
from outlast.attempt.early import QUIET_VARIABLE, nameless, spare_torch


@pytest.fixture(autouse=True)
def _under_agent(monkeypatch):
    monkeypatch.setenv(QUIET_VARIABLE, "1")


def num_servers():
    return module._state().nscount


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "10.0.0.7"])
def test_no_name_server_is_known_within_and_again_behind(host):
    before = num_servers()
    assert before, "this machine has none to begin with"
    with contextlib.suppress(ZeroDivisionError), nameless(host):
        assert num_servers() == 0
        assert socket.getaddrinfo("localhost", 80), "files are still asked"
        raise ZeroDivisionError
    assert num_servers() == before


def test_who_connects_to_a_name_has_it_looked_up(monkeypatch):
    monkeypatch.setattr(module, "_state", lambda: pytest.fail("it was changed"))
    with nameless("trainer-0"):
        pass


def test_where_torch_would_say_so_each_time_it_may_ask(monkeypatch):
    monkeypatch.setattr(module, "_state", lambda: pytest.fail("it was changed"))
    monkeypatch.delenv(QUIET_VARIABLE)
    with nameless("127.0.0.1"):
        pass


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: object())
    with nameless("127.0.0.1"):
        pass


def test_the_stores_that_torch_makes_are_spared_once(monkeypatch):
    seen = []
    made = types.ModuleType(module._RENDEZVOUS)
    made._create_c10d_store = lambda *given: seen.append((given, num_servers()))
    monkeypatch.setitem(sys.modules, module._RENDEZVOUS, made)

    for _ in range(2):
        spare_torch()
    made._create_c10d_store("127.0.0.1", 1)
    made._create_c10d_store("somewhere", 1)
    assert [given for given, _ in seen] == [("127.0.0.1", 1), ("somewhere", 1)]
    assert seen[0][1] == 0 < seen[1][1]


def test_torch_that_is_not_here_is_not_looked_for(monkeypatch):
    monkeypatch.delitem(sys.modules, module._RENDEZVOUS, raising=False)
    spare_torch()
    assert module._RENDEZVOUS not in sys.modules
