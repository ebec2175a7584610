"""What a script does in front of its loops and between them counts once, if it is killed too."""

import pytest
import torch
from floor import SCRIPTS, Job, alone, until

import outlast
import thorough
from outlast.training import turns

BETWEEN = SCRIPTS / "between.py"
CHANGES = ("data", "no_grad", "rate", "scheduler", "moments", "object")
PUT_BACK = "what the script has changed in front of this loop"


def ended(process):
    assert process.wait() == 0, process.text
    (line,) = [line for line in process.out.splitlines() if line.startswith("ended")]
    return line


def killed_and_gone_on(floor, job, changes, at):
    """The process that went on; each was killed at one of these steps."""
    for step in at:
        started = floor.warm(BETWEEN, changes, step, env=job.env)
        assert started.wait() == -9, started.text
    return floor.warm(BETWEEN, changes, env=job.env)


# Four is the first loop's end; five, six and seven are in the second one, eight is its end.
@pytest.mark.parametrize("at", [(4,), (5,), (6,), (7,), (8,), (3, 4, 6, 9)])
def test_a_killed_run_ends_as_the_undisturbed_one(floor, tmp_path, at):
    changes = ",".join(CHANGES)
    calm = ended(floor.warm(BETWEEN, changes, env=Job(tmp_path / "calm").env))
    job = Job(tmp_path / "job")
    again = killed_and_gone_on(floor, job, changes, at)
    assert ended(again) == calm
    resumed_at = job.events("resumed")[-1]["step"]
    named = "(model, optimizer, scheduler, tally)"
    assert again.err.count(f"put back to step {resumed_at} {named}") == (resumed_at > 4), again.err


@pytest.mark.parametrize("change", thorough.some(CHANGES, 3))
def test_each_change_alone(floor, tmp_path, change):
    calm = ended(floor.warm(BETWEEN, change, env=Job(tmp_path / "calm").env))
    again = killed_and_gone_on(floor, Job(tmp_path / "job"), change, (6,))
    assert ended(again) == calm
    assert again.err.count(PUT_BACK) == 1


@pytest.mark.parametrize("at", [2, 6])
def test_what_is_done_in_front_of_the_first_loop(floor, tmp_path, at):
    calm = ended(floor.warm(BETWEEN, "first", env=Job(tmp_path / "calm").env))
    again = killed_and_gone_on(floor, Job(tmp_path / "job"), "first", (at,))
    assert ended(again) == calm
    assert again.err.count(PUT_BACK) == 1


def test_two_ranks(floor, tmp_path):
    changes = ",".join(CHANGES)
    calm, job = Job(tmp_path / "calm", 2), Job(tmp_path / "job", 2)
    lines = []
    for one in (calm, job):
        if one is job:
            killed = floor.ranks(2, BETWEEN, changes, 6, env=one.env)
            assert -9 in [rank.wait() for rank in killed], killed[0].text
        ranks = floor.ranks(2, BETWEEN, changes, env=one.env)
        lines.append([ended(rank) for rank in ranks])
    assert lines[0] == lines[1]
    assert sum(rank.err.count(PUT_BACK) for rank in ranks) == 1
    assert job.events("resumed")[-1]["step"] > 4


# --- behind the last loop, in this process ------------------------------------------------------


@pytest.fixture
def job(tmp_path, monkeypatch):
    alone(monkeypatch)
    # The end of a loop is no save of its own, however long it takes on a busy machine.
    monkeypatch.setattr(turns, "END_AFTER_S", 1e6)
    return Job(tmp_path / "job")


class Killed(Exception):
    """As good as a kill: nothing is saved."""


def finish(job, change, epochs=2, *, dies_at=None):
    """Epochs of two steps, a change behind each; the weights behind the session."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.arange(8.0).view(2, 4).sin()
    named = {"dir": job.directory, "every": f"{dies_at or 1000} steps"}
    with outlast.session(**named, model=model, optimizer=optimizer) as session:
        for _ in range(epochs):
            for row in session.steps(rows):
                loss = model(row).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if session.step == dies_at:
                until(lambda: session._on.engine.committed_step == dies_at, "the commit")
                raise Killed
            change(model)
    return [value.clone() for value in model.state_dict().values()]


def by_data(model):
    model.weight.data.mul_(0.5)


def in_place(model):
    with torch.no_grad():
        model.bias.add_(1.0)


def nothing(model):
    pass


@pytest.mark.parametrize("change", [by_data, in_place])
def test_a_finished_job_that_is_run_again_has_its_end(job, change):
    first = finish(job, change)
    for _ in range(2):
        assert all(map(torch.equal, finish(job, change), first))
    assert [event["step"] for event in job.events("commit")] == [4]


@pytest.mark.parametrize("change", [by_data, in_place])
def test_a_finished_job_goes_on_with_more_epochs(job, tmp_path, change):
    finish(job, change)
    longer = finish(job, change, epochs=4)
    assert all(map(torch.equal, longer, finish(Job(tmp_path / "calm"), change, epochs=4)))


@pytest.mark.parametrize("change", [by_data, in_place, nothing])
def test_what_follows_the_last_loop_is_saved_where_only_that_was_left(job, tmp_path, change):
    """Killed at the last loop's end, before what follows it."""
    with pytest.raises(Killed):
        finish(job, change, dies_at=4)
    assert job.newest() == 4
    calm = finish(Job(tmp_path / "calm"), change)
    for _ in range(2):  # the second one finds the end
        assert all(map(torch.equal, finish(job, change), calm))
    commits = [event["step"] for event in job.events("commit")]
    assert commits == [4] if change is nothing else [4, 4]
