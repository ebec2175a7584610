"""What our object store costs beyond the server: gigabytes up and down, every block verified.

The server is moto on this machine: an S3 for tests, written in Python, which is what bounds the
rates (to answer a range it reads the whole object: the smaller ``--file-mib``, the faster). Hence a
reference in the same run, on a sample: parts put as objects and the same ranges read by plain HTTP,
unsigned and unhashed. Rates say little by themselves; the ratio to the reference and our own
processor time say what we add. On a real network neither bound is met.

    python benchmarks/object_store.py [--gb 3] [--file-mib 64] [--threads 4]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import xxhash

from outlast.storage import ObjectStore
from outlast.storage.object import RANGE_BYTES

MIB = 2**20
BLOCK = 16 * MIB
SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


class Server:
    """moto in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", SERVE]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith("127.0.0.1 "))
        self.host, port = line.split()
        self.port = int(port)
        self.ask("PUT", "/bucket")

    def ask(self, method: str, path: str, body: memoryview | bytes = b"", **headers: str) -> None:
        """A request that nobody signs; it must succeed."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        headers["x-amz-acl"] = "public-read-write"
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status < 300, f"{method} {path}: {answer.status}"
        connection.close()

    def cpu_s(self) -> float:
        """Processor time that the server has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Blocks:
    """Block ``n`` of the state: random, and different for each ``n``."""

    def __init__(self) -> None:
        self._base = np.random.default_rng(0).integers(0, 2**63, BLOCK // 8, dtype=np.uint64)

    def __call__(self, number: int) -> memoryview:
        """The block's bytes."""
        return memoryview((self._base + np.uint64(number)).data).cast("B")


def timed(num_bytes: int, server: Server, act: Callable[[], None]) -> dict[str, float]:
    began, ours, theirs = time.perf_counter(), time.process_time(), server.cpu_s()
    act()
    took = time.perf_counter() - began
    return {
        "mb_per_s": round(num_bytes / took / 1e6, 1),
        "wall_s": round(took, 2),
        "our_cpu_s": round(time.process_time() - ours, 2),
        "server_cpu_s": round(server.cpu_s() - theirs, 2),
    }


def in_threads(threads: int, act: Callable[[int], None], numbers: Iterable[int]) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(act, numbers):
            pass


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=3.0)
    parser.add_argument("--file-mib", type=int, default=64)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    per_file = max(options.file_mib * MIB // BLOCK, 1)
    num_files = max(round(options.gb * 1e9 / (per_file * BLOCK)), 1)
    num_bytes = num_files * per_file * BLOCK
    server = Server()
    try:
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://{server.host}:{server.port}",
            AWS_ALLOW_HTTP="true",
            AWS_REGION="us-east-1",
            AWS_ACCESS_KEY_ID="none",
            AWS_SECRET_ACCESS_KEY="none",
        )
        print(
            json.dumps(measure(server, options.threads, num_files, per_file, num_bytes), indent=1)
        )
    finally:
        server.close()


def measure(
    server: Server, threads: int, num_files: int, per_file: int, num_bytes: int
) -> dict[str, object]:
    storage, block = ObjectStore("s3://bucket/job"), Blocks()
    digests: dict[int, str] = {}

    def upload() -> None:
        for file in range(num_files):
            blob = storage.create(f"f{file}", per_file * BLOCK)
            for index in range(per_file):
                data = block(file * per_file + index)
                digests[file * per_file + index] = xxhash.xxh3_128_hexdigest(data)
                blob.write_at(data, index * BLOCK)
            blob.finish()

    def restore() -> None:
        readers = [storage.open(f"f{file}") for file in range(num_files)]

        def read(number: int) -> None:
            buffer = memoryview(bytearray(BLOCK))
            readers[number // per_file].read_into(buffer, number % per_file * BLOCK)
            assert xxhash.xxh3_128_hexdigest(buffer) == digests[number], f"block {number} differs"

        in_threads(threads, read, range(len(digests)))

    sample = list(range(min(4 * threads, num_files * per_file)))

    def plain_upload() -> None:
        in_threads(threads, lambda n: server.ask("PUT", f"/bucket/{n}", block(n)), sample)

    def plain_restore() -> None:
        def read(number: int) -> None:
            for start in range(
                number % per_file * BLOCK, (number % per_file + 1) * BLOCK, RANGE_BYTES
            ):
                last = start + RANGE_BYTES - 1
                server.ask("GET", "/bucket/whole", Range=f"bytes={start}-{last}")

        in_threads(threads, read, sample)

    whole = np.concatenate([np.asarray(block(index)) for index in range(per_file)])
    server.ask("PUT", "/bucket/whole", memoryview(whole.data))
    plain_up = timed(len(sample) * BLOCK, server, plain_upload)
    plain_down = timed(len(sample) * BLOCK, server, plain_restore)
    for number in sample:
        server.ask("DELETE", f"/bucket/{number}")
    up, down = timed(num_bytes, server, upload), timed(num_bytes, server, restore)
    assert len(digests) == num_files * per_file
    return {
        "bytes": num_bytes,
        "files": num_files,
        "blocks_verified": len(digests),
        "threads": threads,
        "upload": up,
        "restore": down,
        "plain_http_upload": plain_up,
        "plain_http_restore": plain_down,
        "upload_to_plain": round(up["mb_per_s"] / plain_up["mb_per_s"], 3),
        "restore_to_plain": round(down["mb_per_s"] / plain_down["mb_per_s"], 3),
        "our_peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    main()
