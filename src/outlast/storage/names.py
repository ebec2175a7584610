"""Which names a storage takes."""

from __future__ import annotations

import re
from typing import Final

# No component starts with a dot, so a name can neither lead out nor meet an unfinished part.
NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*\Z")


def checked(name: str) -> str:
    """``name``, which is the root if it is empty.

    Raises:
        ValueError: it is not plain.
    """
    if name and not NAME.match(name):
        raise ValueError(f"{name!r} is not a name of this storage")
    return name
