"""The end of a session on several ranks, with a link that writes down what is asked of it."""

import types

import pytest

from outlast.errors import ConfigError
from outlast.training.footing import LoopEnding


class Asked:
    """Rank 0's link to two others, which are elsewhere."""

    rank, world_size = 0, 3

    def __init__(self, *, answers):
        self.log, self._answers = [], answers

    def publish(self, key, value):
        self.log.append((key, value))

    def fetch(self, key, timeout_s):
        self.log.append(key)
        if key.endswith("heard"):
            if not self._answers:
                raise TimeoutError
            return b""
        return b"4" if key == "end/at/2" else b"12"


@pytest.mark.parametrize("answers", [True, False])
def test_rank_0_ends_only_when_the_others_have_heard_that_they_differ(answers):
    """Without an agent the store is in its process: who has not heard it would save alone."""
    link = Asked(answers=answers)
    snapshots = types.SimpleNamespace(
        engine=types.SimpleNamespace(committed_step=3), turns=types.SimpleNamespace()
    )
    ending = LoopEnding(snapshots, link, None, None)
    with pytest.raises(ConfigError, match=r"rank 0 at 12, rank 2 at 4"):
        ending.is_due(12, 60.0, lambda: False)
    told = link.log.index(("end/at", b"differ rank 0 at 12, rank 2 at 4"))
    heard = link.log[told + 1 :]
    assert heard == [f"end/at/{rank}/heard" for rank in ((1, 2) if answers else (1,))]
