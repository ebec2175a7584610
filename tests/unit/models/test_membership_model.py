"""Membership on a network and a storage that fail in every way, against a simple model."""

from hypothesis import settings
from membership_machine import Memberships

from thorough import examples

Memberships.TestCase.settings = settings(examples(3000), stateful_step_count=30, print_blob=True)
TestMemberships = Memberships.TestCase
