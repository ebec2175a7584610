"""Processes that do not end though they were killed, as a driver or a debugger can hold them."""

import contextlib
import subprocess
import sys

import pytest

TRACER = """import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
seize, stop_at_exit = 0x4206, 0x40
if libc.ptrace(seize, int(sys.argv[1]), 0, stop_at_exit):
    sys.exit(f"ptrace: error {ctypes.get_errno()}")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding(pid):
    """Within, a process does not end."""
    tracer = subprocess.Popen(
        [sys.executable, "-c", TRACER, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        if tracer.stdout.readline() != b"held\n":
            pytest.skip(f"no process can be traced here: {tracer.stderr.read().decode()}")
        yield
    finally:
        tracer.kill()
        tracer.communicate()
