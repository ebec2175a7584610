"""A script without a session, told to go: people hear that nothing is saved."""

import signal

import pytest
from floor import until

SCRIPT = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
if sys.argv[2] == "listens":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(here / "begun").touch()
while not (here / "end").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("kind", ["is deaf", "listens"])
def test_a_script_without_a_session_is_told_of_or_told(floor, tmp_path, kind):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    agent = floor.outlast("run", "--dir", tmp_path / "job", script, tmp_path, kind)
    until((tmp_path / "begun").exists, "a script", running=agent)
    agent.signal(signal.SIGTERM)
    if kind == "is deaf":
        until(lambda: "nothing is saved so far" in agent.err, "a word", running=agent)
        (tmp_path / "end").touch()
    agent.wait()
    assert ("nothing is saved so far" in agent.err) is (kind == "is deaf")
    assert "Traceback" not in agent.text
