"""Turns a ledger into what a person reads; knows nothing of how events came to be."""
