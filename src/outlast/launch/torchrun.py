"""What makes ``torchrun --rdzv-backend outlast`` known: torch asks here each time it is imported.

So nothing is loaded before that backend is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handler() -> Callable[[Any], Any]:
    """What makes a rendezvous of torch's parameters; named in the package's entry points."""
    return _create


def _create(parameters: Any) -> Any:
    from outlast.launch.membership import create_handler

    return create_handler(parameters)
