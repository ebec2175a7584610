"""A resume that mends what it finds damaged: ``mender.py JOB TIER=PATH…``, tiers fastest first.

It says ``{"resumed": STEP, "repaired": [[FILE, TIER], …]}`` when all of it is done.
"""

import json
import os
import sys
from pathlib import Path

import points
import protections

from outlast.attempt.link import LocalLink
from outlast.checkpoint.catalog import standing
from outlast.checkpoint.manifest import Place
from outlast.storage import Directory
from outlast.training import resume


def main(job, tiers):
    """Resume from the newest save that is whole anywhere, and mend the other copies."""
    places = [Place(name, Directory(Path(path))) for name, path in tiers]
    found = resume.find(standing(places, job, ()), LocalLink(), (), lambda _: None)
    repaired = [[one.file, one.place] for one in found.repaired]
    os.write(1, json.dumps({"resumed": found.step, "repaired": repaired}).encode() + b"\n")


if __name__ == "__main__":
    protections.off_as_told()
    points.as_told()
    main(sys.argv[1], [tuple(one.split("=")) for one in sys.argv[2:]])
