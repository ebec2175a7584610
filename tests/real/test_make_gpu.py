"""``make gpu`` on machines that cannot run it, and its parts as far as they run without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from floor import until

from thorough import ALL

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "benchmarks" / "gpu.py"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu_driver", DRIVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_gone(pid):
    """Whether it runs no more; somebody may have to look after what is left of it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def drive(tmp_path, *more):
    command = [sys.executable, *more, str(DRIVER), "--out", str(tmp_path / "figures.md")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return found, (tmp_path / "figures.md").read_text()


@no_gpu
@pytest.mark.parametrize(
    ("more", "why"), [((), "no GPU"), (("-I", "-S"), "torch is not installed")]
)
def test_without_a_gpu_it_runs_to_its_end_with_one_line_for_each_part(tmp_path, gpu, more, why):
    found, figures = drive(tmp_path, *more)
    assert found.returncode == 0, found.stderr
    parts = gpu.parts_for(gpu.Machine("none"), tmp_path)
    lines = [line for line in found.stdout.splitlines() if ": not run: " in line]
    assert len(lines) == len(parts) == 5
    for part, line in zip(parts, lines, strict=True):
        assert part.name in line
        assert why in line
        assert part.name in figures
    assert "Nothing was measured" in figures


def test_all_parts_together_are_under_nine_minutes(tmp_path, gpu):
    parts = gpu.parts_for(gpu.Machine("none"), tmp_path)
    assert sum(part.limit_s for part in parts) <= gpu.LIMIT_S < 540


def test_a_part_that_does_not_end_is_ended_with_all_that_it_has_started(gpu, capfd):
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    code += "import time; time.sleep(600)"
    done = gpu.run(gpu.Part("endless", [sys.executable, "-c", code], 3.0), "gpu 1/1", 100.0)
    assert done.failed
    assert done.words.startswith("not over within 3 s; last said: ")
    until(lambda: is_gone(int(done.words.rpartition(" ")[2])), "its end")
    assert "at most 3 s, 100 s are left" in capfd.readouterr().out


def test_what_a_part_says_is_kept(gpu, tmp_path):
    table = "| a | b |\n| --- | --- |\n| 1 | 2 |"
    say = f"print('{{}}'); print(); print({table!r})"
    done = gpu.run(gpu.Part("good", [sys.executable, "-c", say], 60.0), "gpu 1/2", 100.0)
    assert (done.tables, done.failed) == ((table,), False)
    bad = gpu.run(gpu.Part("bad", [sys.executable, "-c", "1 / 0"], 60.0), "gpu 2/2", 100.0)
    assert bad.failed
    assert "ZeroDivisionError" in bad.words
    late = gpu.run(gpu.Part("late", ["false"], 60.0), "gpu 3/3", 0.5)
    assert (late.words, late.failed) == ("not run: the 520 s are over", False)
    figures = gpu.report(gpu.Machine("", "a GPU"), [done, bad, late])
    assert table in figures
    assert "| late | not run: the 520 s are over | 0 |" in figures


def test_the_state_is_as_large_as_there_is_room_for(gpu, monkeypatch, tmp_path):
    machine = gpu.Machine("", "a GPU", True, 0)
    for room, size in (((80_000, 128_000, 64_000), 10_000), ((80_000, 20_000, 64_000), 4_000)):
        monkeypatch.setattr(gpu, "rooms", lambda *_, room=room: room)
        assert gpu.size_for(machine, tmp_path) == size
    monkeypatch.setattr(gpu, "rooms", lambda *_: (80_000, 128_000, 900))
    *_, saves, restores = gpu.parts_for(machine, tmp_path)
    assert "less than 1000 MB of state fit" in saves.why_not
    assert saves.why_not == restores.why_not


def test_what_is_missing_is_named_with_what_to_do(gpu, monkeypatch):
    monkeypatch.setitem(gpu.NEEDED, "no_such_module", "no-such-thing")
    assert gpu.missing()[-1] == "no-such-thing"
    monkeypatch.setattr(
        gpu, "LOOK", "print('2.13.0\\n13.0\\nTrue\\nA GPU\\n80000000000 85000000000')"
    )
    assert "make gpu-wheels" in gpu.look().problem
    monkeypatch.delitem(gpu.NEEDED, "no_such_module")
    monkeypatch.setattr(gpu, "missing", list)
    assert gpu.look()[2:] == (True, 80_000_000_000)
    monkeypatch.setattr(gpu, "LOOK", "print('2.9.1\\n13.0\\nTrue\\nA GPU\\n1 2')")
    assert "2.11 or newer" in gpu.look().problem
    monkeypatch.setattr(gpu, "LOOK", "raise RuntimeError('CUDA driver version is insufficient')")
    assert "CUDA driver version is insufficient" in gpu.look().problem


def test_a_kill_and_a_hang_are_gone_on_from_with_the_same_bits():
    """Those of one worker that is killed; ``hangs/`` and ``inprocess/`` show others without it."""
    few = ["--cases", "killed"]
    found = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "gpu_recovery.py"),
            "--device",
            "cpu",
            *few * (not ALL),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}"},
    )
    assert found.returncode == 0, found.stderr
    rows = [
        line
        for line in found.stdout.splitlines()
        if line.startswith(("| killed", "| hung", "| one of"))
    ]
    assert len(rows) == (4 if ALL else 1)
    assert all(row.endswith("| yes |") for row in rows), rows
