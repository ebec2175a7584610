"""Probe imports in a process of one thread and print what came of it.

DIRECTORY LIMIT_S MODULE[:NAME]…
"""

import json
import sys

import torch  # noqa: F401 - as in the server

from outlast.ipc import readable
from outlast.launch.warm import imports as probing
from outlast.launch.warm.imports import WantedImport

sys.path.insert(0, sys.argv[1])
wanted = []
for one in sys.argv[3:]:
    module, _, name = one.partition(":")
    wanted.append(WantedImport(module, (name,) if name else ()))
probing.PROBE_TIMEOUT_S = float(sys.argv[2])
probe = probing.ImportProbe(wanted)
while not probe.is_over:
    readable([probe.fd], probe.left_s)
    probe.look()
found = {"safe": [one.module for one in probe.safe], "declined": probe.declined}
found["here"] = sorted({one.partition(":")[0] for one in sys.argv[3:]} & set(sys.modules))
print(json.dumps(found))
