"""Membership on a network and a storage that fail in every way, against a simple model."""

import pytest
from hypothesis import Phase, settings
from membership_machine import Memberships

from thorough import examples

Memberships.TestCase.settings = settings(
    examples(3000), stateful_step_count=30, print_blob=True, phases=[Phase.generate]
)  # one that fails is said at once: to make it short takes longer than a test may
TestMemberships = Memberships.TestCase


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("side", ["a", "ab"])
def test_where_all_machines_are_needed_they_come_together_again(count, side):
    """The first coordinator is on the smaller side, and no attempt forms on the larger one."""
    model = Memberships()
    try:
        model.begins(seed=0, count=count, least=count)
        model.splits(side=set(side), storage="")
        model.time_goes_by(seconds=8.0)
        assert not model.trains()
        model.all_trouble_heals()
        model.holds()
    finally:
        model.teardown()


def test_a_majority_without_storage_is_unknown_to_who_is_cut_off_from_it():
    """It has claimed nothing; once all reach each other, there is one attempt."""
    model = Memberships()
    try:
        model.begins(seed=3413, count=2, least=1)
        model.splits(side={"c", "e"}, storage="in")
        model.workers_fail(host="a")
        model.comes(host="e", rate=0.9)
        model.time_goes_by(seconds=35.0)
        assert len(model.trains()) == 2
        model.all_trouble_heals()
        model.holds()
        assert len(model.trains()) == 1
    finally:
        model.teardown()
