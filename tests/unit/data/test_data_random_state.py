"""Random streams come back to the bit, through JSON and tensors."""

import json
import random

import numpy as np
import pytest
import torch

from outlast.checkpoint import devices as rank
from outlast.data import random_state
from outlast.data.generators import same
from outlast.errors import ConfigError


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
    )


def through_json(value):
    """Plain values through JSON, tensors as they are: what a checkpoint does."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {json.loads(json.dumps(key)): through_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [through_json(item) for item in value]
    assert value is None or isinstance(value, str | int | float), type(value)
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("num_draws", [0, 1, 2, 313])
def test_round_trip(num_draws):
    for _ in range(num_draws):
        draw()
    random.gauss(0, 1)  # leaves a spare one behind, as np.random.randn does
    np.random.randn()
    state = through_json(random_state.capture())
    expected = [draw() for _ in range(400)]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    random_state.restore(state)
    assert [draw() for _ in range(400)] == expected


def test_what_was_not_drawn_from_is_told_by_the_same_objects():
    random.seed(1)
    before = random_state.look()
    assert all(one is other for one, other in zip(before, random_state.look(), strict=True))
    for draws in (random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1)):
        draws()
        python, numpy_state, in_torch = random_state.look()
        assert python == random.getstate() != before[0]
        assert numpy_state is before[1]
        assert in_torch is before[2]
        assert random_state.capture()["python"]["gauss"] == python[2]
    torch.rand(1)
    assert torch.equal(random_state.look()[2], torch.get_rng_state())
    assert random_state.look()[2] is not before[2]


def test_all_words_drawn_leave_no_stream_where_it_was():
    """Its place is the same then, and its words are others."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    draw()
    before = random_state.look()
    torch.randint(0, 1 << 30, (624,), dtype=torch.int32)
    np.random.bytes(624 * 4)
    random.randbytes(624 * 4)
    after = random_state.look()
    assert torch.equal(after[2], torch.get_rng_state())
    assert not torch.equal(after[2], before[2])
    assert (after[1]["state"]["pos"], after[0][1][-1]) == (
        before[1]["state"]["pos"],
        before[0][1][-1],
    )
    assert not np.array_equal(after[1]["state"]["key"], before[1]["state"]["key"])
    assert after[0] == random.getstate() != before[0]


def test_a_normal_number_that_waits_is_seen():
    torch.manual_seed(4)
    torch.randn(1)
    waits = torch.get_rng_state()
    torch.randn(1)  # given out: its words have not moved
    given = random_state.look()[2]
    assert random_state.look()[2] is given
    torch.set_rng_state(waits)
    assert torch.equal(random_state.look()[2], waits)
    assert not torch.equal(given, waits)


def test_the_sign_of_torchs_generator_is_found(monkeypatch):
    """Else each look costs ten times as much."""
    for seed in range(5):
        torch.manual_seed(seed)
        torch.rand(seed)
        random_state.look()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_rng_state", None)  # not asked again
            random_state.look()


def test_states_that_were_looked_at_in_inference_mode_are_as_good_as_any():
    torch.manual_seed(5)
    with torch.inference_mode():
        random_state.capture()
    assert random_state.capture()["torch"]._version == 0


def test_capture_draws_nothing_and_does_not_alias():
    state = random_state.capture()
    first = draw()
    random_state.restore(state)
    random_state.capture()
    assert draw() == first
    random_state.restore(state)
    assert draw() == first


def test_preserved_also_when_the_block_raises():
    state = random_state.capture()
    expected = draw()
    random_state.restore(state)

    def fail():
        with random_state.preserved():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


@pytest.mark.parametrize("num_draws", [0, 1, 2])
def test_what_was_drawn_inside_is_not_seen_outside(num_draws):
    for seed in range(20):
        random_state.seed_all(seed)
        for _ in range(num_draws):
            random.gauss(0, 1), np.random.randn(), torch.randn(1)
        before = random_state.capture()
        with random_state.preserved():
            random_state.seed_all(seed + 1)
            draw()
            random_state.look()
        after = random_state.capture()
        assert same([before], [after])
        assert after is before or num_draws == 1  # a normal number waits: looked at in full
        draw()
        assert not same([random_state.capture()], [after])


def test_another_numpy_generator_is_refused():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(ConfigError, match="PCG64"):
            random_state.capture()
    finally:
        np.random.set_bit_generator(before)


