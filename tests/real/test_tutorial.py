"""The tutorial, typed as it stands in docs/tutorial.md, with shorter pauses in its script."""

import re
import signal
import subprocess
from pathlib import Path

from floor import until

PAGE = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
ALONE = {"OUTLAST_RESUME": ""}  # tests go on with any command's job; a person's must be the same


def fences(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def typed():
    """The commands, and what the page says that they print."""
    for fence in fences("console"):
        for part in re.split(r"^\$ ", fence, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed.strip()


def count(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def disturb(started, losses):
    """What the page asks for while the first run is under way: a kill, and Ctrl-C."""
    until(lambda: count(losses) > 30, "31 steps", running=started)
    (worker,) = re.findall(r"worker: process (\d+)", started.out)
    subprocess.run(["kill", "-9", worker], check=True)
    until(lambda: started.out.count("worker: process") == 2, "a new worker", running=started)
    before = count(losses)
    until(lambda: count(losses) > before + 30, "31 steps more", running=started)
    started.signal_group(signal.SIGINT)
    return started.wait()


def test_the_tutorial(floor, tmp_path):
    (script,) = fences("python")
    assert "time.sleep(0.1)" in script
    (tmp_path / "train.py").write_text(script.replace("time.sleep(0.1)", "time.sleep(0.01)"))
    commands, code, killed = list(typed()), None, False
    assert len(commands) == 12
    for command, printed in commands:
        said = ""
        if command == "kill -9 PID":
            assert killed
        elif command == "echo $?":
            said = str(code)
        elif command.startswith("outlast "):
            started = floor.outlast(*command.split()[1:], env=ALONE)
            is_first = command.startswith("outlast run") and not killed
            code = disturb(started, tmp_path / "losses.txt") if is_first else started.wait()
            killed = killed or is_first
            assert code == (75 if is_first else 0), started.text
        else:
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            said = done.stdout.strip()
        assert said == printed, command
    assert count(tmp_path / "disturbed.txt") > count(tmp_path / "disturbed-once.txt") == 300
