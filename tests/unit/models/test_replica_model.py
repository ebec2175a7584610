"""Snapshots in several machines' memory, one message at a time, against a simple model."""

from hypothesis import Phase, settings
from replica_machine import Replicas

from thorough import examples

Replicas.TestCase.settings = settings(
    examples(300), stateful_step_count=25, print_blob=True, phases=[Phase.generate]
)  # one that fails is said at once: to make it short takes longer than a test may
TestReplicas = Replicas.TestCase
