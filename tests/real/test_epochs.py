"""``session.epochs()`` goes through no finished epoch again, whatever cut the job off."""

import re

import pytest
from floor import SCRIPTS

EPOCHS = SCRIPTS / "epochs.py"


@pytest.fixture(autouse=True)
def _compared(floor):
    del floor.environ["OUTLAST_RESUME"]


def lines_of(floor, *arguments, code=0, **env):
    process = floor.warm(EPOCHS, *arguments, env=env)
    assert process.wait() == code, process.text
    return process.out.splitlines(), process.err


def behind(lines, *begin, step=0):
    """The lines from that one on, without steps up to ``step``."""
    done = [f"step {number}" for number in range(step + 1)]
    lines = lines[lines.index(" ".join(map(str, begin))) :]
    return [line for line in lines if line not in done]


def files(tmp_path):
    return {path.name: path.read_bytes() for path in tmp_path.glob("epoch*.pt")}


@pytest.mark.parametrize("form", ["epochs", "two"])
@pytest.mark.parametrize("where", ["KILL", "BEHIND"])
def test_a_killed_job_goes_on_in_its_epoch(floor, tmp_path, form, where):
    num_steps = {"epochs": 3, "two": 5}[form]
    calm, _ = lines_of(floor, 4, form, OUTLAST_DIR="calm")
    of_calm = files(tmp_path)
    for path in tmp_path.glob("epoch*.pt"):
        path.unlink()
    lines_of(floor, 4, form, code=-9, **{where: 2 * num_steps + (2 if where == "KILL" else 0)})
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("epoch*.pt")}
    assert len(stamps) == (2 if where == "KILL" else 1)
    again, err = lines_of(floor, 4, form)
    # Which of its saves was committed is the disk's to say.
    step = int(re.search(r"resumed from step (\d+)", err)[1]) if "resumed" in err else 0
    first = int(again[0].removeprefix("begin "))
    assert first in {max(step - 1, 0) // num_steps, step // num_steps}
    assert again == behind(calm, "begin", first, step=step)
    assert files(tmp_path) == of_calm
    untouched = [tmp_path / f"epoch{number}.pt" for number in range(first)]
    assert all(path.stat().st_mtime_ns == stamps[path] for path in untouched)
    assert "session.epochs" not in err


@pytest.mark.parametrize("form", ["epochs", "two"])
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


def test_what_was_left_by_break_goes_on_in_that_epoch(floor):
    calm, _ = lines_of(floor, 3, "stop")
    again, _ = lines_of(floor, 3, "stop")
    assert again == [line for line in behind(calm, "begin", 1) if "step" not in line]


def test_one_inside_of_another_is_refused(floor):
    _, err = lines_of(floor, 3, "refused", code=2)
    assert "Traceback" not in err
    assert "epochs() begins while another one is under way" in err


def test_range_is_answered_once_with_that_form(floor):
    calm, _ = lines_of(floor, 4, "range")
    again, err = lines_of(floor, 4, "range")
    begins = [f"begin {epoch}" for epoch in range(4)]
    assert [line for line in calm if line in begins] == begins
    assert [line for line in again if line in begins] == begins
    assert err.count("`for epoch in session.epochs(n)`") == 1
