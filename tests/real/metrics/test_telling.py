"""People are told of a job's incidents: once, in few messages, and training never waits for it."""

import json
import os
import re
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from aiosmtpd.controller import Controller
from floor import TRAIN, Job, free_port, until

from outlast.health.exporter import CadenceSetting, TellSetup
from outlast.health.send import NOT_FILLED
from outlast.ledger.file import Ledger, read_events
from outlast.metrics.folded import JobFold
from outlast.metrics.teller import Teller
from outlast.prices import NO_PRICES

STEPS = 120
SECRET = "s3cr3tpath"


class Hook(ThreadingHTTPServer):
    """A webhook that keeps what it is told; it may answer otherwise, or hang."""

    def __init__(self):
        self.told, self.status, self.hangs = [], 200, threading.Event()
        self.hangs.set()
        hook = self

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.hangs.wait(60)
                if hook.status == 200:
                    hook.told.append(json.loads(body))
                self.send_response(hook.status)
                self.end_headers()

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"json://user:{SECRET}@127.0.0.1:{self.server_port}/{SECRET}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture(name="hook")
def _hook():
    hook = Hook()
    yield hook
    hook.hangs.set()
    hook.shutdown()
    hook.server_close()


def start(floor, job, urls, *more, cold=False, **env):
    command = ("run", "--nproc-per-node", 2, "--dir", job.directory, TRAIN, job.records, STEPS)
    options = ("--light", "--every", "20 steps", "--pause", "0.02", *more)
    variables = {"OUTLAST_TELL_URLS": urls, "OUTLAST_TELL_GROUP": "1 s", **env}
    return floor.outlast(*command, *options, env=variables, cold=cold)


def test_a_killed_worker_is_told_with_its_cost_and_no_secret_is_written(floor, tmp_path, hook):
    job = Job(tmp_path / "job", 2)
    process = start(floor, job, hook.url, OUTLAST_PRICE_SPOT="0.7")
    until(lambda: job.events("commit"), "a commit", running=process)
    os.kill(floor.workers()[1], signal.SIGKILL)
    assert process.wait() == 0, process.text
    said = "\n".join(one["message"] for one in hook.told)
    assert "SIGKILL" in said
    assert "back after" in said
    assert re.search(r"cost: .*0\.\d\d at 0\.7 per machine and hour", said)
    assert "the job has finished" in hook.told[-1]["message"]
    assert said.count("back after") == 1
    assert len(hook.told) <= 3
    for path in Path(job.directory).rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in process.text


WHY = {
    "500": "it answered with status 500",
    "hangs": "no answer",  # apprise has a limit of its own, and we have another
    "gone": "no connection, or no answer",
}


@pytest.mark.parametrize("how", sorted(WHY))
def test_a_server_that_fails_costs_training_nothing(floor, tmp_path, hook, how):
    job, url = Job(tmp_path / "job", 2), hook.url
    if how == "500":
        hook.status = 500
    elif how == "hangs":
        hook.hangs.clear()
    else:
        url = f"json://127.0.0.1:1/{SECRET}"
    process = start(floor, job, url)
    until(lambda: job.events("commit"), "a commit", running=process)
    os.kill(floor.workers()[1], signal.SIGKILL)
    assert process.wait() == 0, process.text
    assert not hook.told
    assert [final["step"] for final in job.finals()] == [STEPS, STEPS]
    if how != "hangs":
        assert "tell.urls: a message was not taken (json://127.0.0.1" in process.text
    assert SECRET not in process.text
    (event,) = job.events("not_told")
    assert (event["addresses"], event["of"]) == (1, 1)
    assert WHY[how] in event["why"]
    report = floor.outlast("report", job.directory)
    assert report.wait() == 0, report.text
    (line,) = [one for one in report.out.splitlines() if "messages" in one]
    assert "1 message could not be sent since 20" in line
    assert WHY[how] in line
    assert SECRET.encode() not in (job.directory / "ledger.jsonl").read_bytes()


def test_an_agent_that_is_killed_is_told_by_what_outlives_it(floor, tmp_path, hook):
    job = Job(tmp_path / "job", 2)
    process = start(floor, job, hook.url)
    until(lambda: job.events("commit"), "a commit", running=process)
    until((job.directory / "tell/told.json").exists, "a term", running=process)
    process.signal(signal.SIGKILL)
    until(lambda: hook.told, "a message")
    assert "has died without a word" in hook.told[0]["message"]


class Mail:
    """Takes messages as an SMTP server does."""

    def __init__(self):
        self.told = []

    async def handle_DATA(self, _, session, envelope):  # noqa: N802 - aiosmtpd calls it so
        self.told.append(envelope.content.decode())
        return "250 OK"


def test_mail(floor):
    mail = Mail()
    controller = Controller(mail, hostname="127.0.0.1", port=free_port())
    controller.start()
    try:
        where = f"mailto://127.0.0.1:{controller.port}?from=a@example.com&to=b@example.com"
        process = floor.outlast("tell", "--test", env={"OUTLAST_TELL_URLS": where})
        assert process.wait() == 0, process.text
    finally:
        controller.stop()
    assert "Outlast can reach you" in mail.told[0]


