"""EC2's hop limit for real: a metadata service whose tokens travel one hop, and a container two.

Three network namespaces: the service, the machine that forwards, and the container.
"""

import contextlib
import os
import shutil
import subprocess
import sys

import msgspec
import pytest
from floor import until

from outlast.policy.fitness import PlatformFacts, judge_platform

# As EC2 does it: the answer to a PUT has a limited time to live, all others have the usual one.
SERVICE = """
import socket, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_PUT(self):
        self.connection.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, int(sys.argv[1]))
        self.say(200, b"a-token-of-some-length==")

    def do_GET(self):
        self.say(404 if "X-aws-ec2-metadata-token" in self.headers else 401, b"")

    def say(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("10.9.1.2", 80), Answers)
print("ready", flush=True)
server.serve_forever()
"""
PROBE = """
import msgspec
from outlast.health.doctor.probes import probe_platform
facts = probe_platform("aws", "http://10.9.1.2", file="", command=[], grace_s=None)
print(msgspec.json.encode(facts).decode())
"""
WAYS = (("pod", "10.9.2.2", "10.9.2.1"), ("imds", "10.9.1.2", "10.9.1.1"))


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(name="inside")
def _inside():
    """``inside("pod")``: how a command begins that runs there."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    names = {name: f"outlast-hops-{os.getpid()}-{name}" for name in ("pod", "node", "imds")}
    try:
        for name in names.values():
            ip("netns", "add", name)
        for number, (name, address, gateway) in enumerate(WAYS):
            there, here = names[name], names["node"]
            near = ("link", "add", f"to{number}", "netns", here, "type", "veth")
            ip(*near, "peer", "name", "eth0", "netns", there)
            ip("-n", here, "address", "add", f"{gateway}/24", "dev", f"to{number}")
            ip("-n", here, "link", "set", f"to{number}", "up")
            ip("-n", there, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", there, "link", "set", "eth0", "up")
            ip("-n", there, "route", "add", "default", "via", gateway)
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        subprocess.run(["ip", "netns", "exec", names["node"], "sh", "-c", forward], check=True)
    except subprocess.CalledProcessError as error:
        for name in names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    yield lambda name: ["ip", "netns", "exec", names[name]]
    for name in names.values():
        ip("netns", "delete", name)


@pytest.mark.parametrize(("hops", "status"), [(1, "failed"), (2, "ok")])
def test_a_hop_limit_that_swallows_tokens_is_told_from_a_service_that_is_away(inside, hops, status):
    def asked():
        done = subprocess.run(
            [*inside("pod"), sys.executable, "-c", PROBE], capture_output=True, check=True
        )
        return judge_platform(msgspec.json.decode(done.stdout, type=PlatformFacts))

    command = [*inside("imds"), sys.executable, "-c", SERVICE, str(hops)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as service:
        assert service.stdout.readline() == b"ready\n"
        found = asked()
        service.kill()
    assert found.status == status, found
    assert ("so the hop limit of the answers is 1" in found.seen) is (hops == 1)
    if hops == 1:
        until(lambda: service.poll() is not None, "its end")
        assert "hop" not in asked().seen  # nobody answers at all
