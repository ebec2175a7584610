"""What a fork is told before it exists."""

import os

from outlast.health.processes import AGENT_VARIABLE
from outlast.launch.warm import server
from outlast.launch.warm.client import ForkedWorker
from outlast.launch.warm.server import ForkRequest


def test_it_must_not_outlive_the_one_that_forked_it_whoever_its_parent_is_by_now(monkeypatch):
    monkeypatch.setattr(os, "environb", {b"OLD": b"1"})
    monkeypatch.setattr(os, "getppid", lambda: 1)  # the server has died
    one = ForkedWorker(arguments=[], command=[], environ={b"NEW": b"2"}, redirected=[])
    server._set_environment(ForkRequest(worker=one, fds=[], server=4242, say=-1, environ_made={}))
    assert os.environb == {b"NEW": b"2", AGENT_VARIABLE.encode(): b"4242"}
