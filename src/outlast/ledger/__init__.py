"""The append-only record of what happened to a job; every report is computed from it alone.

``events``  the names and fields of events
``file``    appending and reading ``ledger.jsonl``, with and without waiting for the disk
``narrator`` tells people what happens, from the ledger alone
``goodput`` where each worker-second went, as a fold over events
``incidents`` what went wrong, what it cost, and when the job was back
"""
