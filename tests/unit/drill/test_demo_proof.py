"""The demo's comparison must be able to fail: each doctored record is found and named."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from outlast.drill.demo import compare

STEPS = 4


def write_run(directory: Path) -> None:
    directory.mkdir()
    for rank in range(2):
        lines = [{"pid": 100 + rank}]
        for step in range(1, STEPS + 1):
            ids = [step * 10 + rank]
            lines.append({"step": step, "loss": (1.0 / step).hex(), "ids": ids, "t": step})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"rank-{rank}.jsonl").write_text(text)
        (directory / f"final-{rank}.json").write_text(json.dumps({"sha256": "ab" * 32}))


def change(path: Path, step: int, **fields: object) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("step") == step:
            line.update(fields)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path: Path) -> tuple[SimpleNamespace, SimpleNamespace]:
    write_run(tmp_path / "undisturbed")
    write_run(tmp_path / "disturbed")
    return (
        SimpleNamespace(traces=tmp_path / "undisturbed", exit_codes=[0], struck=[]),
        SimpleNamespace(traces=tmp_path / "disturbed", exit_codes=[75, 0], struck=[1, 2, 3]),
    )


def holds(runs: tuple[SimpleNamespace, SimpleNamespace], recovered: int = 3) -> list[bool]:
    return [check.holds for check in compare(*runs, STEPS, recovered)]  # type: ignore[arg-type]


def test_equal_runs_pass(runs) -> None:
    assert holds(runs) == [True] * 4


def test_a_step_done_twice_with_the_same_result_passes(runs) -> None:
    path = runs[1].traces / "rank-0.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[2] + "\n")
    assert holds(runs) == [True] * 4


@pytest.mark.parametrize(
    ("fields", "which"),
    [
        ({"loss": (0.5 + 2**-52).hex()}, 1),  # the last bit of one loss
        ({"ids": [999]}, 3),
        ({"ids": []}, 3),
    ],
)
def test_a_different_step_is_found(runs, fields: dict[str, object], which: int) -> None:
    change(runs[1].traces / "rank-0.jsonl", 2, **fields)
    assert holds(runs) == [index != which for index in range(4)]


def test_a_repeat_in_both_runs_is_found(runs) -> None:
    for run in runs:
        change(run.traces / "rank-1.jsonl", 3, ids=[20])
    assert holds(runs) == [True, True, True, False]


def test_a_replay_that_differs_is_found_though_the_last_time_agrees(runs) -> None:
    path = runs[1].traces / "rank-0.jsonl"
    lines = path.read_text().splitlines()
    odd = json.dumps({**json.loads(lines[2]), "loss": (9.0).hex()})
    path.write_text("\n".join([lines[0], lines[1], odd, *lines[2:]]) + "\n")
    assert holds(runs)[1] is False


def test_a_missing_step_is_found(runs) -> None:
    path = runs[1].traces / "rank-1.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    assert holds(runs)[1] is False


def test_other_weights_are_found(runs) -> None:
    (runs[1].traces / "final-1.json").write_text(json.dumps({"sha256": "cd" * 32}))
    assert holds(runs) == [True, True, False, True]


def test_a_missing_end_is_found(runs) -> None:
    (runs[1].traces / "final-0.json").unlink()
    assert holds(runs)[2] is False


def test_faults_that_did_not_strike_are_found(runs) -> None:
    runs[1].exit_codes = [0]
    assert holds(runs)[0] is False
    runs[1].exit_codes = [75, 0]
    assert holds(runs, recovered=2)[0] is False
