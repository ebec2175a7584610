"""What the doctor makes of a place that does not keep its promises."""

import errno
import os

import pytest

from outlast.health.doctor import probes
from outlast.policy.fitness import judge_place
from outlast.storage import Directory


@pytest.fixture(name="probed")
def _probed(tmp_path, monkeypatch):
    """``probed(**changed)``: the findings at a directory, some of whose methods are changed."""

    def probe(**changed):
        storage = Directory(tmp_path / "job")
        for name, change in changed.items():
            monkeypatch.setattr(storage, name, change)
        monkeypatch.setattr(probes, "open_storage", lambda _: storage)
        monkeypatch.setattr(probes, "BIGGEST_BYTES", {True: 1 << 20, False: 1 << 20})
        facts = probes.probe_place(str(storage.root), writes=True, locks=True)
        return facts, judge_place("storage local", "here", facts)

    return probe


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_sound_place_is_tried_in_full_and_nothing_is_left(probed, tmp_path):
    facts, finding = probed()
    assert finding.status == "ok", finding
    assert (facts.put_new, facts.locks, facts.written_bytes) == (True, True, 1 << 20)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", [True, False], ids=["both-won", "nobody-won"])
def test_a_place_where_two_win_or_nobody_does_cannot_decide(probed, answer):
    facts, finding = probed(put_new=lambda *_: answer)
    if answer:
        assert "of two creates of one new name both were taken, so two machines" in finding.seen
    assert facts.put_new is not True
    assert finding.status == "failed"


@pytest.mark.parametrize(
    ("method", "stage"),
    [("put", "small"), ("read", "small"), ("put_new", "conditional"), ("create", "small")],
    ids=str,
)
def test_what_fails_is_told_with_the_stage_that_it_was_in(probed, method, stage):
    facts, finding = probed(**{method: failing(errno.EIO)})
    assert (facts.stage, facts.number) == (stage, errno.EIO)
    assert finding.status == "failed"


def test_other_bytes_than_were_written_are_noticed(probed):
    facts, finding = probed(read=lambda _: b"other")
    assert facts.stage == "small"
    assert "other bytes" in finding.seen


def test_a_checkpoint_that_is_there_is_counted(probed, tmp_path):
    (tmp_path / "job" / "step-000000000100").mkdir(parents=True)
    (tmp_path / "job" / "ledger.jsonl").touch()
    facts, _ = probed()
    assert facts.held_steps == 1
    assert len(list((tmp_path / "job").iterdir())) == 2


def test_what_an_old_doctor_left_is_removed_and_a_young_ones_is_not(probed, tmp_path):
    old, young = (tmp_path / "job" / f"doctor-{letter * 12}" for letter in "ab")
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "big").touch()
    os.utime(old, (0, 0))
    probed()
    assert not old.exists()
    assert young.exists()
