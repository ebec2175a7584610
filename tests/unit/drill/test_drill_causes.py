"""What a drill reads of a script's source, and of two processes' records."""

import pytest

from outlast.drill.compare import RunHistory, StepDifference, first_difference
from outlast.drill.proof import conditions as of
from outlast.drill.proof.causes import (
    TRIED_WORDS,
    TriedChange,
    cause_of,
    next_try,
    still_in_order,
    suspect_kernel,
    suspects,
)
from outlast.drill.proof.script_lines import ScriptLines
from outlast.drill.record import (
    COMPILED,
    NotedCall,
    NotedOperations,
    ReachSeen,
    StateFound,
    StepRecord,
    WorkerBegun,
    WorkerRecord,
)
from outlast.drill.workplace import JobScript

SOURCE = """import outlast

class Data:
    def __init__(self):
        self.given = 0

def main():
    running: float = 1.0
    names = {"a", "b"}
    for one in names:
        print(one)
    with outlast.session(model=1) as session:
        for number, batch in enumerate(session.steps([])):
            pass
"""


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return ScriptLines(JobScript(name=str(path)))


def test_lines_of_a_script(lines):
    assert lines.assigned("running", "main") == "train.py:8"
    assert lines.assigned("given") == "train.py:5"
    assert lines.called("session") == "train.py:12"
    assert lines.set_gone_through() == "train.py:10"
    assert lines.text("train.py:5") == "self.given = 0"
    assert lines.uses("enumerate")
    assert not lines.uses("DataLoader")
    assert lines.assigned("nothing") == ""
    assert lines.text("other.py:5") == ""


