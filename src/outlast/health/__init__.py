"""What is wrong with a running job, seen from outside of its workers.

``watcher``    the watcher: a process of each machine, which looks about ten times a second
``watched``    the workers of one attempt, and what an agent and its watcher say of them; a symptom:
               what steps were spent on, for ``policy.stragglers``
``hang``       a symptom: workers that make no progress
``pulse``      in the worker: a thread that says that Python runs
``processes``  what the kernel knows of processes; what workers leave behind, and its end
``doctor``     before a job: whether this machine, and those it works with, are fit (see there)

A symptom is a small module with a class that has the three methods of ``watcher.Symptom``: it reads
what workers left in memory (``attempt.beat``), and says what it has found as messages. To add one:
its messages go into the union in ``watched``, its class into ``watcher.SYMPTOMS``, and whoever is
to hear of it calls ``Health.hear`` in the agent (``launch.health``). What it has learned and a
successor is to know it says as ``Learned``; it is given back in ``Begin.learned``.

Guarantees: nothing here can stop training: a watcher that dies or hangs is replaced, and the ledger
has the gap. It never imports torch, never asks a worker for anything that the worker would have to
wait for, and ends with its agent.

What can go wrong: the machine is so busy that the watcher itself is not run. What it would judge by
then has not moved for any process, so it distrusts a look that came late.

Rejected: watching from a thread of the agent: a question to a store, or the end of an attempt,
would hold it up for seconds, and what kills the agent's thread would go unseen.
"""
