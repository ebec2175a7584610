"""Connections that carry nothing but heartbeats: MODE ADDRESS KEY SILENCE_S [CONNECTIONS].

serve: a hub at this address; prints its port, then a line for each connection that comes ("here")
       or is lost ("lost" and why), and "heard NUMBER" as heartbeats come in from the others.
beat:  a hub that connects to ADDRESS so many times.
"""

import sys
import threading

from outlast.launch.membership.hub import Hub

SAY_EVERY = 500


class Counting:
    """The receiving end of a connection: a heartbeat is a sealed message without a byte in it."""

    def __init__(self, unsealer, heard):
        self._unsealer, self._heard = unsealer, heard

    def feed(self, data):
        for message in self._unsealer.feed(data):
            if not message:
                self._heard()
            yield message


def say(*words):
    print(*words, flush=True)


def serve(hub):
    count = 0

    def heard():
        nonlocal count
        count += 1
        if count % SAY_EVERY == 0:
            say("heard", count)

    def accepted(peer):
        peer.ends = (peer.ends[0], Counting(peer.ends[1], heard))
        peer.on_closed = lambda why, _: say("lost", why)
        say("here")

    hub.on_accepted = accepted
    say("at", hub.address)


def beat(hub, address, connections):
    for _ in range(connections):
        peer = hub.dial(address)
        peer.on_closed = lambda why, _: say("lost", why)


def main(mode, address, key, silence_s, connections=1):
    host = address if mode == "serve" else "0.0.0.0"
    hub = Hub(bytes.fromhex(key), host, float(silence_s), lambda error: sys.exit(str(error)))
    if mode == "serve":
        serve(hub)
    else:
        hub.call(lambda: beat(hub, address, int(connections)))
    hub.start()
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
