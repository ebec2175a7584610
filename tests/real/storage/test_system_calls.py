"""The order of system calls, as the kernel sees it: what is durable when, and by which way."""

import re
import shutil
import subprocess
import sys

import pytest

from outlast.storage.directory import ALIGN, open_direct

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

WRITE = """
import mmap, sys
from pathlib import Path
from outlast.storage import Directory, directory
import numpy  # its own files are not of interest
directory.MIN_BYTES = 1
storage = Directory(Path(sys.argv[1]), {num_spares})
storage.put("step/before", b"")
storage.put("old/f.safetensors", bytes(300_000))
storage.remove_tree("old")
memory = memoryview(mmap.mmap(-1, 1 << 20))
Path("/begin").exists()
blob = storage.create("step/f", {size})
for start in {starts}:
    blob.write_at(memory[: min({block}, {size} - start)], start)
blob.finish()
Path("/end").exists()
"""
CALLS = "openat,pwrite64,write,ftruncate,fsync,fdatasync,rename,renameat,renameat2,stat,newfstatat"
PART = r"\.f\.[0-9a-f]+\.part"


@pytest.fixture(autouse=True)
def _direct(tmp_path):
    (tmp_path / "probe").touch()
    if open_direct(tmp_path / "probe", 0) is None:
        pytest.skip("no O_DIRECT on the file system of the tests")


def traced(tmp_path, **values):
    """The calls between the two marks, a line each."""
    log = tmp_path / "trace"
    code = WRITE.format(**values)
    command = ["strace", "-f", "-y", "-qq", "-e", f"trace={CALLS}", "-s", "8", "-o", str(log)]
    subprocess.run(
        [*command, sys.executable, "-c", code, str(tmp_path / "root")], check=True, timeout=120
    )
    lines = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    (begin,) = [n for n, line in enumerate(lines) if '"/begin"' in line]
    (end,) = [n for n, line in enumerate(lines) if '"/end"' in line]
    return [line for line in lines[begin + 1 : end] if not re.match(r"\w*stat\w*\(", line)]


def check(lines, patterns):
    assert len(lines) == len(patterns), lines
    found = re.fullmatch("\n".join(f".*{pattern}.*" for pattern in patterns), "\n".join(lines))
    assert found, lines


BLOCK = 16 * ALIGN


def writing(root):
    """From the first byte to the end: the same for new files and for those written over."""
    return [
        rf'openat\(.*"{root}/step/{PART}", O_WRONLY\|O_DIRECT\|O_CLOEXEC\) = (?P<fd>\d+)',
        rf"pwrite64\((?P=fd)<.*{PART}>, .*, {BLOCK}, {BLOCK}\) *= {BLOCK}",
        rf"pwrite64\((?P=fd)<.*{PART}>, .*, {BLOCK}, 0\) *= {BLOCK}",
        rf"pwrite64\((?P=fd)<.*{PART}>, .*, {ALIGN}, {2 * BLOCK}\) *= {ALIGN}",
        rf"ftruncate\(\d+<.*{PART}>, {2 * BLOCK + 10}\) *= 0",
        rf"fsync\(\d+<.*{PART}>\) *= 0",
        rf'rename.*"{root}/step/{PART}", .*"{root}/step/f".*= 0',
        rf'openat\(.*"{root}/step", O_RDONLY\|O_CLOEXEC\|O_DIRECTORY',
        rf"fsync\(\d+<{root}/step>\) *= 0",
    ]


SHAPE = {"size": 2 * BLOCK + 10, "block": BLOCK, "starts": [BLOCK, 0, 2 * BLOCK]}


def test_direct_writes_then_size_then_data_then_name_then_directory(tmp_path):
    root = tmp_path / "root"
    opening = rf'openat\(.*"{root}/step/{PART}", O_WRONLY\|O_CREAT\|O_EXCL\|O_CLOEXEC'
    check(traced(tmp_path, num_spares=0, **SHAPE), [opening, *writing(root)])


def test_a_spare_is_renamed_and_never_cut_before_it_is_written(tmp_path):
    root = tmp_path / "root"
    lines = [line for line in traced(tmp_path, num_spares=1, **SHAPE) if "O_DIRECTORY" not in line]
    opening = [
        rf'rename\("{root}/.spare/[0-9a-f]+", "{root}/step/{PART}"\) *= 0',
        # Once to ask whether somebody else has it open, once to write.
        *[rf'openat\(.*"{root}/step/{PART}", O_WRONLY\|O_NOFOLLOW\|O_CLOEXEC'] * 2,
    ]
    check(lines, [*opening, *(part for part in writing(root) if "O_DIRECTORY" not in part)])


OPENED_MEANWHILE = """
import fcntl, os, sys
from pathlib import Path
from outlast.storage import directory
path, asked = Path(sys.argv[1]), []
path.write_bytes(b"1")
real = fcntl.fcntl
def meanwhile(fd, command, argument):
    result = real(fd, command, argument)
    if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
        try:
            os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except BlockingIOError:  # the kernel has told the holder of the lease, which is us
            asked.append(path)
    return result
fcntl.fcntl = meanwhile
print(directory._nobody_has_open(path), len(asked))
"""


def test_somebody_who_opens_a_spare_while_we_ask_does_not_end_us(tmp_path):
    """The signal of a lease that somebody breaks ends a process that does not expect it."""
    done = subprocess.run(
        [sys.executable, "-c", OPENED_MEANWHILE, str(tmp_path / "f")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["True", "1"]), done.stderr
