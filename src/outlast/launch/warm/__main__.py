"""``python -u -m outlast.launch.warm SOCKET AGENT``: the server; only our agent calls it so."""

import sys

from outlast.launch import worker  # noqa: F401 - what a cold worker has loaded when it begins

_BASELINE = frozenset(sys.modules)


def _main() -> None:
    from outlast.launch.warm.server import serve

    job = serve(int(sys.argv[1]), int(sys.argv[2]), _BASELINE)
    # In a worker from here on, far from the server's frames and what they hold.
    from outlast.launch.warm.child import become

    become(job)


if __name__ == "__main__":
    _main()
