"""A life of a job whose keeper ckpt-chaos strikes: KILLS HOW OUT.

``KILLS`` is what dies with a strike, ``keeper`` or ``job``; ``HOW`` is what runs the script:
``python``, or ``outlast`` (``outlast run`` with two workers); ``OUT`` is the directory that the
tool gives.

It ends when all processes of the job have ended. Then it leaves, for each step that was committed,
a file ``OUT/committed/step-N``: the tool compares names with those of a run that was not disturbed,
and a save's name is drawn anew by each session. A step counts where the ledger tells its commit, or
where a tier has its manifest: nothing of it is verified here, so that a manifest without its files
would be lost work. Where nothing is struck, all steps count: which of them are saved, and which are
pruned, is not the same in each run.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

import floor_server

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "chaotic.py"
STEPS = 6  # of the script
TIERS = {"local": "job/checkpoints", "shared": "shared"}
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
KILLED = 137


def run(kills, how, out):
    """Run the job to its end; its exit code, or 137 where the job was killed."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    os.environ |= {
        "CKPT_CHAOS_ARMED": "1",  # the tool's own file is not to arm a worker
        "CHAOS_KILLS": kills,
        "CHAOS_LAUNCHER": str(os.getpid()),
        "CHAOS_PROTECTIONS": str(HERE.parent / "explorer"),
        "OUTLAST_CONFIG": str(settings(out)),
        "OUTLAST_DIR": str(out / "job"),
        "OUTLAST_RUNTIME_DIR": str(out / "run"),
        "PYTHONPATH": os.pathsep.join([str(HERE / "hook"), os.environ.get("PYTHONPATH", "")]),
    }
    os.chdir(out)
    job = multiprocessing.Process(target=LIVES[how], args=(out,))
    job.start()
    job.join()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return KILLED if job.exitcode < 0 else job.exitcode


def script(out):
    """The script by itself: its session starts the keeper."""
    sys.argv = [str(SCRIPT), str(out)]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as an interpreter would
        sys.exit(1)


def agent(out):
    """``outlast run``, whose workers are forks as well; the keeper is a process of its own."""
    from outlast.cli import main
    from outlast.keeper import process

    floor_server.have_ready(is_agent=True)
    process.subprocess = subprocess
    main(["run", "--nproc-per-node=2", str(SCRIPT), str(out)])


LIVES = {"python": script, "outlast": agent}


def settings(out):
    """Two tiers that keep little: a commit is copied, and older ones are pruned."""
    path = out / "outlast.toml"
    path.write_text(
        "".join(
            f'[[tier]]\nname = "{name}"\nurl = "{out / place}"\nkeep = 1\n'
            for name, place in TIERS.items()
        )
    )
    return path


def committed(out):
    """Steps whose commit the ledger tells, or whose manifest lies in a tier."""
    steps = set()
    with contextlib.suppress(FileNotFoundError):
        for line in (out / "job/ledger.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["event"] == "commit":
                    steps.add(event["step"])
    for place in TIERS.values():
        for manifest in (out / place).glob("step-*/manifest.json"):
            steps.add(int(manifest.parent.name.split(".")[0].removeprefix("step-")))
    return steps


def main():
    kills, how, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    code = run(kills, how, out)
    is_struck = "CKPT_CHAOS_CRASH_AT" in os.environ
    for step in committed(out) if is_struck else range(1, STEPS + 1):
        (out / "committed").mkdir(exist_ok=True)
        (out / "committed" / f"step-{step}").touch()
    sys.exit(code)


if __name__ == "__main__":
    main()
