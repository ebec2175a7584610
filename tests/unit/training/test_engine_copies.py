"""Which snapshot in memory is still a committed one's, while steps are kept beside it."""

import threading
from types import SimpleNamespace

import pytest

from outlast.training.engine import Engine, SnapshotCopy
from outlast.training.sharing import KeptSteps


@pytest.fixture(name="engine")
def _engine():
    """One that has committed what lies in arena 2, and holds another snapshot in arena 3."""
    made = object.__new__(Engine)
    made._changed, made._flights, made._serial = threading.Condition(), {}, 5
    made._steps = KeptSteps(SimpleNamespace())
    copies = {serial: SnapshotCopy(serial, None, {}, b"", serial, ()) for serial in (2, 3)}
    made._copies, made._committed_copy = dict(copies), copies[2]
    return made


def test_a_step_takes_a_committed_copy_away_only_where_it_lies_itself(engine):
    """Else the last step of a session would be written to storage twice."""
    engine._take_off(7, each_step=True)
    engine._written_over(3)
    assert engine._committed_copy.arena == 2
    assert list(engine._copies) == [2]
    engine._written_over(2)
    assert engine._committed_copy is None
    assert not engine._copies


def test_a_checkpoint_takes_all_of_them_away_as_ever(engine):
    engine._take_off(7)
    assert engine._committed_copy is None
    assert not engine._copies
