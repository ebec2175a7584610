"""Loops of a session follow each other; one that is held is over with its session."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import outlast
from outlast.attempt.beat import BeatReader, Phase
from outlast.errors import ConfigError


def nest(session):
    for _ in session.steps(range(100, 104), epochs=1):
        pass


def side_by_side(session):
    next(iter(zip(session.steps([1]), session.steps([2]), strict=True)))


def test_what_comes_after_a_loop_that_is_still_held_is_no_step(tmp_path, monkeypatch):
    beats = tmp_path / "beats"
    beats.mkdir()
    monkeypatch.setenv("OUTLAST_BEATS", str(beats))
    monkeypatch.setenv("LOCAL_RANK", "0")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tmp_path / "job"
    with outlast.session(model=model, optimizer=optimizer, dir=job, every="5 steps") as session:
        held = session.steps(range(9))  # as a progress bar holds it
        for _ in held:
            break
        heard = BeatReader(beats, 0)
        assert heard.phase.phase is Phase.STEPPING
    assert heard.phase.phase is Phase.OUTSIDE
    heard.close()
    held.close()


@pytest.mark.parametrize("build", [nest, side_by_side])
def test_a_loop_that_begins_in_the_midst_of_another_is_refused(tmp_path, build):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tmp_path / "job"
    with outlast.session(model=model, optimizer=optimizer, dir=job, every="5 steps") as session:
        loader = outlast.data.Loader(range(40), global_batch=2, shuffle=False)
        came = []
        for batch in session.steps(loader, until=4):
            came.append(batch.tolist())
            if len(came) == 2:
                with pytest.raises(ConfigError, match=r"another one is in its midst, at step 1"):
                    build(session)
        # What was refused has changed nothing, and a loop that is closed makes room for the next.
        assert came == [[0, 1], [2, 3], [4, 5], [6, 7]]
        held = session.steps(range(9), until=9)
        next(held)
        held.close()
        assert list(session.steps(range(9), until=6)) == [0, 1]
        assert session.step == 6


def fail_while_leaving(**settings):
    with outlast.session(**settings) as session:
        for batch in session.steps(range(9)):
            # A loader that the script iterates itself, for an evaluation, is shielded meanwhile.
            assert DataLoader._get_iterator.__closure__
            if batch == 2:
                session._on.leaving.is_known = True  # as a notice has it
                raise RuntimeError("a loader's process died")


def test_an_exception_while_the_job_is_leaving_says_what_is_committed(tmp_path, capsys):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SystemExit) as ended:
        fail_while_leaving(model=model, optimizer=optimizer, dir=tmp_path, every="5 steps")
    assert not DataLoader._get_iterator.__closure__
    assert ended.value.code == 75
    said = capsys.readouterr().err
    assert "ended by RuntimeError while the job was leaving" in said
    assert (
        "step 2 could not be committed (RuntimeError came first); nothing is committed yet" in said
    )
    assert "2 steps lost" in said
