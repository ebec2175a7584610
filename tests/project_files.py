"""The files that the project has: what git tracks, and what it would."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def project_files(under="."):
    """Their paths below the project's directory, of those that are there."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", under],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
