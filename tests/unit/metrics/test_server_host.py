"""Which names a request may use on the metrics' port: no web page may resolve its own to it."""

import select
import socket

import pytest

from outlast.metrics.server import MetricsServer, plain

HOSTS_HERE = [
    *("localhost", "LocalHost:9410", "localhost.:9410", "127.0.0.1", "127.0.0.1:9410"),
    *("127.8.7.6", "[::1]", "[::1]:9410", " localhost "),
]
HOSTS_ELSEWHERE = [
    *("evil.example", "evil.example:9410", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("192.168.0.7:9410", "[fe80::1]:9410", "", "a:b:c", "[", "0.0.0.0", "127.0.0.1@evil.example"),
]


def ask(bound, *hosts):
    listener = socket.create_server((bound, 0))
    port = listener.getsockname()[1]
    server = MetricsServer(listener, {"/": lambda _: plain("200 OK", "the job's")})
    lines = [b"GET / HTTP/1.1", *(b"Host: " + host.encode() for host in hosts), b"", b""]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"\r\n".join(lines))
        while not select.select([sock], [], [], 0)[0]:
            server.turn(0.1)
        answer = sock.recv(1 << 16)
    server.close()
    return answer


@pytest.mark.parametrize("host", HOSTS_HERE)
def test_this_machine_by_its_own_names(host):
    assert ask("127.0.0.1", host).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("host", HOSTS_ELSEWHERE)
def test_another_name_is_refused_and_told_what_to_ask_for(host):
    answer = ask("127.0.0.1", host)
    assert answer.startswith(b"HTTP/1.1 421")
    assert b"ask for localhost" in answer
    assert b"the job's" not in answer


def test_one_good_name_does_not_cover_another():
    assert ask("127.0.0.1", "localhost", "evil.example").startswith(b"HTTP/1.1 421")


def test_a_client_without_a_name_is_no_browser():
    assert ask("127.0.0.1").startswith(b"HTTP/1.1 200")


def test_a_port_that_is_open_to_a_network_goes_by_names_that_are_not_known_here():
    assert ask("0.0.0.0", "node7.cluster.example:9410").startswith(b"HTTP/1.1 200")
