"""Checkpoints, tiers and retention under crashes, pauses and damage, against a simple model."""

from checkpoint_machine import Checkpoints
from hypothesis import Phase, settings

from thorough import examples

Checkpoints.TestCase.settings = settings(
    examples(2500), stateful_step_count=25, print_blob=True, phases=[Phase.generate]
)  # one that fails is said at once: to make it short takes longer than a test may
TestCheckpoints = Checkpoints.TestCase
