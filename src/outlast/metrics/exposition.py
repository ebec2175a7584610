"""The metrics as text: what the port answers and what the text file holds.

``Exposition`` reads the ledger bit by bit, looks at the workers' memory, and makes the text of
both. Text is made anew at most once in ``FRESH_S`` however many ask, so that a crowd costs what one
costs.

Until the ledger was read to its end for the first time there is no text: numbers that rise through
a job's whole past within seconds would be taken for a storm.

The text file is for node_exporter's ``--collector.textfile.directory``: written beside it and
renamed, so that nobody reads half of it. It goes when the job ends: what nobody updates is no
measurement.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from outlast.health.exporter import CadenceSetting
from outlast.health.watched import Begin
from outlast.ledger.events import Event
from outlast.ledger.file import Follower
from outlast.metrics.folded import Buckets, JobFold, Labels, Tally
from outlast.metrics.machine import MachineFold
from outlast.metrics.table import JOB_ID, MetricRow
from outlast.prices import NO_PRICES, Prices

CHUNK_BYTES: Final = 2 << 20  # of the ledger at a time: some 10,000 events, 0.1 s
FRESH_S: Final = 0.5
GARBAGE_MOST: Final = 64


class Exposition:
    """Everything that is said of one job on this machine.

    Args:
        job: the job's id.
        directory: the job's.
        node: this machine's name.
        cadence: how often the settings ask for a checkpoint.
        prices: of machines.

    Attributes:
        fold: what the ledger says so far.
        settled: the events that the newest ``look`` has settled, in the order of their times.
    """

    def __init__(
        self,
        job: str,
        directory: Path,
        node: str,
        cadence: CadenceSetting,
        prices: Prices = NO_PRICES,
    ) -> None:
        self.settled: list[Event] = []
        self._job = job
        self._node = node
        self._follower = Follower(directory, most_bytes=CHUNK_BYTES)
        self.fold = JobFold(cadence, prices)
        self._machine = MachineFold(node)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._num_events = 0
        self._is_readable = True
        self._is_complete = False
        self._made: dict[str, tuple[float, tuple[bytes, str]]] = {}

    def begin(self, begin: Begin) -> None:
        """The agent has started workers."""
        self._machine.begin(begin)

    def look(self, now: float | None = None) -> bool:
        """Read a piece of what is new; whether there may be more.

        With ``now`` infinite, events are settled that others might still come before.
        """
        self._machine.look()
        try:
            events = self._follower.poll()
        except OSError:
            self._is_readable = False
            events = []
        else:
            self._is_readable = True
        self._num_events += len(events)
        self._machine.sample(events)
        self.settled = self.fold.take(events, time.time() if now is None else now)
        if not events and self._is_readable:
            self._is_complete = True
        return bool(events)

    @property
    def is_complete(self) -> bool:
        """Whether the ledger was read to its end once."""
        return self._is_complete

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics, and their content type, as ``accept`` asks for."""
        encode, kind = choose_encoder(accept)
        made_s, made = self._made.get(kind, (0.0, (b"", kind)))
        now_s = time.monotonic()
        if not made[0] or now_s - made_s >= FRESH_S:
            made = encode(self._registry), kind
            if len(self._made) >= GARBAGE_MOST:
                self._made.clear()
            self._made[kind] = (now_s, made)
        return made

    def write(self, path: Path) -> None:
        """Write the text file; whoever reads it sees the old one or the new one.

        Raises:
            OSError: it cannot be written.
        """
        data, _ = self.text("text/plain")
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            Path(name).chmod(0o644)  # node_exporter is another user
            os.replace(name, path)  # noqa: PTH105
        except OSError:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise

    def collect(self) -> Iterator[Metric]:
        """For the client library: every metric that has something to say."""
        now = time.time()
        tally = self.fold.tally(now)
        self._machine.fill(tally)
        tally.put("outlast_ledger_readable", float(self._is_readable), self._node)
        tally.values["outlast_ledger_events"] = {(self._node,): float(self._num_events)}
        so_far = self.fold.so_far
        if so_far.newest_t is not None:
            age_s = max(so_far.steady(now) - so_far.newest_t, 0.0)
            tally.put("outlast_ledger_age_seconds", age_s, self._node)
        for row, values, counted in tally.rows():
            yield _family(row, values, counted, self._job, tally)


def _family(
    row: MetricRow,
    values: Mapping[Labels, float],
    counted: Mapping[Labels, Buckets],
    job: str,
    tally: Tally,
) -> Metric:
    names = (JOB_ID, *row.labels)
    if row.form == "histogram":
        histogram = HistogramMetricFamily(row.name, row.what, labels=names)
        for labels, buckets in counted.items():
            histogram.add_metric((job, *labels), buckets.cumulative(row.buckets), buckets.sum)
        return histogram
    if row.form == "summary":
        summary = Metric(row.name, row.what, "summary")
        ends = {end: tally.values.get(row.name + end, {}) for end in ("_sum", "_count")}
        for alike in dict.fromkeys(labels[:-1] for labels in values):  # OpenMetrics groups them
            for labels, value in values.items():
                if labels[:-1] == alike:
                    quantile = _named((*names, "quantile"), (job, *labels))
                    summary.add_sample(row.name, quantile, value)
            for end, found in ends.items():
                summary.add_sample(row.name + end, _named(names, (job, *alike)), found[alike])
        return summary
    make: Callable[..., GaugeMetricFamily | CounterMetricFamily]
    make = CounterMetricFamily if row.form == "counter" else GaugeMetricFamily
    family = make(row.name, row.what, labels=names)
    for labels, value in values.items():
        family.add_metric((job, *labels), value)
    return family


def _named(names: tuple[str, ...], labels: Labels) -> dict[str, str]:
    return dict(zip(names, labels, strict=True))
