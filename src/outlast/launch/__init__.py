"""``outlast run``: torch's agent, with our rendezvous store, our judgement and our exit codes.

``first_look``  what is done before torch is imported; where machines meet
``arguments``   the command line, by torchrun's own parser
``run``         puts the pieces together; leaves with the exit code
``agent``       starts and watches this machine's workers; passes notices on
``worker``      the first thing that runs in a worker
``warm``        workers forked from a process that has imported everything (see there)
``health``      the agent's end of its watcher
``symptoms``    hangs and slow ranks, put together from the watchers of all machines
``judging``     what is made of a failed attempt
``ending``      the end of an attempt: survivors are kept, nothing else is left
``machines``    what the job's other machines mean for this one's workers
``membership``  which machines take part, and who leads (see there)
``torchrun``    torchrun's plugin: ``--rdzv-backend outlast``

Guarantees: one attempt at a time can commit. No worker outlives its agent, and of an attempt
nothing but the workers that are kept (``ending``) lives when the next one begins. A failure is
judged by :mod:`outlast.policy.restart`, and what follows is said in one line.

What can go wrong: the agent is killed. Its workers die with it; the same command goes on from the
newest checkpoint.
"""
