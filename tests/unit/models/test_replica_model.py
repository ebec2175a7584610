"""Snapshots in several machines' memory, one message at a time, against a simple model."""

from hypothesis import settings
from replica_machine import Replicas

from thorough import examples

Replicas.TestCase.settings = settings(examples(300), stateful_step_count=25, print_blob=True)
TestReplicas = Replicas.TestCase
