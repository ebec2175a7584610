"""Attempts that save the same steps and stop anywhere: what was committed last stands."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from keeper_fakes import JOB, FakeKeeper

from outlast.checkpoint.catalog import find_saves, prune
from outlast.storage import Directory
from thorough import examples
from whole_reads import verify

ATTEMPTS = st.integers(0, 2)


class Standing(RuleBasedStateMachine):
    """Three attempts with keepers of their own and one directory; nobody fences anybody."""

    def __init__(self):
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.disk = Directory(Path(self.place.name))
        self.patch = pytest.MonkeyPatch()
        self.ever = set()
        self.num_attempts, self.sides = 0, []
        for _ in range(3):
            self.sides.append(self.attempt())

    def attempt(self):
        self.num_attempts += 1
        keeper = FakeKeeper(self.patch, {"local": self.disk})
        return [keeper, keeper.worker(attempt=self.num_attempts, size=1000 + self.num_attempts), 0]

    def teardown(self):
        self.patch.undo()
        self.place.cleanup()

    @rule(which=ATTEMPTS, step=st.integers(1, 3))
    def save(self, which, step):
        keeper, worker, _ = side = self.sides[which]
        if keeper.saves.idle:
            side[2] += 1
            worker.save(step, side[2])

    @rule(which=ATTEMPTS, acts=st.integers(1, 3))
    def go_on(self, which, acts):
        """Some acts of its writers; between any two of them it may stand still for ever."""
        pool = self.sides[which][0].pool
        for _ in range(min(acts, len(pool.acts))):
            pool.acts.pop(0)()

    @rule(which=ATTEMPTS)
    def die(self, which):
        self.sides[which] = self.attempt()

    @rule(which=ATTEMPTS, keep=st.integers(1, 2))
    def prune(self, which, keep):
        in_use = self.sides[which][0].saves.names
        prune(self.disk, JOB, keep=keep, invalid=(), in_use=in_use)

    @invariant()
    def what_was_committed_last_stands(self):
        whole = set()
        for save in find_saves(self.disk).committed:
            if self.disk.exists(f"{save}/save.json"):
                verify(self.disk, save)
                whole.add(save)
        self.ever |= whole
        if self.ever:
            assert max(self.ever) in whole


Standing.TestCase.settings = settings(examples(40), stateful_step_count=40)
TestACommitStands = Standing.TestCase
