"""The recorder sees every step of any script, and changes none of it: the same bits come of it."""

import re
from pathlib import Path

import pytest

from outlast.drill.record import COMPILED, WorkerRecords

SCRIPT = Path(__file__).with_name("recorded.py")


class RecordedRun:
    def __init__(self, text, records):
        self.came_to = sorted(re.findall(r"came to (\w+)", text))
        self.records = records

    @property
    def steps(self):
        return self.records[0].steps


def run(floor, tmp_path, kind, *, workers=1):
    flags = ["--nproc-per-node", workers]
    plain = floor.outlast("run", "--dir", tmp_path / "job-plain", *flags, SCRIPT, kind)
    watched = floor.outlast(
        *("run", "--dir", tmp_path / "job", *flags, "-m", "outlast.drill.inside", SCRIPT, kind),
        env={"OUTLAST_DRILL": tmp_path / "run"},
    )
    assert plain.wait() == watched.wait() == 0, watched.text
    recorded = RecordedRun(watched.out, WorkerRecords(tmp_path / "run").look())
    assert recorded.came_to == sorted(re.findall(r"came to (\w+)", plain.out))
    assert len(recorded.came_to) == len(recorded.records) == workers
    assert all(one.ended for one in recorded.records)
    return recorded


def all_of(steps, field):
    return [len(getattr(step, field)) for step in steps]


@pytest.mark.parametrize(
    ("kind", "num_steps", "each"),
    [
        ("plain", 16, 1),  # a stock DataLoader with a process; recomputation in the backward pass
        ("accumulated", 4, 4),
        ("compiled", 8, 1),
        ("compiled_in_place", 8, 1),
    ],
)
def test_unchanged_scripts(floor, tmp_path, kind, num_steps, each):
    recorded = run(floor, tmp_path, kind)
    assert [step.step for step in recorded.steps] == list(range(1, num_steps + 1))
    assert (
        all_of(recorded.steps, "inputs") == all_of(recorded.steps, "losses") == ([each] * num_steps)
    )
    assert not recorded.records[0].trouble
    is_compiled = any(call.what == COMPILED for call in recorded.records[0].calls)
    assert is_compiled == kind.startswith("compiled")
    weights = [one for one in recorded.steps[0].state if one.endswith("weight")]
    assert weights
    assert all(len({step.state[name] for step in recorded.steps}) > 1 for name in weights)
    moments = [name for name in recorded.steps[0].state if name.endswith("exp_avg")]
    assert len({step.state[moments[0]] for step in recorded.steps}) == num_steps
    assert all(step.rates == [1e-2] for step in recorded.steps)
    inputs = [digest for step in recorded.steps for digest in step.inputs]
    assert len(set(inputs)) == len(inputs)


def test_the_graphs_of_a_compiled_script_are_its_own(floor, tmp_path):
    recorded = run(floor, tmp_path, "compiled_in_parts")
    assert len(recorded.steps) == 24
    assert not recorded.records[0].trouble


def test_two_optimizers_that_take_turns(floor, tmp_path):
    recorded = run(floor, tmp_path, "adversarial")
    assert len(recorded.steps) == 16
    assert all_of(recorded.steps[:2], "losses") == [1, 1]
    assert all_of(recorded.steps[:2], "inputs") == [3, 1]
    assert {"Linear.weight", "Sequential.0.weight"} <= recorded.steps[1].state.keys()


def test_a_session(floor, tmp_path):
    recorded = run(floor, tmp_path, "session")
    (one,) = recorded.records
    assert one.found.is_counted
    assert one.found.step == 0
    assert [step.step for step in one.steps] == list(range(1, 9))
    assert not any(step.unnamed for step in one.steps)
    assert {"model.first.weight", "model.norm.running_mean", "schedule"} <= one.found.state.keys()
    assert "optimizer.model.first.weight.exp_avg" in one.steps[0].state
    assert len({tuple(step.rates) for step in one.steps}) == 5


