"""Replays failures against the very policy objects that the runtime uses, on a virtual clock.

A job's time, and what it costs:

``traces``      recordings of spot fleets, failures and lifetimes, read
``draws``       failures drawn from a law; ``fit`` finds a law from times, some of them cut off
``setup``       the job: tiers, recovery mode, price; and what came of it
``job``         one run of it, checkpoint by checkpoint, with the runtime's decisions
``many``        many runs side by side, from failure to failure
``study``       policies compared on the same failures
``clock``       time that costs nothing
``failures``    what goes wrong, and when: published rates, correlated losses, recorded traces

What is modelled is what surrounds the decisions: how long saves, messages, storage and workers
take. The decisions themselves (:mod:`outlast.policy`) are not modelled: they run.
What can go wrong: a cost that is left out, or a network that behaves in no way that is modelled
here; figures from real processes come first where there are any.
"""
