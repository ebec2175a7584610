"""Ends again and again, and each time leaves other processes behind: RECORDS ENDS SEED.

Before it does it looks whether anything of an earlier attempt lives: by what that wrote down of
itself, and by its environment. What it finds is a line of RECORDS/alive.
"""

import argparse
import contextlib
import ctypes
import importlib
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path


def started(pid):
    """The ticks at which a process started, None if nothing of it lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" and int(fields[17]) <= 1 else fields[19]


def note(records):
    with (records / "pids").open("a") as file:
        file.write(f"{os.getpid()} {started(os.getpid())}\n")


def forked(records, *first, then):
    """A fork that does ``first`` and then ``then``, without end."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
        for one in first:
            one()
        note(records)
        while True:
            then()
    finally:
        os._exit(1)


def wait():
    time.sleep(1000)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def without_first_thread():
    threading.Thread(target=wait).start()
    ctypes.CDLL(None).pthread_exit(None)


def daemon():
    os.setsid()
    if os.fork():
        os._exit(0)


def hop():
    """Be another process every 20 ms; not for ever, should a test fail."""
    for _ in range(1000):
        time.sleep(0.02)
        if os.fork():
            os._exit(0)
    os._exit(0)


def own_group():
    os.setpgid(0, 0)


FIRST = {"child": (), "group": (own_group,), "session": (os.setsid,), "daemon": (daemon,)}
THEN = {"waits": wait, "is stopped": stop, "has no first thread": without_first_thread, "hops": hop}


def program(records, session):
    """The same as another program."""
    subprocess.Popen(["sleep", "1000"], start_new_session=session, stdout=subprocess.DEVNULL)


def leave(records, rng):
    for _ in range(rng.randint(0, 3)):
        if rng.random() < 0.25:
            program(records, session=rng.random() < 0.5)
        else:
            first, then = rng.choice(sorted(FIRST)), rng.choice(sorted(THEN))
            forked(records, *FIRST[first], then=THEN[then])


def keep_leaving(records, rng):
    """In a thread: a worker dies in the middle of a fork."""
    for _ in range(20):
        leave(records, rng)


def end(rng):
    how = rng.choice(["kill", "exit", "raise", "crash"])
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(3)
    raise RuntimeError(f"the end of attempt {os.environ['OUTLAST_ATTEMPT']}")


def look(records, attempt):
    """Whether anything of an earlier attempt lives."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (records / f"attempt-{attempt - 1}" / "pids").read_text().splitlines():
            pid, _, ticks = line.partition(" ")
            if started(pid) == ticks:
                found.append(f"{pid} by its number")
    tag = f"REAL_TEST_TAG={os.environ['REAL_TEST_TAG']}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = dict.fromkeys((place / "environ").read_bytes().split(b"\0"))
            of = [one.partition(b"=")[2] for one in environ if one.startswith(b"OUTLAST_ATTEMPT=")]
            is_ours = b"outlast.keeper" in (command := (place / "cmdline").read_bytes())
            is_ours |= b"outlast.health" in command or b"outlast.launch.warm" in command
            if tag in environ and of and int(of[0]) < attempt and not is_ours:
                found.append(f"{place.name} by its environment")
    if found:
        with (records / "alive").open("a") as file:
            file.writelines(f"attempt {attempt}: {one}\n" for one in found)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("ends", type=int)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["OUTLAST_ATTEMPT"])
    rng = random.Random(f"{options.seed} {attempt} {rank}")
    look(options.records, attempt)
    if attempt > options.ends:
        return
    here = options.records / f"attempt-{attempt}"
    here.mkdir(exist_ok=True)
    leave(here, rng)
    if rng.random() < 0.3:
        threading.Thread(target=keep_leaving, args=(here, rng), daemon=True).start()
    # A step more each time: nothing is waited for. A script that imports us by name starts warm.
    importlib.import_module("outlast.attempt.beat").Beat().beat(attempt)
    time.sleep(rng.choice([0.0, 0.0, 0.02, 0.05]))
    if rank == 0 or rng.random() < 0.3:
        end(rng)
    wait() if rng.random() < 0.5 else stop()


if __name__ == "__main__":
    main()
