"""A job that goes on at an epoch's last step comes to its end, as the undisturbed run does."""

import pytest
from floor import SCRIPTS, Job
from losses import IN_PROCESS

from thorough import ALL

SCRIPT = SCRIPTS / "epoch_ends.py"
STEPS = 9  # of three epochs
AGAIN = "hands out a batch once more, and what its body does changes nothing"
SELDOM = [
    *((form, "processes") for form in ("epochs", "function")),
    *((form, loader) for form in ("epochs", "range") for loader in ("rows", "stream", "stateful")),
    *(("while", "outlast"), ("until", "stock"), ("epochs", "outlast"), ("range", "stock")),
    ("epochs", "stock"),
]
KINDS = [
    *(("while", "stateful", 6), ("range", "rows", 6), ("accumulates", "stock", 3)),
    ("epochs", "processes", 6),
]
MORE_KINDS = [
    *(("until", "batches", 9), ("epochs", "batches", 3), ("epochs", "stream", 6)),
    ("while", "across", 5),
]


def run(floor, *arguments, code=0, **env):
    process = floor.warm(SCRIPT, *arguments, env={"OUTLAST_DIR": "job", **env})
    assert process.wait() == code, process.text
    return process


def result(process):
    """Step → the loss of its last body; and the line of the end, [] without one."""
    lines = [line.split() for line in process.out.splitlines()]
    losses = {int(line[1]): line[2] for line in lines if line[0] == "step"}
    return losses, next((line for line in lines if line[0] == "end"), [])


def goes_on_behind(floor, form, loader, steps):
    """It dies behind each of these steps, in one job after the other; what every start said."""
    losses, end = result(run(floor, form, loader, OUTLAST_DIR="calm"))
    said = []
    for before, step in zip([0, *steps], [*steps, 0], strict=True):
        dies = {"DIE": step, "EVERY": step - before, "code": -9} if step else {}
        going = run(floor, form, loader, **dies)
        found, its_end = result(going)
        assert min(found) == before, going.text
        # Each body is that of a step, but for the one that a void step has run.
        found.pop(STEPS, None)
        real = {number: loss for number, loss in found.items() if number != step}
        assert real == {number: losses[number] for number in real}, going.text
        assert its_end == ([] if step else end), going.text
        said.append(going.err)
    return said


@pytest.mark.parametrize(
    ("form", "loader"),
    [("function", "outlast"), *(SELDOM if ALL else [])],
)
def test_it_goes_on_behind_every_step(floor, form, loader):
    """Each code behind a loop reads a loss, or divides by a number of batches."""
    said = goes_on_behind(floor, form, loader, range(1, STEPS + 1))
    if form != "until":
        for step, text in enumerate(said):  # in range() loops that had ended come again too
            is_end = step > 0 and step % 3 == 0
            assert text.count(AGAIN) == (is_end or (form != "epochs" and step > 3)), step


@pytest.mark.parametrize(("form", "loader", "step"), KINDS + MORE_KINDS * ALL)
def test_loaders_of_all_kinds_give_their_batch_again(floor, form, loader, step):
    _, again = goes_on_behind(floor, form, loader, [step])
    assert again.count(AGAIN) == 1
    assert "samples that follow are not those" not in again


def test_what_is_done_twice_is_counted_once(floor, tmp_path):
    goes_on_behind(floor, "epochs", "outlast", [3, 6])
    audit = Job(tmp_path / "job").audit()
    assert audit["proved"], audit["faults"]


@pytest.mark.parametrize("form", ["range", *(["function"] if ALL else [])])
def test_a_finished_job_is_asked_for_more_epochs(floor, form):
    """By a file, say: the command is the same."""
    _, end = result(run(floor, form, "stock", EPOCHS="3", OUTLAST_DIR="calm"))
    run(floor, form, "stock", EPOCHS="2")
    assert result(run(floor, form, "stock", EPOCHS="3", OUTLAST_RESUME=""))[1] == end


def test_ranks_have_the_same_void_step(floor):
    """Their bodies send gradients and buffers."""

    def ranks(code=0, **env):
        started = floor.ranks(2, SCRIPT, "range", "stock", env={"OUTLAST_DIR": "job", **env})
        assert [one.wait() for one in started] == [code] * 2, "\n".join(one.text for one in started)
        return [result(one)[1] for one in started]

    calm = ranks(OUTLAST_DIR="calm")
    ranks(code=-9, DIE=6, EVERY=6)
    assert ranks() == calm


@pytest.mark.parametrize("form", ["range", *(["epochs"] if ALL else [])])
def test_who_takes_a_lost_ones_place_has_its_void_steps_alone(floor, form):
    """The others are further, and answer nothing that its bodies would send."""

    def ends(lost, directory):
        command = ("run", "--nproc-per-node", 2, "--dir", directory, SCRIPT, form, "stock")
        running = floor.outlast(*command, env={**IN_PROCESS, "LOST": lost})
        assert running.wait() == 0, running.text
        return sorted(line for line in running.out.splitlines() if line.startswith("end")), running

    calm, _ = ends(1000, "calm")
    found, running = ends(6, "job")
    assert found == calm, running.text
    assert "resumed from step 6" in running.err
    assert "(from 1 worker that survived)" in running.err
    assert f"rank 1: step 6 is at the end of a loop: it {AGAIN}" in running.err


HELD = """import os, signal, torch, outlast

data = torch.utils.data.TensorDataset(torch.ones(2, 1))
loader = torch.utils.data.DataLoader(data, 1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(number):
    for epoch in session.epochs(2):
        held.append(session.steps(loader))  # it outlives the error
        for (x,) in held[-1]:
            before = model.weight.item()
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            print(session.step, model.weight.item() != before, flush=True)
            if session._void_steps.is_running:
                raise ValueError
        assert isinstance(before, float)
        if not session.resumed and not number:
            while not list(session._settings.dir.glob("checkpoints/*02.a*/manifest.json")):
                pass
            os.kill(os.getpid(), signal.SIGKILL)


held = []
for number in range(2):
    try:
        given = {"model": model, "optimizer": optimizer, "dir": f"job-{number}", "every": 2}
        with outlast.session(**given) as session:
            train(number)
    except ValueError:
        print("left", flush=True)
"""


def test_an_error_in_a_void_step_ends_it(floor, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HELD)
    assert floor.warm(script).wait() == -9
    again = floor.warm(script)
    assert again.wait() == 0, again.text
    assert again.out.splitlines() == ["2 False", "left", *(f"{step} True" for step in range(4))], (
        again.text
    )
