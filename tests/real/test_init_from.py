"""A job that starts from somebody's weights: in sessions, on several workers, and what is noted."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from floor import alone
from safetensors.torch import save_file

import outlast
from outlast.errors import ConfigError
from outlast.ledger.file import read_events
from outlast.ledger.narrator import sentence

SCRIPT = Path(__file__).parent / "scripts" / "begins.py"


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    alone(monkeypatch)
    monkeypatch.chdir(tmp_path)


def net(seed, width=5):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))


class Run:
    """One run of a small script, and what it had when its session was entered."""

    def __init__(self, directory, steps, *, seed=0, every=2, **how):
        self.model = net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        named = {"model": self.model, "optimizer": self.optimizer}
        self.states = {}
        with outlast.session(**named, dir=directory, every=every, **how) as session:
            self.resumed, self.first = session.resumed, session.step
            self.states[session.step] = self.weights()
            self.num_states = len(self.optimizer.state)
            for _ in session.steps([0] * steps, until=steps):
                self.model(torch.rand(4, 3)).square().sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.states[session.step + 1] = self.weights()

    def weights(self):
        return {name: one.clone() for name, one in self.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_new_job_starts_from_a_step_of_another_and_then_goes_on_from_its_own(capfd):
    first = Run("a", 6, keep=9)
    step = next(one["step"] for one in read_events(Path("a")) if one.event == "commit")
    source = f"a@{step}"
    second = Run("b", 3, seed=1, init_from=source)
    assert same(second.states[0], first.states[step])
    assert (second.resumed, second.first, second.num_states) == (False, 0, 0)
    (event,) = [one for one in read_events(Path("b")) if one.event == "initialised"]
    assert (event["source"], event["step"], event["objects"]) == (source, step, ["model"])
    assert sentence(event) == f"started from {source}: model: 4 tensors"
    capfd.readouterr()
    third = Run("b", 5, seed=2, init_from=source)
    assert same(third.states[3], second.states[3])
    assert (third.resumed, third.first) == (True, 3)
    said = capfd.readouterr().err
    assert f"{source} is not started from: this job goes on from its own step 3" in said


def test_random_states_are_the_new_jobs_own():
    Run("a", 2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = net(0)
    torch.manual_seed(5)
    with outlast.session(model=model, dir="b", init_from="a") as session:
        assert torch.equal(torch.rand(3), expected)
        assert not list(session.steps([0], epochs=0))


def test_where_it_came_from_is_in_each_checkpoint_and_shown():
    from click.testing import CliRunner

    from outlast.cli.checkpoints.show import show_command as command

    Run("a", 2)
    Run("b", 2, init_from="a@2")
    Run("b", 4, init_from="a@2")
    answer = CliRunner().invoke(command, ["b"])
    assert "its job took model from a@2, step 2 (digest " in answer.output
    answer = CliRunner().invoke(command, ["a"])
    assert "its job took" not in answer.output


def test_all_of_a_checkpoint_where_all_is_named():
    first = Run("a", 4)
    second = Run("b", 2, seed=3, init_from={"model": "a", "optimizer": "a"})
    assert (second.first, second.num_states) == (0, 4)
    assert same(second.states[0], first.states[4])


def test_a_refusal_leaves_a_job_that_starts_once_it_is_mended():
    torch.save(net(4, width=6).state_dict(), "other.pt")
    torch.save(net(4).state_dict(), "right.pt")
    with pytest.raises(ConfigError, match=r"0\.weight is \(6, 3\) there and \(5, 3\) in the model"):
        Run("a", 2, init_from="other.pt")
    assert same(Run("a", 2, init_from="right.pt").states[0], net(4).state_dict())


def test_a_misspelt_argument_is_no_object():
    with pytest.raises(ConfigError, match="did you mean init_from"):
        outlast.session(model=net(0), dir="a", init_form="x")


def written(form, path):
    """The weights of seed 77, in one form."""
    state = net(77).state_dict()
    if form == "torch":
        torch.save(state, path)
    elif form == "safetensors":
        save_file(state, path)
    elif form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": state}, checkpoint_id=path, no_dist=True)
    else:
        with outlast.session(model=net(77), dir=path) as session:
            for _ in session.steps([0], until=1):
                pass
    return path


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp", "ours"])
def test_two_workers_with_spread_models_have_the_weights_that_were_written(floor, tmp_path, form):
    source = written(form, tmp_path / form)
    for spread in ("fsdp", "ddp"):
        env = {"OUTLAST_DIR": tmp_path / f"new-{spread}"}
        ranks = floor.ranks(2, SCRIPT, source, spread, env=env)
        assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.text for rank in ranks)
        assert all("began: True at 0 False" in rank.out for rank in ranks)


def test_what_does_not_fit_is_refused_by_both_and_changes_neither(floor, tmp_path):
    source = written("dcp", tmp_path / "dcp")
    ranks = floor.ranks(2, SCRIPT, source, "fsdp", "6", env={"OUTLAST_DIR": tmp_path / "new"})
    assert [rank.wait() for rank in ranks] == [2, 2], "\n".join(rank.text for rank in ranks)
    for rank in ranks:
        assert "refused: True " in rank.out
        assert "0.weight is (5, 3) there and (6, 3) in the model" in rank.out