class Devices:
    """CUDA as one process sees it: so many devices, one of them its own."""

    def __init__(self, monkeypatch, num, current, *, used=()):
        self.states = [torch.tensor([index]) for index in range(num)]
        fakes = {
            "is_initialized": lambda: True,
            "device_count": lambda: num,
            "current_device": lambda: current,
            "memory_reserved": lambda index: 1 << 20 if index in used else 0,
            "get_rng_state": lambda index: self.states[index],
            "set_rng_state": self.put,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def put(self, state, index):
        self.states[index] = state


@pytest.mark.parametrize(
    ("there", "here", "used", "wanted"),
    [
        ((4, 0), (8, 4), (), {4: 100}),  # rank 4: of two machines with 4, then of one with 8
        ((8, 5), (1, 0), (), {0: 105}),
        ((8, 2), (8, 6), (2, 3), {6: 102, 7: 103}),  # two devices to a rank
        ((8, 2), (3, 2), (2, 3), {2: 102}),
    ],
)
def test_cuda_states_go_with_the_rank(monkeypatch, caplog, there, here, used, wanted):
    devices = Devices(monkeypatch, *there, used=used)
    devices.states = [torch.tensor([100 + index]) for index in range(there[0])]
    state = through_json(random_state.capture())
    devices = Devices(monkeypatch, *here)
    random_state.restore(state)
    got = {index: int(one) for index, one in enumerate(devices.states) if int(one) >= 100}
    assert got == wanted
    assert ("are left out" in caplog.text) == (len(wanted) < max(len(used), 1))


@pytest.mark.parametrize(
    ("there", "here", "wanted"),
    [
        ((8, 0, (5,)), (8, 0, (1,)), {1: 105}),  # scripts that never set a device
        ((8, 0, (5,)), (1, 0, (0,)), {0: 105}),  # CUDA_VISIBLE_DEVICES
        ((4, 2, (2, 3)), (4, 1, (1, 0)), {1: 102, 0: 103}),  # stages, the other way round
        ((4, 0, (0, 1)), (4, 0, (2,)), {2: 100, 3: 101}),
    ],
)
def test_cuda_states_go_to_where_the_rank_s_state_lies(monkeypatch, there, here, wanted):
    num, current, used = there
    devices = Devices(monkeypatch, num, current)
    monkeypatch.setattr(rank._rank, "devices", used)
    devices.states = [torch.tensor([100 + index]) for index in range(num)]
    state = through_json(random_state.capture())
    num, current, used = here
    devices = Devices(monkeypatch, num, current)
    monkeypatch.setattr(rank._rank, "devices", used)
    random_state.restore(state)
    got = {index: int(one) for index, one in enumerate(devices.states) if int(one) >= 100}
    assert got == wanted


def test_a_thread_of_another_device_captures_the_rank_s(monkeypatch):
    """Autograd calls hooks in threads that have the gradient's device."""
    devices = Devices(monkeypatch, 4, 1)
    monkeypatch.setattr(rank._rank, "devices", (1,))
    expected = random_state.capture()["devices"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    found = random_state.capture()["devices"]
    assert found == expected
    assert [int(one) for one in found["states"]] == [int(devices.states[1])]


def test_states_that_were_written_by_distance_alone_go_by_distance(monkeypatch):
    devices = Devices(monkeypatch, 8, 4)
    saved = {"distances": [0, 2], "states": [torch.tensor([7]), torch.tensor([8])]}
    random_state.restore(random_state.capture(cuda=False) | {"devices": saved})
    assert (int(devices.states[4]), int(devices.states[6])) == (7, 8)


def test_cuda_states_of_an_older_checkpoint_go_by_number(monkeypatch):
    devices = Devices(monkeypatch, 2, 1)
    state = random_state.capture(cuda=False) | {"cuda": [torch.tensor([7]), torch.tensor([8])]}
    random_state.restore(state)
    assert [int(one) for one in devices.states] == [7, 8]


def drawn_by_numpy(number):
    """Ways to change NumPy's state; each seen by a look that follows another."""
    np.random.seed(5)
    yield np.random.random
    yield np.random.normal  # the second one waits to be given out
    yield np.random.normal  # which leaves the words as they are
    yield lambda: np.random.shuffle(np.arange(number))
    yield lambda: np.random.seed(7)
    yield lambda: np.random.random(624)
    yield lambda: np.random.set_state(np.random.RandomState(3).get_state())
    yield lambda: np.random.get_bit_generator().jumped() and np.random.bytes(4)


def test_a_look_is_what_numpy_says_whatever_was_drawn_since_the_last_one():
    random_state.look()
    for draw in drawn_by_numpy(9):
        before = random_state.look()[1]
        draw()
        for _ in range(2):
            seen = random_state.look()[1]
            asked = np.random.get_state(legacy=False)
            assert same([seen], [asked])
        assert not same([before], [seen])


def test_a_look_after_a_restore_has_the_normal_number_that_waits():
    np.random.seed(5)
    np.random.normal()
    waits = random_state.capture()
    np.random.normal()
    random_state.look()
    random_state.restore(waits)
    assert random_state.look()[1]["has_gauss"] == 1
