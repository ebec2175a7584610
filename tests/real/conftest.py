"""Fixtures of the real floor."""

import random

import floor as real
import pytest

import thorough


@pytest.fixture(name="floor")
def _floor(tmp_path):
    """Starts real processes; at the end none of them runs any more."""
    started = real.Floor(tmp_path)
    yield started
    started.close()


@pytest.fixture
def rng():
    """Random numbers that a failing run prints the seed of: set OUTLAST_TEST_SEED to replay."""
    return random.Random(thorough.seed())
