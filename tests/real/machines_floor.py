"""Processes on machines of a network, started through a test's floor."""

import sys

from machine_network import Machine


class Host:
    """One machine of a test: its processes are the floor's, and run inside.

    Args:
        floor: starts and ends them.
        machine: where.
    """

    def __init__(self, floor, machine: Machine):
        self.floor = floor
        self.machine = machine
        self.address = machine.address
        self.name = machine.hostname

    def cold(self, *arguments, env=None, program=sys.executable, **options):
        """``python ARGUMENTS`` in a fresh interpreter; its id is that of the Python process."""
        ip, *inside = self.machine.command(program)
        return self.floor.cold(*inside, *arguments, env=self._environ(env), program=ip, **options)

    def warm(self, *arguments, env=None, **options):
        """``python SCRIPT ARGUMENTS`` (or ``-m outlast ARGUMENTS``), forked with torch loaded."""
        enter = self.machine.enter
        return self.floor.warm(*arguments, env=self._environ(env), enter=enter, **options)

    def outlast(self, *arguments, cold=False, **options):
        """``python -m outlast ARGUMENTS``."""
        return (self.cold if cold else self.warm)("-m", "outlast", *arguments, **options)

    def torchrun(self, *arguments, **options):
        """Stock ``torchrun ARGUMENTS``."""
        return self.cold("-m", "torch.distributed.run", *arguments, **options)

    def _environ(self, extra):
        return {**self.machine.environ, **(extra or {})}
