"""Networks of machines for the tests; skipped, with a word, where they cannot be made."""

import machines_floor
import pytest

import machine_network as network


@pytest.fixture(scope="package")
def _networks():
    if why_not := network.unusable():
        pytest.skip(why_not)


@pytest.fixture
def machines(_networks, floor):
    """``machines(3)``: that many hosts on a network of their own."""
    made = []

    def make(num_machines):
        made.append(network.Network(num_machines))
        return [machines_floor.Host(floor, machine) for machine in made[-1].machines]

    yield make
    try:
        floor.close()  # before the networks end whatever they hold: what outlived its agent is seen
    finally:
        for one in made:
            one.close()
