"""What the kernel, py-spy and faulthandler say, read."""

import faulthandler
import os
import signal
import subprocess
import sys
import time

from outlast.health import hang
from outlast.health.hang import _parsed
from outlast.health.processes import ProcessLook, look_at, moved


def test_faulthandlers_words(tmp_path):
    path = tmp_path / "answer"

    def somewhere():
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    somewhere()
    found = _parsed(path.read_text())
    assert found.frames[0].function == "somewhere"
    assert found.frames[0].file == __file__
    assert found.frames[0].line > 1
    assert _parsed("no such thing").frames == ()


def test_a_process_that_waits_does_not_move_and_one_that_computes_does():
    before = ProcessLook(at_s=10.0, state="S", main_s=1.0, whole_s=2.0)
    still = ProcessLook(at_s=10.5, state="S", main_s=1.01, whole_s=2.01)
    busy = ProcessLook(at_s=10.5, state="R", main_s=1.4, whole_s=2.5)
    assert not moved(before, still).main
    assert moved(before, busy).main
    assert moved(before, busy).whole


def test_who_gets_no_core_is_starved_and_who_gets_half_of_one_is_not():
    before = ProcessLook(at_s=10.0)
    assert moved(before, ProcessLook(at_s=11.0, delayed_s=0.8, main_s=0.2)).starved
    assert not moved(before, ProcessLook(at_s=11.0, delayed_s=0.4, main_s=0.6)).starved


def test_bytes_that_move_are_movement():
    before = ProcessLook(at_s=10.0)
    assert moved(before, ProcessLook(at_s=11.0, main_bytes=1 << 20)).main
    assert moved(before, ProcessLook(at_s=11.0, below_bytes=1 << 20)).below


def test_this_process_is_seen():
    found = look_at(os.getpid())
    assert found.state in "RS"
    assert found.whole_s >= found.main_s > 0
    assert look_at(2**30).state == ""


def test_a_process_that_does_not_answer_signals_is_not_sent_one(tmp_path, monkeypatch):
    monkeypatch.setattr(hang, "_spy", lambda: "")
    sent = []
    monkeypatch.setattr(hang.os, "kill", lambda *what: sent.append(what))
    assert hang.take(os.getpid(), tmp_path / "answer").frames == ()
    assert sent == []


def test_who_is_let_run_often_moves_and_its_pulse_does_not_count():
    before = ProcessLook(at_s=10.0, pid=7, runs={7: 10, 8: 100}, below_runs={9: 0})
    pulse = ProcessLook(at_s=10.4, pid=7, runs={7: 10, 8: 103, 30: 500}, below_runs={9: 1})
    sends = ProcessLook(at_s=10.4, pid=7, runs={7: 30, 8: 103}, below_runs={9: 0})
    other = ProcessLook(at_s=10.4, pid=7, runs={7: 10, 8: 130}, below_runs={9: 0})
    below = ProcessLook(at_s=10.4, pid=7, runs={7: 10, 8: 103}, below_runs={9: 40})
    assert (moved(before, pulse).main, moved(before, pulse).still) == (False, True)
    assert (moved(before, sends).main, moved(before, sends).still) == (True, False)
    assert (moved(before, other).main, moved(before, other).still) == (False, False)
    assert (moved(before, below).below, moved(before, below).still) == (True, False)


def test_what_was_started_by_what_was_started_counts():
    # Two shells deep, as a compiler behind its driver.
    inner = f"{sys.executable} -c 'while True: pass'"
    with subprocess.Popen(
        ["sh", "-c", f'sh -c "{inner}; true"; true'], start_new_session=True
    ) as p:
        try:
            deadline_s = time.monotonic() + 20
            while time.monotonic() < deadline_s:
                before = look_at(p.pid)
                time.sleep(0.1)
                if moved(before, look_at(p.pid)).below:
                    break
            else:
                raise AssertionError("the grandchild was not seen")
        finally:
            os.killpg(p.pid, signal.SIGKILL)
