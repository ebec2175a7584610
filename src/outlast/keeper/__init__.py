"""The process that holds snapshots and does all storage work, one per machine.

``wire``       what is said over its socket
``descriptors``  bytes and descriptors through a socket
``setup``      what it is told when it starts
``arena``      shared memory for snapshots
``budget``     how much memory this machine can still give
``place``      where its socket lies, and who may open it
``process``    finding it, starting it, holding its memory through its death
``waits``      what is said while the end waits for slower tiers
``client``     a worker's end of the socket
``remote``     a tier that only the keeper may touch, as a worker reads it
``memory``     snapshots in memory as a tier that can be read
``holdings``   the memory that it holds, and the books that a successor inherits
``connection`` one worker or supervisor, as it sees them
``server``     the process itself: connections in, orders out
``saves``      what is in flight: from the first block to all ranks' parts
``conclude``   from there to the commit
``flight``     one save: what has come of it so far
``files``      one rank's files on their way to the fastest tier
``persist``    blocks hashed and written as soon as they are full
``commit``     the parts of all ranks become a manifest, or are refused
``fence``      whether an attempt may still commit
``gate``       where a snapshot waits until that is known
``copies``     from one tier to the next, retried, pruned

Guarantees: a worker that dies in the middle of a copy leaves every committed snapshot as it was;
one that dies after it has lost nothing. A keeper that dies is started again and finds the memory
of its predecessor, held meanwhile by whoever started it. Memory belongs to file descriptors, not
to names: when the last process of a job is gone the kernel has taken it back, whatever they died
of.
What can go wrong: storage fails (the save fails, is counted and said; training goes on); there is
no keeper (likewise).
Rejected: fork (1.4 s of page faults for 2 GB); named files in /dev/shm (left behind by whoever is
killed, and 64 MB in a container); torch in this process (200 MB and a second of its life).
"""
