"""The limit of open files is raised as far as a coordinator needs it; where it is short is said."""

import resource

import pytest

from outlast.launch.membership import hub
from outlast.launch.membership.hub import lack, make_room, wanted_for


@pytest.fixture
def limits(monkeypatch):
    """This process's limits, as a list of soft and hard."""
    now = [1024, 1 << 19]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: now.__setitem__(slice(None), both))
    return now


def test_a_small_job_changes_nothing(limits):
    assert lack(4, 8) == ""
    assert limits == [1024, 1 << 19]


def test_it_is_raised_as_far_as_the_job_needs_it(limits):
    assert lack(10_240, 8) == ""
    assert limits == [wanted_for(10_240, 8), 1 << 19]
    assert wanted_for(10_240, 8) == 184_832
    assert lack(64, 8) == ""
    assert limits[0] == 184_832  # never lowered


def test_where_it_is_short_that_is_said(limits):
    limits[1] = 4096
    assert "one that coordinates 1024 machines opens up to 6,656 files" in lack(1024, 2)
    assert limits == [4096, 4096]
    assert "4,096 are allowed" in lack(1024, 2)


def test_all_of_it_when_it_has_run_out(limits):
    assert make_room()
    assert limits == [1 << 19, 1 << 19]
    assert not make_room()


def test_no_limit_is_no_lack(limits):
    limits[:] = [resource.RLIM_INFINITY] * 2
    assert lack(10_240, 8) == ""
    assert not make_room()


def test_one_that_may_not_be_raised_is_left(limits, monkeypatch):
    def refused(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(hub.resource, "setrlimit", refused)
    assert not make_room()
    assert lack(1024, 2)
