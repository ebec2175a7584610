"""Which GPU is the rank's, and that every thread of ours is on it."""

import ast
import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import outlast
from fake_cuda import Cuda
from outlast.checkpoint import devices


@pytest.fixture(autouse=True)
def _nothing_known():
    devices._exchange.cache_clear()
    yield
    devices._exchange.cache_clear()
    devices._rank.devices = ()


def state(*places):
    """A model, as far as it lies somewhere; None for this memory."""
    model = torch.nn.Module()
    model.parameters = lambda: [
        SimpleNamespace(is_cuda=place is not None, device=SimpleNamespace(index=place))
        for place in places
    ]
    return model


def run(kind, act):
    thread = kind(target=act, name="outlast-test")
    thread.start()
    thread.join()


def test_without_cuda_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("nobody has a GPU here"))
    devices.settle([torch.nn.Linear(2, 2)])
    assert (devices.own(), devices.used()) == (None, ())
    run(devices.Thread, devices.enter)


@pytest.mark.parametrize(
    ("places", "current", "used"),
    [
        ((3, 3), 3, (3,)),
        ((5, None, 5), 0, (5,)),  # a script that never sets a device
        ((2, 4, 2), 4, (4, 2)),
        ((6, 1), 0, (6, 1)),  # two stages in one process
        ((None,), 7, (7,)),  # offloaded
        ((), 7, (7,)),
    ],
)
def test_it_is_the_one_where_the_state_lies(monkeypatch, places, current, used):
    Cuda(monkeypatch, current=current)
    devices.settle([object(), state(*places)])
    assert devices.used() == used
    assert devices.own() == used[0]


def test_an_optimizer_s_parameters_count_too(monkeypatch):
    Cuda(monkeypatch)
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    optimizer.param_groups[0]["params"] = state(4).parameters()
    devices.settle([optimizer])
    assert devices.own() == 4


def test_a_thread_of_ours_is_on_it_whatever_its_maker_has(monkeypatch):
    cuda = Cuda(monkeypatch, current=0)
    devices.settle([state(5)])
    seen = []
    run(threading.Thread, lambda: seen.append(cuda.device))
    run(devices.Thread, lambda: seen.append(cuda.device))
    devices.apart(lambda: seen.append(cuda.device), "test")
    assert seen == [0, 5, 5]
    assert set(cuda.contexts) == {5}


@pytest.mark.parametrize(
    ("hip", "library", "function"),
    [
        (None, "libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
        ("7.1", "libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
    ],
)
def test_a_thread_of_ours_takes_no_part_in_captures_and_says_so_once(
    monkeypatch, hip, library, function
):
    Cuda(monkeypatch)
    told = []
    exchange = lambda mode: told.append((threading.current_thread().name, mode._obj.value))  # noqa: E731
    libraries = {library: SimpleNamespace(**{function: exchange})}
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    monkeypatch.setattr(torch.version, "hip", hip)
    run(devices.Thread, lambda: [devices.enter() for _ in range(3)])
    assert told == [("outlast-test", 1)]


def test_a_driver_that_does_not_know_the_word_is_passed_over(monkeypatch, caplog):
    Cuda(monkeypatch)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    for _ in range(3):
        run(devices.Thread, lambda: None)
    assert caplog.text.count("captured during a save may fail") == 1


def test_who_imports_torch_starts_no_other_kind_of_thread():
    """The rule that puts every thread that may touch CUDA onto the rank's device."""
    root = Path(outlast.__file__).parent
    wrong = []
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_text())
        imported = {
            name.name.partition(".")[0]
            for node in tree.body
            if isinstance(node, ast.Import)
            for name in node.names
        }
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.Thread"
        ]
        if "torch" in imported and calls:
            wrong.append(f"{file.relative_to(root)}:{calls[0].lineno}")
    assert not wrong, "devices.Thread in their place"
