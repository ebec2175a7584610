"""``outlast drill resume``: whether a run that was stopped and started again is the same.

``exactness``     the proof: which runs are made, in which order, and what is found
``runs``          one run in a place of its own, and what differs first between two of them
``causes``        what a try has shown, in words, with the line to change
``script_lines``  where in a script something is written

What they have done inside of workers:

``conditions``    what a start is to differ in: a file that the worker reads
``attendant``     does it: leaves, waits, looks, brings values across
``still``         holds one thing still: a clock, a seed, a loader's processes
``reach``         what the script's own names reach
``kernels``       the operations of one step, one by one
"""
