"""A loop that is left while something still holds it is over with its session."""

import torch
from torch import nn

import outlast
from outlast.attempt.beat import Heard, Phase


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
        heard = Heard(beats, 0)
        assert heard.phase.phase is Phase.STEPPING
    assert heard.phase.phase is Phase.OUTSIDE
    heard.close()
    held.close()
