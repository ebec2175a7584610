"""The command watcher with real processes: exit codes, output, and what will not end."""

import os
import sys
import time
from pathlib import Path

import pytest

from outlast.notice.manual import CommandWatcher
from outlast.notice.source import run

LONG_S = 60.0
FDS = Path("/proc/self/fd")


class Clock:
    t = 1_505_722_800.0

    def __call__(self):
        return self.t


def shell(script, **options):
    return CommandWatcher(["/bin/sh", "-c", script], **{"limit_s": LONG_S} | options)


def test_one_is_none():
    watcher = shell("echo ignored; exit 1")
    assert watcher.poll() is None
    assert (watcher.polls, watcher.errors) == (1, 0)


def test_zero_is_a_notice_and_its_first_line_the_detail():
    notice = shell("echo the site wants it back; echo more").poll()
    assert (notice.source, notice.action, notice.early) == ("command", "terminate", False)
    assert (notice.deadline_t, notice.detail) == (None, "the site wants it back")
    assert shell("exit 0").poll().detail == "/bin/sh … says so"


def test_json_says_more():
    clock = Clock()
    notice = shell("""echo '{"action": "stop", "in_s": 90}'""", clock=clock).poll()
    assert (notice.action, notice.deadline_t) == ("stop", clock.t + 90)


def test_said_again_it_is_the_same_notice_and_a_countdown_does_not_move_it(tmp_path):
    left = tmp_path / "left"
    clock = Clock()
    watcher = shell(f"""echo "{{\\"in_s\\": $(cat {left})}}" """, clock=clock)
    left.write_text("90")
    first = watcher.poll()
    clock.t += 30
    assert watcher.poll() == first  # the same words, later
    left.write_text("59")
    assert watcher.poll() == first  # a countdown
    left.write_text("20")
    assert watcher.poll().deadline_t == clock.t + 20


def test_a_notice_that_was_taken_back_is_given_anew(tmp_path):
    gone = tmp_path / "gone"
    clock = Clock()
    watcher = shell(f"""test -e {gone} && exit 1; echo '{{"in_s": 9}}'""", clock=clock)
    first = watcher.poll()
    gone.touch()
    assert watcher.poll() is None
    gone.unlink()
    clock.t += 60
    assert watcher.poll().deadline_t == first.deadline_t + 60


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 2", "it exited with 2; 0 is a notice and 1 is none"),
        ("exit 127", "it exited with 127"),
        ("kill -9 $$", "it was ended by signal 9"),
    ],
)
def test_any_other_end_is_an_error(script, said):
    watcher = shell(script)
    assert watcher.poll() is None
    assert watcher.errors == 1
    assert said in watcher.last_error


def test_a_program_that_is_not_there_is_an_error():
    watcher = CommandWatcher(["/nowhere/ask", "the site"])
    assert watcher.poll() is None
    assert watcher.last_error.startswith("/nowhere/ask …: ")
    assert "No such file" in watcher.last_error


@pytest.mark.parametrize(
    "script",
    ["trap '' TERM; sleep 600", "yes", "sleep 600 & wait", "exec 1>&-; sleep 600"],
)
def test_what_takes_too_long_is_killed_with_all_its_children(tmp_path, script):
    group = tmp_path / "group"
    watcher = shell(f"echo $$ > {group}; {script}", limit_s=0.5)
    assert watcher.poll() is None
    assert "killed, as it took over 0.5 s" in watcher.last_error
    wait_until_gone(int(group.read_text()))


def wait_until_gone(group):
    give_up = time.monotonic() + LONG_S
    while time.monotonic() < give_up:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("something of it is left")


def test_a_child_left_behind_neither_delays_the_answer_nor_stays(tmp_path):
    group = tmp_path / "group"
    notice = shell(f"echo $$ > {group}; sleep 600 & echo yes").poll()
    assert notice.detail == "yes"
    wait_until_gone(int(group.read_text()))


def test_output_is_bounded_and_an_empty_input_is_given():
    script = "import sys; sys.stdin.read(); sys.stdout.write('x' * 1_000_000)"
    ended = run([sys.executable, "-c", script], limit_s=LONG_S, max_bytes=1000)
    assert ended == (0, b"x" * 1000)


def test_no_descriptor_is_left_open():
    before = list(FDS.iterdir())
    for _ in range(5):
        shell("echo x").poll()
        shell("sleep 600", limit_s=0.05).poll()
    assert len(list(FDS.iterdir())) <= len(before)
