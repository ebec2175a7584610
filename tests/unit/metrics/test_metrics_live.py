"""The live page: the report's, written once for many readers, never a traceback."""

from outlast.ledger.file import FILE_NAME, Ledger
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
    shown = LivePage(tmp_path, 1.0, None)
    answers = {shown.answer(ASKED) for _ in range(50)}
    assert len(written) == len(answers) == 1
    (answer,) = answers
    assert answer.status == "200 OK"
    assert b'http-equiv="refresh"' in answer.body
    assert b"abc" in answer.body


def test_a_ledger_that_is_not_there_or_too_large(tmp_path, monkeypatch):
    assert LivePage(tmp_path, None, None).answer(ASKED).status.startswith("503")
    (tmp_path / FILE_NAME).write_bytes(b"\n" * 100)
    monkeypatch.setattr(live, "MOST_BYTES", 99)
    answer = LivePage(tmp_path, None, None).answer(ASKED)
    assert answer.status.startswith("503")
    assert b"outlast report" in answer.body
