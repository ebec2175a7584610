"""What people read: reports of a job, lines on a terminal, pictures of plans.

``facts``     what every report says, computed once from the ledger; data for ``--json``
``text``      the report as lines for a terminal; the console on which other commands print too
``chart``     pictures of what ``outlast plan`` answers; no ledger is needed for these
"""
