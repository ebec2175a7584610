"""The training script of the floor, stopped in the middle of a copy, or saying when one is whole.

HOLD_AT=STEP  the first copy from that step on stops after its first piece until HOLD_FILE appears
HOLD_RANK     of this rank alone
HOLD_FILE     beside it ``.held.RANK`` appears when the copy stops, and ``.whole.STEP.RANK`` when
              the snapshot of a step is whole and the keeper has been told
FREE=STEP     the loop waits for each save to end before the next is due, but for two steps after
              this one it does not: whoever is quick or slow changes nothing
UNSETTLED=1   it never waits for a save
PAUSE_AT=STEP the loop stops after that step, says so in ``.paused.RANK``, and waits for ``.go``
WIDE=BYTES    another tensor of this many bytes is saved, so that there are several blocks
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import torch
import train

import outlast
from outlast.checkpoint.capture import Capture
from outlast.training.engine import Engine
from outlast.training.footing import Footing

AT = int(os.environ.get("HOLD_AT", "0"))
FILE = Path(os.environ["HOLD_FILE"]) if "HOLD_FILE" in os.environ else None
RANK = os.environ.get("RANK", "0")
held_captures = set()
FREE = int(os.environ.get("FREE", "-9"))
UNSETTLED = "UNSETTLED" in os.environ
PAUSE_AT = int(os.environ.get("PAUSE_AT", "0"))
completed = Footing.completed
begin, copy, copied, session = Engine._begin, Capture._copy, Engine._copied, outlast.session
now = {"step": 0}


class Wide:
    """A tensor that changes with each step that is asked for."""

    def __init__(self, size):
        self.tensor = torch.arange(size // 8)

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor.copy_(state["tensor"])


def held_begin(self, flight, state, *rest):
    now["step"] = state.step
    return begin(self, flight, state, *rest)


def held_copy(self, item):
    copy(self, item)
    if now["step"] >= AT and not held_captures:
        held_captures.add(id(self))
        wait_for(FILE, f".held.{RANK}")


def wait_for(file, say):
    FILE.with_suffix(say).touch()
    until_s = time.monotonic() + 100
    while not file.exists() and time.monotonic() < until_s:
        time.sleep(0.005)


def told_copied(self, capture):
    step = next((f.step for f in self._flights.values() if f.capture is capture), 0)
    copied(self, capture)
    FILE.with_suffix(f".whole.{step}.{RANK}").touch()


def settled_completed(self, step, *of):
    completed(self, step, *of)
    if step not in (FREE + 1, FREE + 2) and not UNSETTLED:
        self.engine.wait(100)
        self.engine.line.wait_for_keeper(100)
        until_s = time.monotonic() + 100
        while not self.engine.idle and time.monotonic() < until_s:
            time.sleep(0.002)  # the ranks agree on who writes what
    if step == PAUSE_AT:
        wait_for(FILE.with_suffix(".go"), f".paused.{RANK}")


def wide_session(**named):
    return session(wide=Wide(int(os.environ["WIDE"])), **named)


if __name__ == "__main__":
    if AT and os.environ.get("HOLD_RANK", RANK) == RANK:
        Engine._begin, Capture._copy = held_begin, held_copy
    if "FREE" in os.environ:
        Footing.completed = settled_completed
    if FILE is not None:
        Engine._copied = told_copied
    if "WIDE" in os.environ:
        outlast.session = wide_session
    train.main()
