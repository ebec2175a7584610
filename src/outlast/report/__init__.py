"""Turns a ledger into what a person reads; knows nothing of how events came to be.

``facts``     what every report says, computed once; predicted and measured; data for ``--json``
``text``      lines for a terminal, and the console that they are printed on
``chart``     pictures of what ``outlast plan`` answers
"""
