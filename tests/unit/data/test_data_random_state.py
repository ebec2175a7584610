"""Random streams come back to the bit, through JSON and tensors."""

import json
import random

import numpy as np
import pytest
import torch

from outlast.data import random_state
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


def test_another_numpy_generator_is_refused():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(ConfigError, match="PCG64"):
            random_state.capture()
    finally:
        np.random.set_bit_generator(before)
