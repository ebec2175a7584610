"""Puts this directory on the path: ``unit_fakes`` is for all rooms' tests."""
