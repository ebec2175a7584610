"""The process that holds snapshots and writes a session's checkpoints, one per machine.

It copies them to slower tiers and prunes them too. To resume, a worker reads (and mends)
directories itself, and asks the keeper for what is in memory or in an object store.

Socket and process:

``wire``          what workers and the agent say to it over its socket, on one machine
``process``       where its socket lies; found, started, its memory held through its death
``client``        a worker's end: the connection, made again when it breaks; tiers read through it
``server``        the process itself: connections in, orders out

Memory:

``memory``        shared memory, the arenas that it holds, its books, and snapshots as a tier

A save:

``saves``         all saves in flight: what is said of them, and what is left behind
``flight``        one save: blocks hashed and written as they fill, ranks' files, all ranks' parts
``conclude``      from all parts to the commit, or another end; the fence before it
``shared_saves``  saves of ranks on several machines: the keeper of rank 0 and those of the others
``copies``        from one tier to the next, retried, pruned; what other machines bring there

Copies on other machines:

``protocol``      what keepers of several machines say to each other; the door they come in by
``peers``         which machines there are, and their memory as a tier that can be read
``replicas``      this machine's newest snapshot to theirs, paced; their newest snapshots here
``background``    the pace: how fast, and what is left of it while no core is spare

Guarantees: a worker that dies in the middle of a copy leaves every committed snapshot as it was;
one that dies after it has lost nothing. A keeper that dies is started again and finds the memory
of its predecessor, held meanwhile by the process that started it. Memory belongs to file
descriptors, not to names: when the last process of a job is gone the kernel has taken it back,
whatever they died of.
What can go wrong: storage fails (the save fails, is counted and said; training goes on); there is
no keeper (likewise).
Rejected: fork (1.4 s of page faults for 2 GB); named files in /dev/shm (left behind by a process
that is killed, and 64 MB in a container); torch in this process (200 MB and a second of its life).
"""
