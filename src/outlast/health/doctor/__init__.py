"""The doctor: is this machine fit for this job, and do the machines fit each other.

``examination``  one machine: which checks there are, in what order, what came of them, and what
                 people read of it
``meeting``      several machines find each other on the job's storage and compare themselves
``probes``       a probe in a process of its own, with a deadline; the small probes
``compute``      the probe of the processor, with torch

Guarantees: everything ends. Whatever can hang (a mount whose server is gone, a driver, a metadata
service) is done in a spawned process, which is left behind at its deadline: a process that hangs in
the kernel cannot even be killed. Nothing that belongs to the job is changed: what is written to try
a place lies below ``doctor-…`` there and is removed. Judgements are :mod:`outlast.policy.fitness`.

What can go wrong: a probe that had to be left behind may leave its ``doctor-…`` folder; the next
doctor there removes it once it is an hour old. Bandwidth is what a second or two of writing shows,
beside whatever else goes on: a burst of a cache may be faster than a save of hundreds of gigabytes.

Rejected: threads for the probes (one that hangs in the kernel keeps the whole process from ending);
a daemon that watches all the time (that is what the job's own watchers do).
"""
