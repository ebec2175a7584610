"""``python -u -m outlast.launch.warm SOCKET AGENT [SIGNAL…]``: the server; only our agent calls it.

The signals named are blocked in it, and not in its workers.
"""

import sys

from outlast.launch import worker  # noqa: F401 - what a cold worker has loaded when it begins

_BASELINE = frozenset(sys.modules)


def _main() -> None:
    from outlast.launch.warm.server import serve

    _, fd, agent, *held = sys.argv
    job = serve(int(fd), int(agent), _BASELINE)
    # In a worker from here on, far from the server's frames and what they hold.
    from outlast.launch.warm.server import become

    become(job, [int(number) for number in held])


if __name__ == "__main__":
    _main()
