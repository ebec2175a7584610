"""The explorer's tests speak to keepers as those of ``tests/real/keeper`` do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "keeper"))
sys.path.append(str(Path(__file__).parents[2] / "unit" / "keeper"))  # a worker that only listens
