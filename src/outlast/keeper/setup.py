"""What a keeper is told when it starts."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from outlast.config import Settings
from outlast.keeper.place import socket_path

LINGER_S = 20.0


class TierSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A durable tier: where it is, and how many checkpoints it keeps."""

    name: str
    url: str
    keep: int


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a keeper needs to know.

    Attributes:
        job: the job's id.
        directory: the job's directory, where the ledger is.
        socket: where it listens.
        tiers: durable ones, the fastest first.
        linger_s: how long it stays when a worker has died and nobody else is connected.
        replicas: how many other machines keep this one's newest snapshot; None: see the policy.
        rate_bytes: how fast it is sent to them at most, per second; None: after the cores.
        claims: where attempts are claimed, a directory or URL; "" where nobody claims them.
        inherited: arena → descriptor of memory that a predecessor left; 0 is its books.
    """

    job: str
    directory: str
    socket: str
    tiers: tuple[TierSetup, ...]
    linger_s: float = LINGER_S
    replicas: int | None = None
    rate_bytes: float | None = None
    claims: str = ""
    inherited: dict[int, int] = {}


def encode_setup(setup: Setup) -> bytes:
    """What ``decode_setup`` reads; a path may be in any encoding, which msgspec would refuse."""
    return json.dumps(msgspec.to_builtins(setup, str_keys=True)).encode()


def decode_setup(data: bytes) -> Setup:
    """The setup in ``data``."""
    return msgspec.convert(json.loads(data), Setup, str_keys=True)


def setup_of(settings: Settings, job: str, of: str = "", claims: str = "") -> Setup:
    """The keeper of a job with these settings.

    Args:
        settings: the job's.
        job: its id.
        of: what tells apart keepers of one job on one machine: each agent has its own.
        claims: where attempts are claimed; "" where nobody claims them.

    Raises:
        ConfigError: there is no place for its socket.
    """
    tiers = tuple(
        TierSetup(name=tier.name, url=tier.url, keep=tier.keep)
        for tier in settings.tiers
        if tier.kind != "memory"
    )
    return Setup(
        job=job,
        directory=str(settings.dir),
        socket=str(socket_path(job + of, Path(settings.dir))),
        tiers=tiers,
        replicas=settings.peer_replicas,
        claims=claims,
        rate_bytes=settings.peer_rate_bytes,
    )
