"""The live page: the report's, written once for many readers, never a traceback."""

import msgspec
from unit_prices import priced

from outlast.ledger import file, job
from outlast.ledger.file import FILE_NAME, Ledger
from outlast.ledger.job import Job
from outlast.metrics import live
from outlast.metrics.live import LivePage
from outlast.metrics.server import MetricsRequest

ASKED = MetricsRequest("/", "text/html")


def test_it_is_the_jobs_page_and_is_written_once(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, job="abc", attempt=1)
    ledger.append("attempt_formed", world_size=2, nodes=1)
    ledger.close()
    written = []
    page = live.page
    monkeypatch.setattr(live, "page", lambda *a, **k: written.append(1) or page(*a, **k))
    shown = LivePage(tmp_path, priced(1.0))
    answers = {shown.answer(ASKED) for _ in range(50)}
    assert len(written) == len(answers) == 1
    (answer,) = answers
    assert answer.status == "200 OK"
    assert b"setInterval(renew, 5 * 1000)" in answer.body
    assert b"abc" in answer.body


def test_a_ledger_that_is_not_there_or_too_large(tmp_path, monkeypatch):
    assert LivePage(tmp_path).answer(ASKED).status.startswith("503")
    (tmp_path / FILE_NAME).write_bytes(b"\n" * 100)
    monkeypatch.setattr(live, "MOST_BYTES", 99)
    answer = LivePage(tmp_path).answer(ASKED)
    assert answer.status.startswith("503")
    assert b"outlast report" in answer.body


def test_it_says_how_often_saves_were_meant_to_come(tmp_path):
    ledger = Ledger(tmp_path, job="abc", attempt=1)
    ledger.append("attempt_formed", world_size=1, nodes=1)
    for step in (7, 14):
        ledger.append("commit", step=step, tier="local", kind="full", bytes=1, durable_s=0.1)
    ledger.close()
    record = Job(id="abc", created_t=1.0, settings={"checkpoint.every": "7 steps"})
    (tmp_path / job.FILE_NAME).write_bytes(msgspec.json.encode(record))
    assert b"7 steps" in LivePage(tmp_path).answer(ASKED).body


def grow(tmp_path, attempt):
    ledger = Ledger(tmp_path, job="abc", attempt=attempt)
    ledger.append("attempt_formed", world_size=2, nodes=1)
    ledger.close()


def test_it_follows_the_ledger_and_reads_each_line_once(tmp_path, monkeypatch):
    decoded = []
    decode = file.decode
    monkeypatch.setattr(file, "decode", lambda line: decoded.append(1) or decode(line))
    monkeypatch.setattr(live, "KEPT_S", 0)
    monkeypatch.setattr(live, "SHARE", float("inf"))
    shown = LivePage(tmp_path)
    for attempt in (1, 2, 3):
        grow(tmp_path, attempt)
        body = shown.answer(ASKED).body.decode()
        assert f"timeline: {attempt} attempt" in body
        assert len(decoded) == attempt


def test_what_nobody_looks_at_is_forgotten_and_read_again_when_somebody_does(tmp_path, monkeypatch):
    grow(tmp_path, 1)
    now_s = [1000.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now_s[0])
    shown = LivePage(tmp_path)
    first = shown.answer(ASKED)
    shown.rest()
    assert shown.num_kept == 1
    now_s[0] += live.FORGET_S + 1
    shown.rest()
    assert shown.num_kept == 0
    again = shown.answer(ASKED)
    assert again.status == first.status
    assert b"timeline: 1 attempt" in again.body
