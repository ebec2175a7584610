"""``session.epochs()`` goes through no finished epoch again, whatever cut the job off."""

import pytest
from floor import SCRIPTS
from test_bad_input import only_line

EPOCHS = SCRIPTS / "epochs.py"


@pytest.fixture(autouse=True)
def _compared(floor):
    del floor.environ["OUTLAST_RESUME"]


def lines_of(floor, *arguments, code=0, **env):
    process = floor.warm(EPOCHS, *arguments, env=env)
    assert process.wait() == code, process.text
    return process.out.splitlines(), process.err


def written(tmp_path):
    return {path.name: path.read_bytes() for path in tmp_path.glob("epoch*.pt")}


def behind(lines, *begin):
    """The lines from that one on."""
    return lines[lines.index(" ".join(map(str, begin))) :]


@pytest.mark.parametrize("form", ["epochs", "two"])
@pytest.mark.parametrize("kill", [1, 3, 4, 5])
def test_a_killed_job_goes_on_in_its_epoch(floor, tmp_path, form, kill):
    calm, _ = lines_of(floor, 3, form, OUTLAST_DIR="calm")
    files = written(tmp_path)
    for path in tmp_path.glob("epoch*.pt"):
        path.unlink()
    lines_of(floor, 3, form, code=9, KILL=kill)
    epoch = kill // (3 if form == "epochs" else 5)
    before = written(tmp_path)
    assert len(before) == epoch
    again, err = lines_of(floor, 3, form)
    # Which step was committed last is the disk's to say; the epoch is the one of that step.
    first = int(again[0].removeprefix("begin "))
    assert again[0].startswith("begin")
    assert first in (epoch, (kill - 1) // (3 if form == "epochs" else 5))
    assert [line for line in again if not line.startswith("step")] == [
        line for line in behind(calm, "begin", first) if not line.startswith("step")
    ]
    steps = [line for line in again if line.startswith("step")]
    assert steps == [line for line in calm if line.startswith("step")][-len(steps) :]
    assert written(tmp_path).keys() == files.keys()
    assert "session.epochs" not in err


def test_what_is_behind_an_epochs_loop_runs_at_least_once(floor):
    calm, _ = lines_of(floor, 3, OUTLAST_DIR="calm")
    lines_of(floor, 3, code=9, KILL_BEHIND="1")
    again, _ = lines_of(floor, 3)
    assert again[0] in ("begin 0", "begin 1")
    assert "behind 1" in "\n".join(again)
    assert [line for line in again if not line.startswith("step")] == [
        line for line in behind(calm, again[0]) if not line.startswith("step")
    ]


@pytest.mark.parametrize("form", ["epochs", "two", "stop"])
def test_a_finished_job_goes_through_none(floor, form):
    calm, _ = lines_of(floor, 3, form)
    for _ in range(2):
        again, err = lines_of(floor, 3, form)
        assert again == calm[-1:]
        assert "nothing is left to do: finished at step" in err


def test_more_epochs_go_on(floor):
    calm, _ = lines_of(floor, 4, OUTLAST_DIR="calm")
    lines_of(floor, 2)
    more, _ = lines_of(floor, 4, OUTLAST_RESUME="1")
    assert more == behind(calm, "begin", 2)
    fewer, err = lines_of(floor, 1, OUTLAST_RESUME="1")
    assert fewer == calm[-1:]
    assert "nothing is left to do" in err


def test_an_early_stop_stays_one(floor):
    calm, _ = lines_of(floor, 3, "stop")
    more, _ = lines_of(floor, 9, "stop", OUTLAST_RESUME="1")
    assert more == calm[-1:]


def test_one_inside_of_another_is_refused(floor):
    line = only_line(floor.warm(EPOCHS, 3, "refused"))
    assert "epochs() begins while another one is under way" in line


def test_range_is_answered_once_with_that_form(floor):
    lines_of(floor, 4, "range", code=9, KILL="10")
    again, err = lines_of(floor, 4, "range")
    assert again[0] == "begin 0"
    assert err.count("`for epoch in session.epochs(n)`") == 1
    lines_of(floor, 4, "range", code=9, KILL="1", OUTLAST_DIR="first")
    _, err = lines_of(floor, 4, "range", OUTLAST_DIR="first")
    assert "session.epochs" not in err  # in its first epoch there is nothing to leave out
