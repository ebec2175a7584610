"""Warm restart: workers are forked from a process that has imported everything already.

A cold worker pays for its imports: one to three seconds for torch, one more for the compiler that
torch's optimizers import, on all ranks at once. Here one process on each machine pays for them
once, and a worker is a fork of it: some milliseconds.

    agent ── socket ── server (single-threaded, no CUDA, imports done)
                         ├─ fork ─ worker 0
                         └─ fork ─ worker 1

``starts``   starts an attempt's workers, warm or cold, and says why they start cold
``client``   the agent's end: starts the server, follows workers that are not its children
``server``   the server: imports ahead, forks workers, tells how they have ended
``imports``  what a script will import, and whether that may be done ahead; whether forking is safe

What a script sees is what it would see in a fresh interpreter: its arguments, environment, working
directory, descriptors, signals, session, ``__main__`` and search path, random numbers that are its
own. What is not the same: all workers of one server share its hash seed where PYTHONHASHSEED is
not set, and installed packages that change on disk meanwhile are seen by a new job only.

A worker dies with the server and the server with the agent, so that nothing is left behind. Where
a fork would not be the same as a fresh start, or not safe, workers start cold, and one line says
why: threads or a device driver started by an import, a module of the script's own directory with
the name of one that is loaded already, another interpreter, NUMA binding, a crash within a warm
worker's first second that a cold one does not have.

Rejected: multiprocessing's forkserver (pickles, keeps the parent's ``__main__``, and its children
have no descriptors, session or command line of their own); forking the agent (it has threads);
waiting spare processes (each of them holds the state of its start, and the agent's store is not
there yet).
"""
