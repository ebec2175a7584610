"""Lines of torch's C++ that say nothing to a person do not reach the log; all else does.

In a network without names torch cannot look up who has connected to a store, and says so each time.
"""

import pytest
from floor import SCRIPTS

NOTHING = "The hostname of the client socket cannot be retrieved"
CHOSEN = {"TORCH_CPP_LOG_LEVEL": "WARNING"}


@pytest.mark.parametrize("env", [None, CHOSEN], ids=["as it comes", "the owner's level"])
def test_torchs_warnings_of_stores_are_not_shown_unless_asked_for(machines, tmp_path, env):
    (host,) = machines(1)
    agent = host.outlast(
        *("run", "--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 0),
        *("--rdzv-backend", "outlast", "--local-addr", host.address),
        *("--dir", tmp_path / "job", SCRIPTS / "words.py"),
        cold=True,  # torch reads the level as it is imported
        env=env,
    )
    assert agent.wait() != 0
    assert (NOTHING in agent.text) == (env is CHOSEN), agent.text
    assert "ValueError: the script's own error" in agent.text
    assert "Test message for TORCH_WARN" in agent.text
