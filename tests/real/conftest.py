"""Fixtures of the real floor."""

import os
import random

import floor as real
import pytest

SEED = "OUTLAST_TEST_SEED"


@pytest.fixture(name="floor")
def _floor(tmp_path):
    """Starts real processes; at the end none of them runs any more."""
    started = real.Floor(tmp_path)
    yield started
    started.close()


@pytest.fixture
def rng():
    """Random numbers that a failing run prints the seed of: set OUTLAST_TEST_SEED to replay."""
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(10**6))
    print(f"{SEED}={seed}")
    return random.Random(seed)
