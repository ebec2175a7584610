"""Keys and messages: to oneself, and over a store in this process."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fake_cuda import Cuda
from outlast.attempt.link import LocalLink, StoreLink, device_of_group, open_link, open_store
from outlast.checkpoint import devices
from outlast.errors import ConfigError


@pytest.fixture(params=["local", "store"])
def link(request):
    """Both kinds do the same for a single rank."""
    if request.param == "local":
        yield LocalLink()
        return
    store, port = open_store("127.0.0.1")
    yield StoreLink("127.0.0.1", port, 0, 1)
    del store


def test_keys(link):
    link.publish("a", b"1")
    assert link.fetch("a", 5.0) == b"1"
    link.publish("a", b"\x00\xff")
    assert link.fetch("a", 5.0) == b"\x00\xff"
    with pytest.raises(TimeoutError):
        link.fetch("never", 0.05)


def test_messages_come_in_order(link):
    for number in range(5):
        link.send(0, {"kind": "n", "number": number})
    assert [link.receive()["number"] for _ in range(5)] == list(range(5))


def test_closing_wakes_the_receiver(link):
    found = []
    receiver = threading.Thread(target=lambda: found.append(link.receive()), daemon=True)
    receiver.start()
    link.close()
    receiver.join(10)
    assert found == [None]


def test_ranks_reach_each_other():
    _store, port = open_store("127.0.0.1")
    one, other = (StoreLink("127.0.0.1", port, rank, 2) for rank in range(2))
    one.publish("k", b"v")
    assert other.fetch("k", 5.0) == b"v"
    with pytest.raises(TimeoutError):
        other.fetch("another", 0.05)
    one.send(1, {"kind": "a"})
    other.send(0, {"kind": "b"})
    assert (other.receive(), one.receive()) == ({"kind": "a"}, {"kind": "b"})


def test_which_link(monkeypatch):
    for name in ("OUTLAST_STORE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    assert isinstance(open_link(), LocalLink)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2 .* call torch\.distributed\.init_proc"):
        open_link()
    _store, port = open_store("127.0.0.1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("OUTLAST_STORE", f"127.0.0.1:{port}")
    found = open_link()
    assert (type(found), found.rank, found.world_size) == (StoreLink, 1, 2)


def test_a_second_session_of_several_workers_in_one_attempt_is_refused(monkeypatch):
    monkeypatch.setenv("OUTLAST_STORE", "127.0.0.1:9")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("outlast.attempt.link._opened", {"127.0.0.1:9"})
    with pytest.raises(ConfigError, match="a second session"):
        open_link()


@pytest.mark.parametrize(
    ("kinds", "bound", "expected"),
    [
        (("cpu", "cuda"), None, "cpu"),
        (("cuda",), None, "cuda:5"),  # where the state lies, not device 0
        (("cuda",), "cuda:2", "cuda:2"),
        (("xpu",), None, "xpu"),
    ],
)
def test_where_a_group_takes_tensors(monkeypatch, kinds, bound, expected):
    Cuda(monkeypatch, current=0)
    monkeypatch.setattr(devices._rank, "devices", (5,))
    group = SimpleNamespace(
        _device_types=[torch.device(kind) for kind in kinds],
        bound_device_id=None if bound is None else torch.device(bound),
    )
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
    assert str(device_of_group()) == expected


def test_where_a_group_of_this_machine_takes_tensors():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert device_of_group() == torch.device("cpu")
    finally:
        dist.destroy_process_group()
