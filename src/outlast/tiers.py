"""The places that checkpoints go to, as they are set: ``[[tier]]`` in ``outlast.toml``.

Tiers stand in order of speed. A checkpoint goes to the first of them and from there to the next, so
a slower tier takes every Nth of what the one before it takes, never more. N is chosen while the job
runs where it is not written and checkpoint.every is "auto". What else is not written of a tier
follows from its url: memory keeps what a dead worker leaves behind, a directory and an object store
keep what a dead machine leaves behind.

What can go wrong: a tier that cannot be meant is refused, with its name and what to write
instead. A url that holds a password is refused without being shown: it would end up in job.json,
in the ledger and on screens.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Final, Literal

import msgspec
from msgspec import UNSET

from outlast.errors import ConfigError, nearest
from outlast.units import read_number, read_whole, reader

Kind = Literal["memory", "directory", "object"]

MEMORY: Final = "memory:"
PEER: Final = "peer"  # what other machines' memory is called
OBJECT_SCHEMES: Final = ("s3", "gs", "az")  # those that a storage of outlast's opens
_NAME: Final = re.compile(r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?\Z")
_SCHEME: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")
_BUCKET: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._=-]+)*\Z")
_WRITE: Final = f'write "memory:", a directory, or {", ".join(f"{s}://…" for s in OBJECT_SCHEMES)}'
_EXAMPLE: Final = 'such as url = "/mnt/nvme/job"'


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """One place for checkpoints.

    Attributes:
        name: what people and the ledger call it: lower-case letters, digits, hyphens.
        url: "memory:", an absolute path, or s3://BUCKET/PREFIX, gs://…, az://….
        every: it takes every Nth of the job's checkpoints; None where that is chosen while it runs.
        gb_price: of 10^9 bytes brought there, in the currency of the machines' price.
        keep: how many of them stay there, at least 1.
    """

    name: str
    url: str
    every: int | None = 1
    keep: int
    gb_price: float = 0.0

    @property
    def kind(self) -> Kind:
        """What the url leads to."""
        if self.url == MEMORY:
            return "memory"
        return "object" if "://" in self.url else "directory"

    def __str__(self) -> str:
        every = "auto" if self.every is None else self.every
        price = f", {self.gb_price:g} a GB" if self.gb_price else ""
        return f"{self.url}, every {every}, keep {self.keep}{price}"


parse_keep: Final = reader(
    partial(read_whole, least=1), "checkpoints cannot be kept; write a whole number from 1"
)


def parse_directory(value: object) -> Path:
    """An absolute path, ``~`` expanded.

    Raises:
        ConfigError: it is not the path of a directory.
    """
    text = str(value)
    if not isinstance(value, str | Path) or not text or "\0" in text:
        raise ConfigError(f"{value!r} is not a directory")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{text} is not a directory: there is no such user") from None


def parse_tiers(
    value: object, *, keep: int, buffers: int | None = None, every: int | None = 1
) -> tuple[Tier, ...]:
    """The ``[[tier]]`` tables of a settings file, in their order.

    Args:
        value: what the file holds under ``tier``.
        keep: checkpoints that stay in a tier that does not say.
        buffers: how many snapshots memory holds at once, or None when that is not set.
        every: of a tier that does not say; None leaves it open.

    Raises:
        ConfigError: a tier, or their order, that cannot be meant.
    """
    if not isinstance(value, list) or not value or not all(isinstance(t, dict) for t in value):
        raise ConfigError("a tier is written as [[tier]] with name and url")
    unset = dict.fromkeys(Tier.__struct_fields__, UNSET)
    given = [SimpleNamespace(**(unset | table)) for table in value]
    tiers = tuple(
        _parse(one, position, keep, every if position > 1 else 1)
        for position, one in enumerate(given, 1)
    )
    for position, tier in enumerate(tiers):
        _check_alone(tier, tiers[:position])
    _check_memory(tiers, given[0], buffers)
    _check_cadence(tiers)
    if tiers[0].kind == "memory" and given[0].keep is UNSET and buffers is not None:
        first = msgspec.structs.replace(tiers[0], keep=min(keep, buffers))
        tiers = (first, *tiers[1:])
    return tiers


def _parse(given: SimpleNamespace, position: int, keep: int, usual: int | None) -> Tier:
    known = Tier.__struct_fields__
    for key in vars(given):
        if key not in known:
            raise ConfigError(f"tier.{key} is not a setting;{nearest(key, known)}")
    number = f"number {position}"
    if given.url is UNSET:
        which = number if given.name is UNSET else given.name
        raise ConfigError(f"tier {which}: it needs a url, {_EXAMPLE}")
    name = "" if given.name is UNSET else given.name
    if given.name is not UNSET and not (isinstance(name, str) and _NAME.match(name)):
        raise ConfigError(
            f"tier {number}: {name!r} is not a name; write lower-case letters, digits "
            "and hyphens, at most 32"
        )
    if name == PEER:
        raise ConfigError(
            f"tier {name}: other machines' memory is called so already (peer.replicas); give this "
            "tier another name"
        )
    try:
        url = _parse_url(given.url)
        keep = keep if given.keep is UNSET else parse_keep(given.keep)
        price = 0.0 if given.gb_price is UNSET else _parse_gb_price(given.gb_price)
    except ConfigError as error:
        raise ConfigError(f"tier {name or number}: {error}") from None
    found = Tier(name=name, url=url, every=usual, keep=keep, gb_price=price)
    # Without a name a tier is called after what it is: enough where there is one of each.
    name = name or {"memory": "memory", "directory": "local", "object": "object"}[found.kind]
    if given.every == "auto" and position > 1:
        usual = None
    elif given.every is not UNSET:
        usual = read_whole(given.every, least=1)
        if usual is None:
            raise ConfigError(
                f"tier {name}: every = {given.every!r} is not a whole number from 1; 1 takes each "
                'checkpoint, 5 every fifth (how often there is one is checkpoint.every), "auto" as '
                "many as its failures ask for"
            )
    return msgspec.structs.replace(found, name=name, every=usual)


def _parse_gb_price(value: object) -> float:
    price = read_number(value, least=0)
    if price is None:
        raise ConfigError(f"gb_price = {value!r} is not a price of 10^9 bytes; write 0.02")
    return price


def _parse_url(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{value!r} is not a directory or a url; {_WRITE}")
    text = value.strip()
    scheme = _SCHEME.match(text)
    if text == "memory" or (scheme and scheme[1].lower() == "memory"):
        if text != MEMORY:
            raise ConfigError(f'{text!r} is not a tier; memory is written "{MEMORY}"')
        return MEMORY
    if scheme is None or ("://" not in text and scheme[1].lower() not in OBJECT_SCHEMES):
        return str(parse_directory(text))
    name = scheme[1].lower()
    if name not in OBJECT_SCHEMES:
        raise ConfigError(f"{name}:// is no place for checkpoints that outlast knows; {_WRITE}")
    rest = text[scheme.end() :].removeprefix("//").rstrip("/")
    if "@" in rest or "?" in rest or "#" in rest:  # none of it is repeated: it may be a password
        raise ConfigError(
            f"write the url as {name}://BUCKET/PREFIX and nothing else; passwords and options "
            "come from the cloud's own environment variables"
        )
    if not text[scheme.end() :].startswith("//") or not _BUCKET.match(rest):
        raise ConfigError(f"{text!r} is not a url; write it as {name}://BUCKET/PREFIX")
    return f"{name}://{rest}"


def _check_alone(tier: Tier, before: Sequence[Tier]) -> None:
    for other in before:
        if other.name == tier.name:
            raise ConfigError(f"two tiers are named {tier.name}; give each a name of its own")
        if _same_place(other.url) == _same_place(tier.url):
            raise ConfigError(
                f"tiers {other.name} and {tier.name} are both {tier.url}; a second copy in the "
                "same place saves nothing: remove one"
            )
        inside = _inside(tier, other) or _inside(other, tier)
        if inside:
            raise ConfigError(
                f"tier {inside[0]} lies inside tier {inside[1]}, which is pruned as a whole; give "
                "them directories side by side"
            )


def _inside(one: Tier, other: Tier) -> tuple[str, str] | None:
    """The names of both if ``one`` lies below ``other``."""
    parent = _same_place(other.url).rstrip("/") + "/"
    is_below = one.kind == other.kind != "memory" and _same_place(one.url).startswith(parent)
    return (one.name, other.name) if is_below else None


def _same_place(url: str) -> str:
    return os.path.normpath(url) if "://" not in url else url


def _check_memory(tiers: Sequence[Tier], first: SimpleNamespace, buffers: int | None) -> None:
    for tier in tiers[1:]:
        if tier.kind == "memory":
            raise ConfigError(
                f"tier {tier.name}: memory is the fastest tier; put it first, and only once"
            )
    if tiers[0].kind != "memory":
        return
    if len(tiers) == 1:
        raise ConfigError(
            "memory is the only tier, and what is in memory is gone with the machine; add a "
            f"[[tier]] with a directory or an object store, {_EXAMPLE}"
        )
    if buffers == 0:
        raise ConfigError(
            "checkpoint.buffers = 0 leaves no memory for the memory tier; remove one of the two"
        )
    if buffers is not None and first.keep is not UNSET and tiers[0].keep > buffers:
        raise ConfigError(
            f"tier {tiers[0].name}: {tiers[0].keep} snapshots do not fit checkpoint.buffers = "
            f"{buffers}; set keep to {buffers} or less, or buffers to {tiers[0].keep}"
        )


def _check_cadence(tiers: Sequence[Tier]) -> None:
    if tiers[0].every != 1:
        raise ConfigError(
            f"tier {tiers[0].name}: the first tier takes each checkpoint; leave every out there, "
            "and say how often there is one with checkpoint.every"
        )
    for faster, slower in itertools.pairwise(tier for tier in tiers if tier.every is not None):
        if faster.every and slower.every and slower.every % faster.every:
            raise ConfigError(
                f"tier {slower.name}: every = {slower.every} is not a multiple of "
                f"{faster.every}, which is how often {faster.name} before it has a checkpoint; "
                f"write {_next_multiple(slower.every, faster.every)}"
            )


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
