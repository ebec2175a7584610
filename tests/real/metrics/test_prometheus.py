"""Prometheus itself: it scrapes a running job, its rules fire, and promtool has nothing to say."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.request

import floor as real
import pytest
import yaml

from outlast.ledger.file import read_events
from outlast.metrics.alerts import RULES, rule_file
from outlast.metrics.table import ROWS, TABLE, series_of

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="prometheus is not here; install Debian's package of that name",
)
pytestmark = needs_prometheus


def promtool(*arguments, text=None):
    done = subprocess.run(
        ["promtool", *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# --- the rules, on scripted series --------------------------------------------------------------

JOB = 'job_id="j"'
RUNS = (f"outlast_job_running{{{JOB}}}", "1x1000")
# Rule → series in which it fires, and the labels it fires with; what keeps it from firing.
FIRES = {
    "OutlastCommitOld": (
        [
            RUNS,
            (f'outlast_commit_age_seconds{{{JOB},tier="local"}}', "0+60x1000"),
            (f'outlast_commit_interval_seconds{{{JOB},tier="local"}}', "300x1000"),
        ],
        {"tier": "local"},
        {1: "0 60 120 180 240 " * 200},  # a commit every five minutes
    ),
    "OutlastWriteSlower": (
        [
            (
                f'outlast_checkpoint_write_seconds_sum{{{JOB},tier="local",phase="total"}}',
                "0+5x400 2005+20x100",
            ),
            (
                f'outlast_checkpoint_write_seconds_count{{{JOB},tier="local",phase="total"}}',
                "0+1x501",
            ),
        ],
        {"tier": "local"},
        {0: "0+5x501"},
    ),
    "OutlastRecoverySlower": (
        [
            (
                f'outlast_recovery_seconds_sum{{{JOB},reason="hang"}}',
                "0+10x100 1000+60x400",
            ),
            (f'outlast_recovery_seconds_count{{{JOB},reason="hang"}}', "0+1x501"),
        ],
        {"reason": "hang"},
        {0: "0+10x501"},
    ),
    "OutlastStepsUneven": (
        [
            (f'outlast_step_seconds{{{JOB},node="m",rank="1",quantile="0.5"}}', "0.05x1000"),
            (f'outlast_step_seconds{{{JOB},node="m",rank="1",quantile="0.99"}}', "0.2x1000"),
        ],
        {"node": "m", "rank": "1"},
        {1: "0.09x1000"},
    ),
    "OutlastRestartStorm": (
        [(f'outlast_restarts_total{{{JOB},reason="killed"}}', "0x490 1 1 2 2 3 3 4 4 4 4")],
        {},
        {0: "0x490 1 1 1 1 1 1 1 1 1 1"},
    ),
    "OutlastMachineFailsAgain": (
        [
            (f'outlast_failures_total{{{JOB},node="m",kind="hang"}}', "0x400 1x100"),
            (f'outlast_failures_total{{{JOB},node="m",kind="worker_lost"}}', "0x450 2x50"),
        ],
        {"node": "m"},
        {1: "0x500"},
    ),
    "OutlastNoHeartbeat": (
        [RUNS, (f'outlast_heartbeat_age_seconds{{{JOB},node="m",rank="0"}}', "0+60x1000")],
        {"node": "m", "rank": "0"},
        {0: "0x1000"},  # it has drained: nobody is to wake up
    ),
    "OutlastNoProgress": (
        [RUNS, (f"outlast_progress_age_seconds{{{JOB}}}", "0+60x1000")],
        {},
        {1: "5x1000"},
    ),
    "OutlastMachineGoes": (
        [(f'outlast_notice_left_seconds{{{JOB},node="m"}}', "30000-60x1000")],
        {"node": "m"},
        {0: "-5x1000"},
    ),
    "OutlastMessagesFail": (
        [(f"outlast_messages_not_told_total{{{JOB}}}", "0x490 0 0 0 0 1 1 1 1 1 1")],
        {},
        {0: "2x500"},  # long ago
    ),
}
SEVERITY = {rule.name: rule.severity for rule in RULES}


def test_a_case_for_each_rule():
    assert set(FIRES) == set(SEVERITY)


def test_the_rule_file_is_one(tmp_path):
    path = tmp_path / "outlast.rules.yml"
    path.write_text(rule_file())
    assert f"{len(RULES)} rules found" in promtool("check", "rules", path)


@pytest.mark.parametrize("name", FIRES)
@pytest.mark.parametrize("fires", [True, False])
def test_a_rule_fires_when_it_should_and_not_otherwise(tmp_path, name, fires):
    series, labels, calm = FIRES[name]
    values = [text if fires or n not in calm else calm[n] for n, (_, text) in enumerate(series)]
    (tmp_path / "outlast.rules.yml").write_text(rule_file())
    test = {
        "interval": "1m",
        "input_series": [
            {"series": selector, "values": text.strip()}
            for (selector, _), text in zip(series, values, strict=True)
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": "8h15m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }
    case = {"rule_files": ["outlast.rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(case))
    promtool("test", "rules", tmp_path / "test.yml")
    if fires:
        wanted = {"severity": SEVERITY[name], **labels}
        selector = ",".join(f'{label}="{value}"' for label, value in wanted.items())
        test["promql_expr_test"][0]["expr"] = f'count(ALERTS{{alertname="{name}",{selector}}})'
        (tmp_path / "test.yml").write_text(yaml.safe_dump(case))
        promtool("test", "rules", tmp_path / "test.yml")


# --- a running job --------------------------------------------------------------------------------


def get(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()
    return ""


class Prometheus:
    """A Prometheus of the test's own, which scrapes and judges every second."""

    def __init__(self, floor, directory, target):
        self.port = real.free_port()
        (directory / "outlast.rules.yml").write_text(rule_file())
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["outlast.rules.yml"],
            "scrape_configs": [
                {"job_name": "outlast", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
            ],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.process = floor.cold(
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            program=shutil.which("prometheus"),
        )

    def ask(self, path):
        text = get(f"http://127.0.0.1:{self.port}/api/v1/{path}")
        return json.loads(text)["data"] if text.startswith("{") else None

    def names(self):
        return set(self.ask("label/__name__/values") or ())

    def firing(self):
        found = (self.ask("alerts") or {}).get("alerts", [])
        return {
            one["labels"]["alertname"]: one["labels"] for one in found if one["state"] == "firing"
        }

    def is_up(self):
        targets = (self.ask("targets") or {}).get("activeTargets", [])
        return bool(targets) and targets[0]["health"] == "up"


def test_prometheus_scrapes_a_job_whose_workers_are_killed(floor, tmp_path):
    port, records, job = real.free_port(), tmp_path / "records", tmp_path / "job"
    records.mkdir()
    textfile = tmp_path / "outlast.prom"
    running = floor.outlast(
        *("run", "--nproc-per-node", 2, "--max-restarts", 20, "--dir", job),
        *(real.TRAIN, records, 100_000, "--light", "--pause", 0.02, "--every", "20 steps"),
        env={
            "OUTLAST_METRICS_PORT": port,
            "OUTLAST_METRICS_TEXTFILE": textfile,
            "OUTLAST_PRICE_SPOT": "36",
            "OUTLAST_PRICE_ON_DEMAND": "100",
        },
    )
    prometheus = Prometheus(floor, tmp_path, port)
    url = f"http://127.0.0.1:{port}/metrics"
    real.until(lambda: "outlast_commit_age_seconds{" in get(url), "a commit", running=running)
    real.until(prometheus.is_up, "a scrape that succeeds", running=prometheus.process)
    real.until(
        lambda: "outlast_restarts_total" in prometheus.names(),
        "restarts are known, at 0",
        running=prometheus.process,
    )
    assert promtool("check", "metrics", text=get(url)) == ""
    exporter = [one.pid for one in floor.offspring() if "outlast.metrics" in one.cmdline()]
    assert len(exporter) == 1
    for number in range(3):
        attempt = number + 2
        before = floor.workers()
        os.kill(before[1], signal.SIGKILL)
        real.until(
            lambda attempt=attempt: any(
                one.event == "step" and one.attempt == attempt for one in read_events(job)
            ),
            f"attempt {attempt} trains",
            running=running,
        )
    wanted = {"OutlastRestartStorm", "OutlastMachineFailsAgain"}
    real.until(lambda: wanted <= set(prometheus.firing()), "the alerts", running=running)
    assert prometheus.firing()["OutlastMachineFailsAgain"]["node"] == socket.gethostname()
    assert "OutlastNoHeartbeat" not in prometheus.firing()
    # The same process through all attempts, and nothing that is not in the table.
    assert [one.pid for one in floor.offspring() if "outlast.metrics" in one.cmdline()] == exporter
    known = {series for row in TABLE for series in series_of(row)}
    scraped = {name for name in prometheus.names() if name.startswith("outlast_")}
    assert scraped <= known
    from_the_start = {
        row.exported for row in ROWS.values() if row.form == "counter" and not row.labels
    }
    assert from_the_start <= scraped
    assert {name for name in known if name.endswith("_money")} <= scraped
    real.until(textfile.exists, "the text file", running=running)
    assert promtool("check", "metrics", text=textfile.read_text()) == ""
    running.signal(signal.SIGTERM)
    assert running.wait() == 75
    real.until(lambda: not get(url), "the exporter ends with its job")
    assert not textfile.exists()
    prometheus.process.signal(signal.SIGTERM)
    prometheus.process.wait()
