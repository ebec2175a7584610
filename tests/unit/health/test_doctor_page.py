"""What people read, and what programs read."""

import msgspec

from outlast.health.doctor import examination as page
from outlast.health.doctor.examination import Examined
from outlast.policy.fitness import CheckResult

SOUND = CheckResult(
    name="storage local", status="ok", seen="fast enough", figures={"free_bytes": 7}
)
TIRED = CheckResult(name="memory", status="warning", seen="not much of it", todo="free some")
SICK = CheckResult(name="clock", status="failed", seen="30 s ahead", todo="set it")
HINT = CheckResult(name="notice", status="skipped", seen="not known", todo="say --state")


def text(*findings, width=80, **more):
    examined = Examined(
        machine="a", fit=SICK not in findings, findings=list(findings), seconds=1.25, **more
    )
    return [line for _, line in page.lines(examined, width)]


def test_a_line_for_each_finding_and_what_to_do_below():
    assert text(SOUND, TIRED, HINT) == [
        "✔  storage local  fast enough",
        "!  memory         not much of it",
        "                  → free some",
        "–  notice         not known",
        "                  → say --state",
        "a is fit, 1 warning (in 1.2 s)",
    ]


def test_the_last_line_says_why_not():
    assert text(SICK)[-1] == "a should not start this job: clock (in 1.2 s)"
    assert text(SOUND, enough=False)[-1] == "a is fit, but too few machines are (in 1.2 s)"
    assert "!  b is left out: versions" in text(SOUND, others_sick={"b": "versions"})


def test_long_findings_are_wrapped_below_themselves():
    long = CheckResult(name="x", status="failed", seen="word " * 30, todo="act " * 30)
    lines = "\n".join(text(long, width=60)).splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert lines[1].startswith("      word")


def test_programs_get_the_same_in_one_object():
    examined = Examined(machine="a", fit=False, findings=[SOUND, SICK], seconds=1.0)
    answer = msgspec.json.decode(msgspec.json.encode(page.to_json(examined)))
    assert answer["exit_code"] == 1
    assert answer["findings"][0]["figures"] == {"free_bytes": 7}
    stopped = Examined(machine="a", fit=False, findings=[], seconds=0.0, stopped="SIGTERM")
    assert stopped.exit_code == 75