def test_what_a_script_changes_between_two_loops(floor, tmp_path):
    (one,) = run(floor, tmp_path, "loops").records
    (loop,) = one.loops.values()
    assert (loop.step, set(loop.changed)) == (8, {"schedule", "optimizer.groups"})
    assert loop.changed["schedule"] == one.steps[8].state["schedule"]
    assert loop.changed["schedule"] != one.steps[7].state["schedule"]
    assert not one.trouble


def test_each_rank_writes_its_own(floor, tmp_path):
    recorded = run(floor, tmp_path, "ranks", workers=2)
    one, other = (record.steps for record in recorded.records)
    assert {record.begun.rank for record in recorded.records} == {0, 1}
    assert [step.state for step in one] == [step.state for step in other]
    assert all(a.random != b.random for a, b in zip(one, other, strict=True))


def test_a_model_that_is_divided_and_whole_in_turn(floor, tmp_path):
    recorded = run(floor, tmp_path, "divided", workers=2)
    for one in recorded.records:
        assert len(one.steps) == 8
        assert not one.trouble
        assert "model.0.weight" in one.steps[0].state


def test_what_a_session_goes_on_from_is_what_the_step_before_left(floor, tmp_path):
    """Also where the model lies whole in memory, of an evaluation, when the first batch comes."""
    for until in ("8", "12"):
        going = floor.outlast(
            *("run", "--dir", tmp_path / "job", "--nproc-per-node", 2),
            *("-m", "outlast.drill.inside", SCRIPT, "divided"),
            env={"OUTLAST_DRILL": tmp_path / until, "UNTIL": until},
        )
        assert going.wait() == 0, going.text
    before, after = (
        sorted(WorkerRecords(tmp_path / until).look(), key=lambda one: one.begun.rank)
        for until in ("8", "12")
    )
    for one, other in zip(before, after, strict=True):
        assert other.found.step == 8
        assert other.found.state == one.steps[-1].state


def test_an_unchanged_trainer(floor, tmp_path):
    pytest.importorskip("transformers")
    recorded = run(floor, tmp_path, "trainer")
    assert len(recorded.steps) == 8
    assert all_of(recorded.steps, "losses") == [1] * 8


def test_what_cannot_be_recorded_is_said_once_and_training_goes_on(floor, tmp_path):
    recorded = run(floor, tmp_path, "fragile")
    assert recorded.records[0].trouble == "RuntimeError: ask me not"
    assert not recorded.steps


def test_tracebacks_are_the_scripts_own(floor, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys, torch\nassert sys.argv[1:] == ['-m', 'x']\n1 / 0\n")
    started = floor.outlast(
        *("run", "--dir", tmp_path / "job", "--max-restarts", "0", "-m", "outlast.drill.inside"),
        *(script, "-m", "x"),
        env={"OUTLAST_DRILL": tmp_path / "run"},
    )
    assert started.wait() == 76, started.text
    assert re.findall(r'File "(.*?)"', started.err) == [str(script)], started.text


FAILS_WITHIN = """
import torch, outlast
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def fail(_):
    if session.step == 2:
        raise RuntimeError("a peer has closed the connection")

model[0].weight.register_post_accumulate_grad_hook(fail)
with outlast.session(model=model, optimizer=optimizer, every="1 step") as session:
    for _ in session.steps(range(5)):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def test_a_step_whose_backward_pass_has_failed_is_none(floor, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS_WITHIN)
    job = floor.outlast(
        *("run", "--dir", tmp_path / "job", "-m", "outlast.drill.inside", script),
        env={"OUTLAST_DRILL": tmp_path / "run"},
    )
    assert job.wait() != 0
    first, *later = WorkerRecords(tmp_path / "run").look()
    assert [step.step for step in first.steps] == [1, 2]
    assert later
    assert all(step.step < 3 for one in later for step in one.steps)
