"""Faults: what can be done to a running job, each a small object; when and where; all by name.

``fault``      what a fault is, and what a job promises to show after one
``aim``        at(step=40).on(rank=1).kill(): a fault with its moment and its place
``catalogue``  all of them by name, and draws from a seed
``processes``  killed or stopped: workers, agents, keepers, machines
``ordered``    what a worker does to itself: NaN, a held lock, a skipped collective, a leak
``storage``    slow, failing, full, read-only
``damage``     files of checkpoints: a flipped bit, a lost end, a lost file
``cables``     the network between machines: cut, reset, lossy, late, narrow
``tidings``    notices, and a clock that jumps
"""
