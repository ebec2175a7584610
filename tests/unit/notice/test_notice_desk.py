"""How long after a signal the machine is there: as set, as the platform has it."""

import time
from types import SimpleNamespace

import pytest

from outlast import config
from outlast.notice.desk import PlatformDesk
from outlast.notice.platform import Chosen


def grace_of(*, set_to="auto", grace_s=None, end_in_s=None):
    settings = config.load({"notice.grace": set_to}, environ={})
    desk = PlatformDesk(settings, print, print)
    end_t = None if end_in_s is None else time.time() + end_in_s
    watchers = (SimpleNamespace(name="slurm", end_t=end_t), SimpleNamespace(name="aws"))
    desk.chosen = Chosen(watchers, "as set", None, grace_s)
    return desk.grace_s()


def test_what_is_set_counts():
    assert grace_of(set_to="45 s", grace_s=30.0, end_in_s=100) == 45


def test_before_the_platform_is_known_nobody_knows():
    assert PlatformDesk(config.load({}, environ={}), print, print).grace_s() is None


@pytest.mark.parametrize(
    ("end_in_s", "expected"),
    [(None, 30), (3600, 30), (200, 30), (150, 150), (100, 100), (10, 30), (-5, 30)],
)
def test_near_its_time_limit_a_job_of_slurm_has_until_then(end_in_s, expected):
    assert grace_of(grace_s=30.0, end_in_s=end_in_s) == pytest.approx(expected, abs=1)


def test_a_platform_without_a_grace_has_none():
    assert grace_of() is None
