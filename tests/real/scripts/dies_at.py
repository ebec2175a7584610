"""Runs a script that knows nothing of tests: MARK STEP SCRIPT [ARGUMENT …].

The last rank kills itself, once (MARK is there then), behind the optimizers' STEP-th step.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

MARK, STEP, SCRIPT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
steps = []


def count(*_):
    steps.append(None)
    is_last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    if len(steps) == STEP and is_last and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(count)
sys.argv = sys.argv[3:]
runpy.run_path(SCRIPT, run_name="__main__")
