"""What sending copies of snapshots to another machine's memory costs a training step.

Blocks of steps alternate: with one keeper sending snapshots of ``--mb`` to another, one after the
other, as fast as ``--rates`` allows, and without. Everything is on this machine, so both keepers,
their checksums and the training share its cores; on two machines each would send and receive, and
so do just as much. Training is ``--ranks`` processes of one thread that sum their gradients over
gloo, each in a session of its own like a worker. A real job sends one snapshot for each checkpoint:
for a part of the time, not all of it.

    python benchmarks/replication.py [--mb 512] [--rates auto,44,100] [--ranks 1] [--blocks 40]

Reported for each rate: MB/s sent, seconds of a core for each GB on either side, milliseconds of a
step without and with it, and the ratio of neighbouring blocks with its quartiles. The row "nothing"
compares blocks without any sending. The machine's load while it was measured stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from bench.tables import emit, machine, markdown
from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FULL,
    MANIFEST,
    Manifest,
    SaveName,
    encode,
    hashed,
)
from outlast.keeper import protocol
from outlast.keeper.memory import Arena, KeptSnapshot
from outlast.keeper.process import Setup, Supervisor
from outlast.keeper.replicas import Replicator
from outlast.keeper.wire import NO_NONCE, PeerMachine
from outlast.peer import connect

JOB: Final = "replication"
FILE: Final = "rank-00000.safetensors"
ATTEMPT: Final = 1
NOTHING: Final = "nothing"
AUTO: Final = "auto"


def main() -> None:
    """Measure and print one JSON object and a table."""
    if sys.argv[1:2] == ["--send"]:
        send(json.loads(sys.argv[2]))
        return
    if sys.argv[1:2] == ["--train"]:
        train(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rates", default="auto,20,44,100,200", help="MB/s, or auto")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a block")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(options, Path(directory))
    result = {"benchmark": "replication", "machine": machine(Path.cwd()), "rows": rows}
    table = markdown(
        [
            *("at most, MB/s", "sent, MB/s", "core s per GB, sent", "received"),
            *("step without, ms", "with, ms", "ratio (quartiles)", "load"),
        ],
        (
            [
                *(str(row["rate"]), f"{row['sent_mb_per_s']:.0f}"),
                f"{row['sender_core_s_per_gb']:.2f}",
                f"{row['receiver_core_s_per_gb']:.2f}",
                *(f"{row['without_ms']:.1f}", f"{row['with_ms']:.1f}"),
                *("{1:.3f} ({0:.3f}–{2:.3f})".format(*row["ratio"]), f"{row['load']:.1f}"),
            ]
            for row in rows
        ),
    )
    emit(result, [table])


def measure(options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """One row for each rate."""
    trainers: list[Child] = []
    rows = []
    try:
        facts = {"ranks": options.ranks, "port": free_port(), "step_ms": options.step_ms}
        trainers += [Child("--train", facts | {"rank": rank}) for rank in range(options.ranks)]
        steps = max(round(options.seconds * 1000 / options.step_ms), 1)
        block(trainers, steps)
        for rate in [NOTHING, *options.rates.split(",")]:
            place = directory / rate
            place.mkdir()
            rows.append({"rate": rate, **one_rate(options, trainers, place, steps)})
    finally:
        for child in trainers:
            child.end()
    return rows


def one_rate(
    options: argparse.Namespace, trainers: list[Child], place: Path, steps: int
) -> dict[str, Any]:
    """Two keepers that send and receive at the rate that the place is named after."""
    sends, rate = place.name != NOTHING, None if place.name == AUTO else 1e6
    if sends and rate:
        rate *= float(place.name)
    key = os.urandom(32)
    setup = Setup(
        job=JOB,
        directory=str(place),
        socket=str(place / "k.sock"),
        tiers=(),
        linger_s=1.0,
        rate_bytes=rate,
    )
    keeper = Supervisor(setup)
    keeper.start()
    try:
        host, port = keeper.serve("127.0.0.1", key, node="receiver")
        told = {"host": host, "port": port, "key": key.hex(), "rate": rate, "mb": options.mb}
        sender = Child("--send", told)
        try:
            return compare(options, trainers, (sender, keeper), steps, sends=sends)
        finally:
            sender.end()
    finally:
        keeper.close(5)


def compare(
    options: argparse.Namespace,
    trainers: list[Child],
    ends: tuple[Child, Supervisor],
    steps: int,
    *,
    sends: bool,
) -> dict[str, Any]:
    """Blocks with and without sending, one after the other."""
    without: list[float] = []
    with_it: list[float] = []
    sent, elapsed = 0.0, 0.0
    sender, keeper = ends
    sender.ask("ready")
    began = cores_s(sender.pid), cores_s(keeper.pid or 0)
    for number in range(options.blocks):
        for sending in (False, True) if number % 2 else (True, False):
            before = float(sender.ask("go" if sending and sends else "stop"))
            start_s = time.perf_counter()
            took = block(trainers, steps)
            if sending:
                elapsed += time.perf_counter() - start_s
                sent += float(sender.ask("stop")) - before
            (with_it if sending else without).append(took)
    gb = max(sent / 1e9, 1e-9)
    ratios = [one / other for one, other in zip(with_it, without, strict=True)]
    return {
        "sent_mb_per_s": sent / 1e6 / elapsed,
        "sender_core_s_per_gb": (cores_s(sender.pid) - began[0]) / gb if sends else 0.0,
        "receiver_core_s_per_gb": (cores_s(keeper.pid or 0) - began[1]) / gb if sends else 0.0,
        "without_ms": statistics.median(without),
        "with_ms": statistics.median(with_it),
        "ratio": statistics.quantiles(ratios, n=4),
        "load": os.getloadavg()[0],
    }


def cores_s(pid: int) -> float:
    """Processor time that a process has had, in seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def block(trainers: list[Child], steps: int) -> float:
    """Milliseconds of one step, of the slowest rank."""
    for child in trainers:
        child.say(str(steps))
    return max(float(child.hear()) for child in trainers)


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Child:
    """This script in another process, which answers each line with a line."""

    def __init__(self, flag: str, facts: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, flag, json.dumps(facts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def say(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """The next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError("a process of the benchmark has died; it said why above")
        return line.strip()

    def ask(self, line: str) -> str:
        """Send a line and return the answer."""
        self.say(line)
        return self.hear()

    def end(self) -> None:
        """No more lines."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


# --- in the other processes ---------------------------------------------------------------------


def train(facts: dict[str, Any]) -> None:
    """A rank: for each line, so many steps; answers with milliseconds of one."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{facts['port']}"
    dist.init_process_group(
        "gloo", init_method=address, rank=facts["rank"], world_size=facts["ranks"]
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    x = torch.randn(64, 512)

    def steps(count: int, passes: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            for _ in range(passes):
                (model(x) - x).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        return (time.perf_counter() - start_s) / count * 1000

    steps(20, 1)
    passes = torch.tensor([max(int(facts["step_ms"] / steps(20, 1)), 1)])
    dist.broadcast(passes, 0)
    for line in sys.stdin:
        print(steps(int(line), int(passes)), flush=True)


def send(facts: dict[str, Any]) -> None:
    """A keeper's sending side: "go" and "stop"; answers with the bytes sent so far."""
    arena = Arena.make(facts["mb"] << 20)
    data = os.urandom(1 << 20)
    for start in range(0, facts["mb"] << 20, 1 << 20):
        arena.view[start : start + (1 << 20)] = data
    size = facts["mb"] << 20
    entry = hashed_view(arena.view[:size])
    sent, number = [0.0], [0]
    kept: list[KeptSnapshot] = []

    def another() -> None:
        number[0] += 1
        manifest = Manifest(
            format=FORMAT,
            job=JOB,
            step=number[0],
            attempt=ATTEMPT,
            serial=number[0],
            nonce=NO_NONCE,
            world_size=1,
            layout={"world": 1},
            created_t=0.0,
            files={FILE: entry},
            tensors={},
            kind=FULL,
        )
        small = {MANIFEST: encode(manifest)}
        kept[:] = [KeptSnapshot(files={FILE: (1, size)}, small=small, attempt=ATTEMPT)]

    def go_on() -> None:
        another()
        replicator.committed()

    def record(event: str, **_: Any) -> None:
        if event == "replicated":
            threading.Thread(target=go_on).start()

    def view(*_: Any) -> memoryview:
        sent[0] += BLOCK_BYTES
        return arena.view[:size]

    another()
    key = bytes.fromhex(facts["key"])
    replicator = Replicator(
        "sender",
        newest=lambda: (SaveName(number[0], ATTEMPT, number[0], NO_NONCE), kept[0]),
        view=view,
        open_channel=lambda one: connect((one.host, one.port), key, protocol.PURPOSE, 10),
        rate_bytes=facts["rate"],
        record=record,
    )
    pace, hold = replicator._pace, threading.Event()

    def held(num_bytes: int) -> None:
        hold.wait()
        pace(num_bytes)

    replicator._pace = held  # type: ignore[assignment]
    replicator.to([PeerMachine(node="receiver", host=facts["host"], port=facts["port"])])
    for line in sys.stdin:
        hold.set() if line.strip() == "go" else hold.clear()
        print(sent[0], flush=True)
    os._exit(0)


def hashed_view(view: memoryview) -> Any:
    """What a manifest says of a file that is this memory."""
    return msgspec.structs.replace(hashed(bytes(view)), size=len(view))


if __name__ == "__main__":
    main()
