"""The server's own protocol, asked with nothing but http.client."""

import http.client
import json
import re
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from outlast.drill.metadata_server import (
    ACTION_PATH,
    REBALANCE_PATH,
    TIME_PATH,
    TOKEN_PATH,
    AnswerFault,
    AwsMetadataServer,
)

TTL = "X-aws-ec2-metadata-token-ttl-seconds"
NOW = 1_505_722_800.7  # 2017-09-18T08:20:00Z, and a bit


class Asker:
    def __init__(self):
        self.now = NOW
        self.server = AwsMetadataServer(clock=lambda: self.now)

    def __call__(self, method, path, **headers):
        connection = http.client.HTTPConnection(urlsplit(self.server.url).netloc, timeout=30)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=sent)
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        return response.status, body, response.headers

    def token(self, ttl_s=21_600):
        status, token, _ = self("PUT", TOKEN_PATH, **{TTL: str(ttl_s)})
        assert status == 200
        return token

    def get(self, path, token):
        status, body, _ = self("GET", path, X_aws_ec2_metadata_token=token)
        return status, body


@pytest.fixture
def ask():
    asker = Asker()
    with asker.server:
        yield asker


def test_a_token_is_given_for_the_time_asked(ask):
    status, token, headers = ask("PUT", TOKEN_PATH, **{TTL: "60"})
    assert status == 200
    assert re.fullmatch(r"[A-Za-z0-9+/]{54}==", token)
    assert headers[TTL] == "60"
    assert ask.get(ACTION_PATH, token)[0] == 404
    ask.now += 59
    assert ask.get(ACTION_PATH, token)[0] == 404
    ask.now += 1
    assert ask.get(ACTION_PATH, token)[0] == 401


@pytest.mark.parametrize("ttl", ["0", "21601", "-1", "", "six", "1.5", "9" * 5000, "²"])
def test_a_token_s_time_must_be_given_and_in_range(ask, ttl):
    assert ask("PUT", TOKEN_PATH, **{TTL: ttl.encode("utf-8")})[0] == 400


def test_the_token_request_s_other_refusals(ask):
    assert ask("PUT", TOKEN_PATH)[0] == 400
    assert ask("PUT", TOKEN_PATH, **{TTL: "60", "X-Forwarded-For": "127.0.0.1"})[0] == 403
    for method in ("GET", "POST", "DELETE"):
        status, _, headers = ask(method, TOKEN_PATH, **{TTL: "60"})
        assert (status, headers["Allow"]) == (405, "PUT")
    for method in ("PUT", "POST", "DELETE"):
        assert ask(method, ACTION_PATH, X_aws_ec2_metadata_token=ask.token())[0] == 405


@pytest.mark.parametrize("path", [ACTION_PATH, REBALANCE_PATH, "/latest/meta-data/none"])
def test_a_valid_token_is_needed_for_every_path(ask, path):
    ask.server.preempt()
    ask.server.recommend_rebalance()
    assert ask("GET", path)[0] == 401
    assert ask.get(path, "guessed") == (401, "")
    token = ask.token()
    assert ask.get(path, token)[0] == (404 if "none" in path else 200)
    ask.server.expire_tokens()
    assert ask.get(path, token)[0] == 401


def test_the_notice_is_404_then_json_then_404(ask):
    token = ask.token()
    assert ask.get(ACTION_PATH, token)[0] == 404
    assert ask.server.preempt(in_s=120.0) == 1_505_722_920
    assert ask.get(ACTION_PATH, token) == (
        200,
        '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}',
    )
    ask.server.preempt(in_s=60.0, action="stop")
    assert json.loads(ask.get(ACTION_PATH, token)[1]) == {
        "action": "stop",
        "time": "2017-09-18T08:21:00Z",
    }
    ask.server.withdraw()
    ask.server.withdraw()
    assert ask.get(ACTION_PATH, token)[0] == 404
    assert ask.get(TIME_PATH, token)[0] == 404


def test_the_older_form_of_the_notice_is_for_terminations(ask):
    token = ask.token()
    ask.server.preempt(action="stop")
    assert ask.get(TIME_PATH, token)[0] == 404
    ask.server.preempt()
    assert ask.get(TIME_PATH, token) == (200, "2017-09-18T08:22:00Z")
    ask.server.only_termination_time("2017-09-18T08:21:00Z")
    assert ask.get(ACTION_PATH, token)[0] == 404
    assert ask.get(TIME_PATH, token) == (200, "2017-09-18T08:21:00Z")


def test_the_rebalance_recommendation(ask):
    token = ask.token()
    assert ask.get(REBALANCE_PATH, token)[0] == 404
    ask.server.recommend_rebalance()
    assert ask.get(REBALANCE_PATH, token) == (200, '{"noticeTime": "2017-09-18T08:20:00Z"}')
    assert ask.get(ACTION_PATH, token)[0] == 404


def test_requests_are_recorded_without_tokens(ask):
    token = ask.token()
    ask.get(ACTION_PATH + "?a=1", token)
    ask("GET", ACTION_PATH)
    assert ask.server.requests == [
        ("PUT", TOKEN_PATH, 200),
        ("GET", ACTION_PATH, 404),
        ("GET", ACTION_PATH, 401),
    ]
    assert token not in repr(ask.server.requests)


def test_a_fault_holds_for_so_many_requests_of_its_method(ask):
    ask.server.inject(AnswerFault(status=503), times=2, method="GET")
    token = ask.token()
    statuses = [ask.get(ACTION_PATH, token)[0] for _ in range(4)]
    assert statuses == [503, 503, 404, 404]


def test_a_late_answer_is_whole_in_the_end(ask):
    token = ask.token()
    ask.server.preempt()
    right = ask.get(ACTION_PATH, token)
    ask.server.inject(AnswerFault(delay_s=0.05, drip_s=0.0005))
    assert ask.get(ACTION_PATH, token) == right
    ask.server.inject(AnswerFault(padding_bytes=1 << 20))
    status, body = ask.get(ACTION_PATH, token)
    assert (status, body.strip()) == right
    assert len(body) == len(right[1]) + (1 << 20)


def test_it_listens_on_the_loopback_only(ask):
    host, port = ask.server._http.socket.getsockname()
    assert host == "127.0.0.1"
    assert ask.server.url == f"http://127.0.0.1:{port}"


class LastWord(AnswerFault):
    def write(self, raw, file, closing):
        closing.wait(30)
        time.sleep(0.3)  # the thread is still there when the server's own has ended


@pytest.mark.parametrize(
    "fault", [AnswerFault(delay_s=3600.0), AnswerFault(drip_s=3600.0), LastWord()]
)
def test_leaving_cuts_faults_short_and_joins_every_thread(fault):
    before = set(threading.enumerate())
    with AwsMetadataServer() as server:
        server.inject(fault)
        place = urlsplit(server.url)
        with socket.create_connection((place.hostname, place.port)) as waiting:
            waiting.sendall(b"PUT /latest/api/token HTTP/1.1\r\n\r\n")
            while not server.requests:
                time.sleep(0.001)
            server.stop()
    assert set(threading.enumerate()) <= before


def test_a_server_that_was_never_started_can_be_stopped():
    AwsMetadataServer().stop()
