"""A process with a hub and few descriptors (SOFT HARD), for the tests: says how it is if asked."""

import logging
import resource
import sys

from outlast.launch.membership.hub import Hub


def main(soft, hard):
    warned = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("outlast").addHandler(handler)
    hub = Hub(b"k" * 32, "127.0.0.1", 60.0, lambda error: sys.exit(str(error)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    hub.start()
    print(hub.address, flush=True)
    for _ in sys.stdin:
        print(len(warned), len(hub._strangers), *warned[:1], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
