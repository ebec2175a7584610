"""Saves that hold less than everything, in fewer bits, or that go through a ring."""

import json
import shutil
import time

import pytest
import torch
from lazy_cases import CASES
from lazy_watch import _job, _watch  # noqa: F401 - fixtures
from saved import saved, saves_in
from state_bits import copy_of, difference, held

import outlast
from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.checkpoint.tensors import NAMES
from outlast.ledger.file import read_events
from outlast.storage import Directory
from whole_reads import load


def manifest(job, step):
    return json.loads((saved(job / "checkpoints", step) / "manifest.json").read_text())


def committed(job):
    return [e["step"] for e in read_events(job) if e.event == "commit"]


def train(job, case, until, *, every="1 steps"):
    """The state at each boundary; a loop that is slow enough for saves to end."""
    at = {}
    with outlast.session(dir=job, every=every, keep=100, **case.named) as session:
        entered = (session.step, copy_of(case.named))
        for _ in session.steps(range(until), until=until):
            at[session.step] = copy_of(case.named)
            case.step(session.step)
            time.sleep(0.06)
        at[session.step] = copy_of(case.named)
    return at, entered


@pytest.mark.parametrize("name", ["adamw_fused", "averaged_model", "batch_norm"])
def test_weights_between_full_checkpoints_are_right_and_never_resumed_from(job, monkeypatch, name):
    monkeypatch.setenv("OUTLAST_CHECKPOINT_OPTIMIZER_EVERY", "3")
    case = CASES[name]("cpu")
    at, _ = train(job, case, 14)
    steps = committed(job)
    kinds = {step: manifest(job, step)["kind"] for step in steps}
    assert next(iter(kinds.values())) == "full"
    weights = [step for step in steps if kinds[step] == "weights"]
    assert weights, kinds
    for step in steps:
        checkpoint = load(Directory(job / "checkpoints"), step)
        kept = dict(case.named)
        if kinds[step] == "weights":
            assert "optimizer" not in checkpoint.data
            assert not any(n.startswith("optimizer.") for n in checkpoint.inventory.tensors())
            kept.pop("optimizer")
        expected = {key: at[step][key] for key in kept}
        assert not difference(expected, held(checkpoint, kept)), step
        assert checkpoint.manifest.exact
    # The newest that is left holds weights alone: it is passed by.
    newest = weights[-1]
    for save in saves_in(job / "checkpoints"):
        if save.step > newest:
            shutil.rmtree(job / "checkpoints" / str(save))
    full = max(step for step in steps if step < newest and kinds[step] == "full")
    again = CASES[name]("cpu")
    _, (step, state) = train(job, again, full)
    assert step == full
    assert not difference(at[full], state)


def test_a_drain_is_whole_where_weights_alone_were_just_saved(job, monkeypatch):
    case = CASES["adamw_fused"]("cpu")
    with outlast.session(dir=job, every="1 h", keep=100, **case.named) as session:
        monkeypatch.setattr(session._on.ending, "may_save", lambda *_: False)
        for _ in session.steps(range(6), until=6):
            case.step(session.step)
        assert session._saving.take(6, {"reason": "due", "content": "weights"})
        assert session._on.engine.wait(30).error == ""
        assert manifest(job, 6)["kind"] == "weights"
        assert session._on.engine.committed_step == 0
        assert session._saving.commit(6, "drain", 30.0).error == ""
        assert manifest(job, 6)["kind"] == "full"
    assert committed(job) == [6, 6]
    again = CASES["adamw_fused"]("cpu")
    with outlast.session(dir=job, **again.named) as session:
        assert session.step == 6
        assert not difference(copy_of(case.named), copy_of(again.named))


def test_moments_in_fewer_bits_are_rounded_said_so_and_come_back_as_they_were(job, monkeypatch):
    monkeypatch.setenv("OUTLAST_CHECKPOINT_MOMENTS", "bf16")
    case = CASES["adamw_amsgrad"]("cpu")
    at, _ = train(job, case, 5)
    assert not manifest(job, 5)["exact"]
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    expected = at[5]
    for state in expected["optimizer"]["state"].values():
        for slot in moments:
            state[slot] = state[slot].to(torch.bfloat16).to(torch.float32)
    checkpoint = load(Directory(job / "checkpoints"), 5)
    stored = {n: e.dtype for n, e in checkpoint.inventory.tensors().items() if n.endswith(moments)}
    assert set(stored.values()) == {"BF16"}
    assert len(stored) == 12
    assert not difference(expected, held(checkpoint, case.named))
    again = CASES["adamw_amsgrad"]("cpu")
    _, (step, state) = train(job, again, 5)
    assert step == 5
    assert not difference(expected, state)


class Zoo:
    """A tensor of each dtype, and of each way to lie in memory."""

    def __init__(self):
        torch.manual_seed(0)
        base = torch.randn(12, 10)
        raw = torch.randint(0, 256, (16,), dtype=torch.uint8)
        self.tensors = {name: raw.clone().view(d) for d, name in NAMES.items() if name != "BOOL"}
        self.tensors |= {
            "bool": raw > 127,
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "nan": torch.tensor([float("nan"), -0.0]),
            "strided": base.T[::2, 1::3],
            "expanded": torch.randn(1, 4).expand(5, 4),
            "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
            "negated": torch.randn(5, dtype=torch.complex64).conj().imag,
            "big": torch.randn(BLOCK_BYTES // 4 + 77, 1).T,
            "big and strided": torch.randn(BLOCK_BYTES // 28 + 5, 7).T,
        }

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = dict(state)


@pytest.mark.parametrize("buffers", ["auto", "0"])
def test_every_kind_of_tensor_comes_back_bit_for_bit(job, monkeypatch, buffers):
    monkeypatch.setenv("OUTLAST_CHECKPOINT_BUFFERS", buffers)
    zoo, again = Zoo(), Zoo()
    with outlast.session(dir=job, zoo=zoo) as session:
        list(session.steps(range(2), until=2))
    again.tensors = {}
    with outlast.session(dir=job, zoo=again) as session:
        assert session.step == 2
    assert not difference(zoo.tensors, again.tensors)


@pytest.mark.parametrize("name", ["adamw_fused", "large_and_strided", "averaged_model"])
def test_what_goes_through_a_ring_is_copied_at_once_and_right(job, monkeypatch, watch, name):
    monkeypatch.setenv("OUTLAST_CHECKPOINT_BUFFERS", "0")
    case = CASES[name]("cpu")
    at, _ = train(job, case, 5, every="2 steps")
    steps = committed(job)
    assert len(steps) >= 2
    assert not any(watch.left)
    for step in steps:
        found = held(load(Directory(job / "checkpoints"), step), case.named)
        assert not difference(at[step], found), step