def test_addresses_are_checked_before_anything_is_sent(floor):
    expected = {
        "json://hooks.example.com/path": None,
        "json://user:pa$word@hooks.example.com/": None,  # a password may have any letter
        "what://here": "apprise knows no such address",
        "json://hooks.example.com/$TOKEN": NOT_FILLED,
        "json://hooks.example.com/a/${TOKEN}?x=1": NOT_FILLED,
        "mailto://user:$PASSWORD@example.com?to=a@example.com": NOT_FILLED,
    }
    process = floor.outlast("tell", "--json", env={"OUTLAST_TELL_URLS": " ".join(expected)})
    assert process.wait() == 1, process.text
    found = [one["problem"] for one in json.loads(process.out)["addresses"]]
    assert found == list(expected.values())


def teller(directory, hook, node="here", **more):
    setup = TellSetup(least="info", group_s=0.2, per_hour=more.pop("per_hour", 12), is_agent=True)
    about = {"job": "j", "directory": directory, "node": node, "prices": NO_PRICES, "say": print}
    return Teller(setup, (hook.url,), JobFold(CadenceSetting()), **about, **more)


def turn(*tellers, until_told, hook):
    until(lambda: [one.turn() for one in tellers] and len(hook.told) >= until_told, "a message")
    for _ in range(30):
        [one.turn() for one in tellers]
        time.sleep(0.02)


def storm(directory, num):
    """So many storms of a slow rank, each of it an event."""
    ledger = Ledger(directory, job="j", attempt=1)
    for step in range(num):
        ledger.append("verify_failed", step=step, file=f"f{step}", tier="local", reason="damaged")
    ledger.close()
    return list(read_events(directory))[-num:]


def test_a_storm_is_few_messages_and_a_second_machine_and_a_restart_repeat_nothing(tmp_path, hook):
    first, second = teller(tmp_path, hook, per_hour=3), teller(tmp_path, hook, "there", per_hour=3)
    first.turn()
    for round_ in range(4):
        events = storm(tmp_path, 50)
        first.take(events)
        second.take(events)
        turn(first, second, until_told=min(round_ + 1, 2), hook=hook)
    assert len(hook.told) == 2  # the third is kept for the end
    assert "and 42 more" in hook.told[0]["message"]
    first.end()
    again = teller(tmp_path, hook, per_hour=5)
    again.take(read_events(tmp_path))
    turn(again, until_told=3, hook=hook)
    assert len(hook.told) == 3
    assert "and 92 more" in hook.told[2]["message"]
    again.end()
    last = teller(tmp_path, hook, per_hour=5)
    last.take(read_events(tmp_path))
    for _ in range(40):
        last.turn()
        time.sleep(0.02)
    assert len(hook.told) == 3


def noted(directory):
    return [event for event in read_events(directory) if event.event == "not_told"]


def test_a_message_that_is_not_taken_is_one_event_and_so_is_that_a_later_one_is(
    tmp_path, hook, monkeypatch
):
    monkeypatch.setattr("outlast.metrics.teller.AGAIN_S", 0.01)
    hook.status = 500
    one = teller(tmp_path, hook)
    one.turn()
    one.take(storm(tmp_path, 3))
    until(lambda: one.turn() and noted(tmp_path), "the event")
    for _ in range(3):
        until(lambda: one.turn() and one._sending is None, "another try")
        until(lambda: one.turn() and one._sending is not None, "another try")
    hook.status = 200
    until(lambda: [one.turn()] and len(noted(tmp_path)) == 2, "that it was taken")
    assert len(hook.told) == 1
    first, last = noted(tmp_path)
    assert (first["addresses"], first["of"], last["over"]) == (1, 1, True)
    assert first["since_t"] < first.t
    one.take(noted(tmp_path))
    one.take(storm(tmp_path, 1))
    turn(one, until_told=2, hook=hook)
    assert len(noted(tmp_path)) == 2


def test_an_address_that_others_are_beside_is_given_up_for_each_message(
    tmp_path, hook, monkeypatch
):
    monkeypatch.setattr("outlast.metrics.teller.AGAIN_S", 0.01)
    setup = TellSetup(least="info", group_s=0.2, per_hour=12, is_agent=True)
    urls = (hook.url, "json://127.0.0.1:1/")
    names = {"job": "j", "directory": tmp_path, "node": "here", "prices": NO_PRICES, "say": print}
    fold = JobFold(CadenceSetting())
    one = Teller(setup, urls, fold, **names)
    one.turn()
    for number in (1, 2):
        one.take(fold.take(storm(tmp_path, 1), time.time() + 60))
        until(lambda: [one.turn()] and len(noted(tmp_path)) == number, "the event")  # noqa: B023
    assert [(event["addresses"], event["of"]) for event in noted(tmp_path)] == [(1, 2)] * 2
    assert len(hook.told) == 2


def test_without_apprise_one_line_says_so(floor, tmp_path, hook):
    job = Job(tmp_path / "job", 2)
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide/sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'apprise' else find(n, *a)\n"
    )
    process = start(floor, job, hook.url, cold=True, PYTHONPATH=str(tmp_path / "hide"))
    assert process.wait() == 0, process.text
    assert process.text.count("pip install apprise") == 1
    assert not hook.told


def test_the_command_tries_each_address(floor, hook):
    urls = f"{hook.url} slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#a nosuch://{SECRET}"
    process = floor.outlast("tell", env={"OUTLAST_TELL_URLS": urls})
    assert process.wait() == 1
    assert "slack://…  is understood" in process.out
    assert "nosuch://…  apprise knows no such address" in process.out
    process = floor.outlast("tell", "--test", env={"OUTLAST_TELL_URLS": hook.url})
    assert process.wait() == 0, process.text
    assert hook.told[0]["title"] == "Outlast can reach you"
    assert SECRET not in process.text
