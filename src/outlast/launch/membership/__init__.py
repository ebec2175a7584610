"""Who takes part: machines come and go, and none of them is special.

``handler``      the rendezvous that torch's agent sees, and what the hub's thread tells it
``node``         one machine: it seeks the coordinator, follows it, or becomes it; who reaches whom
``search``       from a coordinator that is gone to the next; where nobody is known, storage says
``coordinator``  that role's hands; its mind is :mod:`outlast.policy.membership`
``messages``     what agents say to each other
``hub``          all connections of an agent, in one thread, and how many there may be

Guarantees: one attempt at a time that can commit: its number was claimed on the job's own storage,
or it has more than half of the machines of the one before. Whoever is cut off from both stops its
workers. The loss of a machine, the coordinator's included, is acted upon at once: by a reset in
milliseconds, by silence within its limit. A running attempt needs no storage.
What can go wrong: storage cannot be asked when half of the machines or more are lost (the job waits
for it); all machines are lost (start them again: the newest commit stands).
Rejected: torch's c10d rendezvous (a first machine that must live, lost machines not acted upon); a
consensus protocol among agents (the job's storage is there anyway and decides as well).
"""

from outlast.launch.membership.handler import JobOver, Membership, create_handler

__all__ = ["JobOver", "Membership", "create_handler"]
