"""ckpt-chaos with kill points that are drawn: NUM PATTERN SEED, and what the tool is given.

The tool itself takes points at even distances, from the first one on, and so always the same ones.
Here it finds all of them, and ``NUM`` are drawn of those of which ``PATTERN`` is found in
``KIND:NAME [MODE]``; 0: all.
"""

import random
import re
import sys

from ckpt_chaos import byo, cli

num, pattern, seed = int(sys.argv[1]), re.compile(sys.argv[2]), sys.argv[3]
select = byo._select


def drawn(events, max_points, modes):
    """The points to try, as the tool wants them: (number of the event, mode)."""
    names = {number: f"{kind}:{name}" for number, kind, name, _ in events}
    points = [
        (number, mode)
        for number, mode in select(events, max_points, modes)
        if pattern.search(f"{names[number]} [{mode}]")
    ]
    print(f"{len(points)} points to choose from")
    return sorted(random.Random(seed).sample(points, num or len(points)))


byo._select = drawn
sys.exit(cli.main(sys.argv[4:]))
