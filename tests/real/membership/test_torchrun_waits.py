"""torch's own launcher with our rendezvous: one that waits for a place ends as the job does."""

import os
import tomllib
from pathlib import Path

from floor import until

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
SCRIPT = """
import pathlib, sys, time
here = pathlib.Path(sys.argv[1])
with (here / "begun").open("a") as file:
    file.write("x")
while not (here / "end").exists():
    time.sleep(0.05)
"""


def installed(directory):
    """The package's entry points as they are now, however old the installation is."""
    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["torchrun.handlers"]
    info = directory / "outlast_of_this_tree-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: outlast-of-this-tree\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[torchrun.handlers]", *lines]))
    return os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])


def test_a_machine_that_waits_for_a_place_ends_in_one_line_as_the_job_does(floor, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {"PYTHONPATH": installed(tmp_path / "site")}

    def start():
        return floor.torchrun(
            *("--nnodes", "1", "--nproc-per-node", 1, "--local-addr", "127.0.0.1"),
            *("--rdzv-backend", "outlast", "--rdzv-endpoint", tmp_path / "job"),
            *(script, tmp_path),
            cold=True,  # it looks for entry points as it is imported
            env=env,
        )

    first = start()
    until((tmp_path / "begun").exists, "a worker", running=first)
    second = start()
    until(lambda: "waiting for a place" in second.err, "the second waits", running=second)
    (tmp_path / "end").touch()
    assert [first.wait(), second.wait()] == [0, 0], first.text + second.text
    assert "Traceback" not in second.err
    assert second.err.rstrip().endswith("the job is over")
    assert (tmp_path / "begun").read_text() == "x"  # it has not begun the job once more
