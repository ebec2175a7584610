"""A process with a hub, for the tests: connects to ADDRESS and says what it hears; see main."""

import sys
import threading

from outlast.launch.membership.hub import Hub


def main(address, key_hex, silence_s):
    hub = Hub(
        bytes.fromhex(key_hex), "127.0.0.1", float(silence_s), lambda error: sys.exit(str(error))
    )

    def begin():
        peer = hub.dial(address)
        peer.on_open = lambda one: one.send(b"here")
        peer.on_message = lambda data: print(data.decode(), flush=True)
        peer.on_closed = lambda why, certain: print(f"closed {certain} {why}", flush=True)

    hub.call(begin)
    hub.start()
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
