"""What the benchmarks share: a model to train, ways to save it, clocks, tables.

Workers of other libraries run with this package on their path in virtual environments of their
own; nothing in here imports more than torch before it is needed.
"""
