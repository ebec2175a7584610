"""A protection of a drain switched off, and the drill of a notice says what it was for.

Those of checkpoints, of memberships and of copies are switched off under the crash explorer and
under the models. That all ranks stop at one step, and that a loader's processes live through a
signal, is missed in real jobs alone: two workers are told to leave where it matters (see
``unprotected``). With both protections on, the same drill holds.
"""

import os
import signal
from pathlib import Path

import pytest
from unprotected import STEPS, SWITCH_OFF

from outlast import config
from outlast.drill import at
from outlast.drill.course import Drill, DrillListener, DrillSetup
from outlast.drill.faults.aim import PlannedFault
from outlast.drill.faults.processes import signal_all
from outlast.drill.faults.tidings import SigtermNotice
from outlast.drill.workplace import JobScript
from thorough import some

SCRIPT = Path(__file__).with_name("unprotected.py")
pytestmark = pytest.mark.timeout(300)
LEAD_S = 20.0  # the least with which nothing may be lost; the machine goes then
NOTICE = at(step=6, fraction=0.2).on(machine=0).sigterm(LEAD_S)


class SigtermToAll(SigtermNotice):
    """SIGTERM to every process of a machine, as Slurm sends it to those of a job's step."""

    def inject(self, target):
        done = super().inject(target)
        signal_all(target.machines[self.number].processes(), signal.SIGTERM)
        return done


# Protection → the notice with which it is missed.
MISSED = {
    "agreement": NOTICE,
    "loader shield": PlannedFault(NOTICE.when, SigtermToAll(lead_s=LEAD_S), NOTICE.place),
}


@pytest.fixture
def drilled(tmp_path, monkeypatch):
    """``drilled(planned, *without)``: what the drill finds not to hold."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def conduct(planned, *without):
        setup = DrillSetup(
            script=JobScript(name=str(SCRIPT), arguments=without),
            root=tmp_path / "drill",
            steps=STEPS,
            workers=2,
            machines=1,
            settings=config.load({}),
            environ=dict(os.environ),
        )
        (grade,) = Drill(setup, DrillListener()).conduct(lambda *_: [planned]).grades
        print(grade)
        return [one.what for one in grade.held if not one.holds]

    return conduct


def test_with_all_of_them_the_drill_holds(drilled):
    """With the notice that does most: the agent hears it, and everybody else."""
    assert drilled(MISSED["loader shield"]) == []


@pytest.mark.parametrize("protection", some(list(MISSED), 1))
def test_what_is_switched_off_is_missed(drilled, protection):
    broken = drilled(MISSED[protection], protection)
    assert any("made again, 0 at most" in one for one in broken), broken


def test_the_table_is_whole():
    assert MISSED.keys() == SWITCH_OFF.keys()
