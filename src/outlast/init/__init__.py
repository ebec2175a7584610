"""The files with which a scheduler runs ``outlast run``: batch scripts and manifests.

Guarantees: a script's arguments arrive at the script as they were given, whatever is in them. What
a scheduler would refuse by its form (a name, a number) is refused here, in one line. The exit codes
in a file are those of :class:`outlast.errors.Exit`; none is written down a second time.

What can go wrong: a site's own rules (accounts, quotas, queues) are not known here. The files are
meant to be read and changed; each line that is not plain says why it is there.

Rejected: building manifests as objects and dumping them (no comments, no order for a reader);
talking to the scheduler (its own command does that, with the person's own rights).
"""
