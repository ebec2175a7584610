"""A disk that is really full takes the rollback that room was made for, and the past knows it."""

import contextlib

import pytest
from failure_limits import mounted

from outlast.ledger.file import Ledger, make_room
from outlast.ledger.past import Past


def fill(path):
    with contextlib.suppress(OSError), (path / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@pytest.mark.parametrize("has_room", [True, False])
def test_a_rollback_on_a_full_disk(tmp_path, has_room):
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(mounted(tmp_path / "small", size_bytes=1 << 20))
        except OSError as error:
            pytest.skip(f"nothing can be mounted here: {error}")
        ledger = Ledger(path, job="j", attempt=1)
        stack.callback(ledger.close)
        if has_room:
            make_room(path)
        for step in (20, 40):
            ledger.append("commit", step=step)
        fill(path)
        while not ledger.lost_events:
            ledger.append("step", step=41)
        assert ledger.record("rollback", step=20, first=30, batches=None) is has_room
        past = Past(path).look()
        assert past.promised == (20 if has_room else 40)
        assert len(past.unwritten) == has_room
