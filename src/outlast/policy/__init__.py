"""Decisions as small pure objects: no input or output, no clock, no torch."""
