"""``elastic.py`` that saves by ``auto``, where a save in storage costs much.

What it costs, and how far apart checkpoints are, is set here: a test has no hours, and its disk is
quick. BUG_AT is the step from which on the script fails, or a file in which it will stand.
"""

import os
from pathlib import Path

import elastic
import torch

from outlast.policy import cadence
from outlast.training import turns

cadence.AUTO_MIN_S = cadence.AUTO_MAX_S = 0.2
cadence.AUTO_FIRST_S = 0.2
turns.BURDEN = 1e4  # times what it took: hours between two

BUG_AT = os.environ.get("BUG_AT", "0")


def bug_at():
    """The step; 0 where there is none yet."""
    if BUG_AT.isdigit():
        return int(BUG_AT)
    return int(Path(BUG_AT).read_text()) if Path(BUG_AT).exists() else 0


class Counted(elastic.Exact):
    """Descent that knows how far it is, and may end there."""

    def __init__(self, model, global_batch):
        super().__init__(model, global_batch)
        self.made = torch.zeros((), dtype=torch.int64)

    def step(self, samples):
        """One more, while it is not too late."""
        if 0 < bug_at() <= self.made + 1:
            raise ZeroDivisionError(f"there is no step {bug_at()}")
        self.made += 1
        return super().step(samples)

    def state_dict(self):
        return {**super().state_dict(), "made": self.made}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.made.copy_(state["made"])


elastic.Exact = Counted
if __name__ == "__main__":
    elastic.main()