def test_a_script_that_cannot_be_read_has_no_lines(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("this is not Python")
    assert ScriptLines(JobScript(name=str(path))).called("session") == ""
    assert ScriptLines(JobScript(name="no.such.module", is_module=True)).called("session") == ""


def operations(*rows):
    return [NotedOperations(step=1, operations=[(*row, "train.py:3") for row in rows])]


def test_the_first_kernel_that_answers_twice():
    one = operations(("empty", "?", "a"), ("mul", "1", "b"), ("index_put", "2", "c"))
    other = operations(("empty", "!", "z"), ("mul", "1", "b"), ("index_put", "2", "d"))
    assert suspect_kernel(one, other).name == "index_put"
    assert suspect_kernel(one, one) is None
    assert suspect_kernel(one, operations(("mul", "1", "x"))) is None


def record(steps, *, found=None, pid=1, rank=0, reached=()):
    begun = WorkerBegun(
        pid=pid, rank=rank, world_size=1, attempt=1, machine="m", t=float(pid), versions={}
    )
    return WorkerRecord(begun, found, steps, None, reached=reached)


def step(number, **changed):
    known = {
        "losses": [(1.0 / number).hex()],
        "inputs": [f"batch {number}"],
        "state": {"model.w": f"w{number}", "optimizer.model.w.step": f"s{number}"},
        "random": {"torch": f"t{number}", "python": "p"},
        "random_before": {"torch": f"t{number - 1}", "python": "p"},
        "rates": [0.1],
    }
    return StepRecord(step=number, t=float(number), rank=0, world_size=1, **{**known, **changed})


def found_at(number, **changed):
    known = {"state": {"model.w": f"w{number}"}, "random": {"torch": f"t{number}"}}
    return StateFound(step=number, is_counted=True, **{**known, **changed})


UNDISTURBED = [step(number) for number in range(1, 6)]


def compared(steps, found):
    one = RunHistory([record(UNDISTURBED, found=found_at(0))])
    first = record(UNDISTURBED[:2], found=found_at(0))
    other = RunHistory([first, record(steps, found=found, pid=2)], one)
    return first_difference(one, other, 5, is_strict=True)


def test_runs_that_are_the_same():
    assert compared(UNDISTURBED[2:], found_at(2)) is None


def test_a_generator_that_nobody_draws_from_makes_no_difference():
    other = [step(n, random_before={"torch": f"t{n - 1}", "python": "other"}) for n in (3, 4, 5)]
    assert compared(other, found_at(2)) is None


@pytest.mark.parametrize(
    ("changed", "found", "part", "names"),
    [
        ({"inputs": ["x"], "losses": ["0x1p+0"]}, {}, "batch", []),
        ({"random_before": {"torch": "x"}}, {}, "random numbers", ["torch"]),
        ({"losses": ["0x1p+0"]}, {"state": {"model.w": "x"}}, "state before", ["model.w"]),
        ({"rates": [0.2], "losses": ["0x1p+0"]}, {}, "learning rate", []),
        ({"losses": ["0x1p+0"], "state": {}}, {}, "loss", []),
        ({"rates": []}, {}, "learning rate", ["of 1 and of 0 optimizers' steps"]),
        (
            {"state": {"model.w": "w3", "optimizer.model.w.step": "x"}},
            {},
            "state",
            ["optimizer.model.w.step"],
        ),
    ],
)
def test_what_differs_first_is_what_is_nearest_to_the_cause(changed, found, part, names):
    other = [step(3, **changed), *UNDISTURBED[3:]]
    differs = compared(other, found_at(2, **found))
    assert (differs.step, differs.rank, differs.part, differs.names) == (3, 0, part, names)


def test_numbers_are_shown_as_far_as_they_differ():
    far = StepDifference(3, 0, "loss", [], ("0x1p+0", "0x1p+1"))
    near = StepDifference(3, 0, "loss", [], ((1.0).hex(), (1.0 + 2**-52).hex()))
    assert far.words == "from step 3 on: the loss on rank 0, 1 and 2"
    assert near.words == "from step 3 on: the loss on rank 0, in its last bits"


def test_suspects_are_grouped_by_the_object_that_gives_its_state():
    owners = {"ema.a": ["ema", "Ema"], "ema.b": ["ema", "Ema"]}
    was = ReachSeen(
        step=3, values={"ema.a": "1", "ema.b": "2", "main().x": "3", "same": "4"}, owners=owners
    )
    now = ReachSeen(
        step=3, values={"ema.a": "0", "ema.b": "0", "main().x": "0", "same": "4"}, owners=owners
    )
    later = ReachSeen(step=4, values={"same": "5"}, owners={})
    one, other = record([], reached=[was, later]), record([], reached=[now], pid=2)
    found = suspects([one], [other])
    assert [(s.name, s.paths, s.kind) for s in found] == [
        ("ema", ["ema.a", "ema.b"], "Ema"),
        ("main().x", ["main().x"], ""),
    ]


def test_what_is_tried_first_is_what_makes_the_first_difference():
    assert still_in_order(StepDifference(1, 0, "learning rate", []))[0] == of.CLOCK
    assert still_in_order(StepDifference(1, 0, "random numbers", ["python"]))[0] == of.SEED_PYTHON
    assert len(set(still_in_order(StepDifference(1, 0, "loss", [])))) == 10


def test_a_step_that_is_never_made_again_is_a_difference():
    differs = compared(UNDISTURBED[2:4], found_at(2))
    assert (differs.step, differs.part) == (5, "end")
    assert "never made it" in differs.words


def test_where_no_cause_was_found_the_next_thing_to_try_is_said():
    first = StepDifference(7, 0, "loss", [])
    assert "without torch.compile" in next_try(first, [], is_compiled=True)
    tried = [TriedChange(what=TRIED_WORDS[one], helped=False) for one in still_in_order(first)]
    said = next_try(first, tried[:-2], is_compiled=False)
    assert said.endswith(f"not tried yet are {tried[-2].what}, {tried[-1].what}")
    assert "--steps 7" in next_try(first, tried, is_compiled=False)


def test_an_operation_inside_of_a_compiled_function_has_no_name():
    calls = [NotedCall(what=COMPILED, where="")]
    lines = ScriptLines(JobScript(name="nowhere.py"))
    assert "inside of what torch.compile has made" in cause_of(of.DETERMINISTIC, calls, lines).what
    named = [*calls, NotedCall(what="kernel index_add", where="t.py:3")]
    cause = cause_of(of.DETERMINISTIC, named, lines)
    assert (cause.what, cause.where) == (
        "an operation adds in another order each time: index_add",
        "t.py:3",
    )
    assert "the clock" in cause_of(of.CLOCK, calls, lines).what, "a compiled function is no clock"
