"""One launcher's part in a job, as the session of a single machine has it: ``member.py JOB [NUM]``.

It opens the job, takes its lock, claims an attempt, and begins NUM of them (one by default), each
on record in the ledger. What it has been promised goes to standard output, a line of JSON each:
``{"job": ID}`` once the job's record is there, ``{"claimed": NUMBER}`` once a number is its own,
``{"kept": 1}`` once a rollback is kept beside the ledger.
With MEMBER_STRANGER set it takes nobody's process for one of this machine, as another machine
would, and waits less long for a sign of life.
"""

import json
import os
import sys
import threading

import points
import protections

from outlast import config
from outlast.checkpoint.catalog import open_job
from outlast.errors import OutlastError
from outlast.ledger import command
from outlast.ledger.events import encode
from outlast.ledger.file import Ledger, keep, make_room
from outlast.ledger.job import JobLock
from outlast.ledger.past import Past
from outlast.peer import claims
from outlast.peer.key import job_key
from outlast.storage import Directory

WAIT_S = 60.0


def say(**words):
    """One line, in one write."""
    os.write(1, json.dumps(words).encode() + b"\n")


def main(directory, num_attempts):
    """Take part."""
    is_stranger = "MEMBER_STRANGER" in os.environ
    if is_stranger:
        claims.is_alive = lambda _: None
        claims.STRANGER_S, claims.AGAIN_S = 0.6, 0.1
    claims.KEPT = 3  # so that few attempts are enough for the oldest to be forgotten
    claims.ALIVE_S = 0.1
    settings = config.load({"dir": directory})
    job = open_job(settings.dir, settings)
    say(job=job.id)
    lock = JobLock(settings.dir, shared=True)
    mine = command.own_command()
    if mine is not None:
        command.settle(settings, mine, is_alone=lock.is_alone, in_script=True)
    job_key(Directory(settings.dir))
    make_room(settings.dir)
    past = Past(settings.dir).look()
    told = threading.Condition()
    numbers = []

    def is_claimed(number):
        with told:
            return told.wait_for(lambda: number in numbers or term.overtaken, WAIT_S)

    def claimed(number):
        with told:
            numbers.append(number)
            told.notify_all()

    term = claims.term_over(settings.dir, lambda _: None, is_locked=False)
    term.on_claimed = claimed
    term.open(past.attempt)
    ledger = Ledger(settings.dir, job=job.id)
    rollback = ledger.entry("rollback", None, {"step": 10**9, "first": 10**9})  # undoes nothing
    if keep(settings.dir, encode(rollback)):
        say(kept=1)
    for _ in range(num_attempts):
        number = ledger.attempt = term.begin()
        if not is_claimed(number) or term.overtaken:
            say(overtaken=term.overtaken)
            sys.exit(3)
        say(claimed=number)
        ledger.append("attempt_formed", world_size=1, nodes=1)
    ledger.append("job_finished", exit_code=0, reason="")
    ledger.close()
    term.close(0)
    lock.release()


if __name__ == "__main__":
    protections.off_as_told()
    points.as_told()
    try:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    except OutlastError as error:
        say(refused=str(error))
        sys.exit(2)
