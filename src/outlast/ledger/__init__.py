"""The append-only record of what happened to a job; every report is computed from it alone.

``events``     the names and fields of events
``file``       appending and reading ``ledger.jsonl``, with and without waiting for the disk
``narrator``   tells people what happens, from the ledger alone; ``say``, by which every room prints
``job``        ``job.json``, who a job is; ``plan.json``, what was planned of it
``command``    ``command.json``: the script and arguments that a job was begun with

Folds over events:

``clocks``     takes clock steps out, so that hours are those that went by
``goodput``    where each worker-second went
``incidents``  what went wrong, what it cost, and when the job was back
``so_far``     both, of a ledger that is still being written: each event is folded once
``measured``   what this job's saves and steps have taken so far
``past``       what an attempt must know of those before it, read once and handed on
"""
