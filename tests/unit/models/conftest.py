"""Puts this directory on the path, and the keepers' fakes and the storages' contract."""

import sys
from pathlib import Path

for _room in ("keeper", "storage"):
    sys.path.append(str(Path(__file__).parents[1] / _room))
