"""``outlast plan simulate``: what would the job go through? The same as ``outlast simulate``."""

from outlast.cli.simulate import command

__all__ = ["command"]
