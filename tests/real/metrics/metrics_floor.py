"""What tests of metrics share: a scraper, and the exporter's process."""

import contextlib
import http.client

import psutil


def exporter(floor):
    """The exporter that processes of ours have started, or None."""
    for process in floor.offspring():
        with contextlib.suppress(psutil.Error):
            if "outlast.metrics" in process.cmdline():
                return process
    return None


def scrape(port, accept="text/plain"):
    """The body of a whole answer with status 200, or None."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(line):
        line.request("GET", "/metrics", headers={"Accept": accept})
        answer = line.getresponse()
        body = answer.read().decode()
        return body if answer.status == 200 else None


def value(body, name):
    """The first value of a metric in a text; None where it is not there."""
    for line in (body or "").splitlines():
        if line.startswith(name) and line[len(name)] in " {":
            return float(line.rpartition(" ")[2])
    return None
