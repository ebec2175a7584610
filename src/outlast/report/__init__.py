"""Turns a ledger into what a person reads; knows nothing of how events came to be.

``facts``     what every report says, computed once; and as data for ``--json``
``text``      lines for a terminal
"""
