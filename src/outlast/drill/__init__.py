"""Faults as small objects, scenarios, the verdict."""
