"""What is wrong with a running job's workers, seen from outside; with machines, before it starts.

``watcher``    a process on each machine; it looks at the workers about ten times a second
``watched``    the workers of one attempt; messages between agent and watcher; the symptom ``Pace``:
               what steps were spent on, for ``policy.stragglers`` and the ledger
``hang``       the symptom ``HangWatch``: workers that make no progress, and their stacks
``pulse``      in each worker: a thread that says that Python runs
``processes``  what the kernel knows of processes; ends what workers leave behind
``exporter``   starts the process that shows metrics (``outlast.metrics``), and ends it
``send``       the process that sends one message, for whoever tells people (``metrics.teller``)
``doctor``     before a job: whether this machine, and those it works with, are fit (see there)

A symptom is a small module with a class that has the three methods of ``watcher.Symptom``: it reads
what workers left in memory (``attempt.beat``), and says what it has found as messages. To add one:
its messages go into the union in ``watched``, its class into ``watcher.SYMPTOMS``, and whoever is
to hear of it calls ``Health.hear`` in the agent (``launch.health``). What it has learned and a
successor is to know it says as ``Learned``; it is given back in ``Begin.learned``.

Guarantees: nothing here can stop training. A watcher that dies or hangs is replaced, and the ledger
has the gap. A watcher never imports torch, never asks a worker for anything that the worker would
have to wait for, and ends with its agent.

What can go wrong: the machine is so busy that the watcher itself is not run. What it would judge by
then has not moved for any process, so it distrusts a look that came late.

Rejected: watching from a thread of the agent: a question to a store, or the end of an attempt,
would hold it up for seconds, and what kills the agent's thread would go unseen.
"""
