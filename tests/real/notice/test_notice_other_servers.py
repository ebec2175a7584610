"""The other clouds' servers: their own protocols, asked with nothing but http.client."""

import http.client
import json
import threading
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from metadata_servers.alibaba import RELEASE_PATH, ZONE_PATH, AlibabaMetadataServer
from metadata_servers.azure import COMPUTE_PATH, EVENTS_PATH, AzureMetadataServer
from metadata_servers.gcp import (
    MAINTENANCE_PATH,
    PREEMPTED_PATH,
    GcpMetadataServer,
)
from outlast.drill.metadata_server import TOKEN_PATH, AnswerFault

GOOGLE = {"Metadata-Flavor": "Google"}
AZURE = {"Metadata": "true"}
EVENTS = EVENTS_PATH + "?api-version=2020-07-01"
TTL = "X-aliyun-ecs-metadata-token-ttl-seconds"
NOW = 1_505_722_800.7  # 2017-09-18T08:20:00Z, and a bit


def ask(server, method, target, headers, body=None):
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request(method, target, body, headers)
    response = connection.getresponse()
    answered = response.read().decode()
    connection.close()
    return response.status, answered, response.headers


# --- Google --------------------------------------------------------------------------------------


def test_google_s_header_is_needed_and_sent():
    with GcpMetadataServer() as server:
        for headers in ({}, {"Metadata-Flavor": "google"}, GOOGLE | {"X-Forwarded-For": "::1"}):
            assert ask(server, "GET", PREEMPTED_PATH, headers)[0] == 403
        assert ask(server, "POST", PREEMPTED_PATH, GOOGLE)[0] == 405
        assert ask(server, "GET", "/computeMetadata/v1/instance/none", GOOGLE)[0] == 404
        status, body, headers = ask(server, "GET", PREEMPTED_PATH, GOOGLE)
        assert (status, body, headers["Metadata-Flavor"]) == (200, "FALSE", "Google")
        server.maintain("MIGRATE_ON_HOST_MAINTENANCE")
        assert ask(server, "GET", MAINTENANCE_PATH, GOOGLE)[1] == "MIGRATE_ON_HOST_MAINTENANCE"
        server.withdraw()
        assert ask(server, "GET", MAINTENANCE_PATH, GOOGLE)[1] == "NONE"


def etag(server):
    return ask(server, "GET", PREEMPTED_PATH, GOOGLE)[2]["ETag"]


def test_google_s_etag_tells_values_apart():
    with GcpMetadataServer() as server:
        first = etag(server)
        assert etag(server) == first
        server.preempt()
        assert etag(server) != first
        server.withdraw()
        assert etag(server) == first


def test_google_s_question_hangs_until_there_is_another_value():
    with GcpMetadataServer() as server:
        query = f"?wait_for_change=true&last_etag={etag(server)}&timeout_sec=600"
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(ask(server, "GET", PREEMPTED_PATH + query, GOOGLE))
        )
        asking.start()
        assert server.wait_for_hanging(1)
        server.maintain()  # another key's change is not this one's
        assert server.wait_for_hanging(1)
        assert answers == []
        server.preempt()
        asking.join(60)
        assert answers[0][:2] == (200, "TRUE")
        # What is another value already is answered at once.
        assert ask(server, "GET", PREEMPTED_PATH + query, GOOGLE)[1] == "TRUE"


def test_google_s_question_hangs_no_longer_than_asked():
    with GcpMetadataServer() as server:
        query = f"?wait_for_change=true&last_etag={etag(server)}&timeout_sec=1"
        assert ask(server, "GET", PREEMPTED_PATH + query, GOOGLE)[1] == "FALSE"


def test_leaving_ends_what_hangs():
    before = set(threading.enumerate())
    with GcpMetadataServer() as server:
        asking = threading.Thread(
            target=ask, args=(server, "GET", PREEMPTED_PATH + "?wait_for_change=true", GOOGLE)
        )
        asking.start()
        assert server.wait_for_hanging(1)
    asking.join(60)
    assert set(threading.enumerate()) <= before


# --- Azure ---------------------------------------------------------------------------------------


def events(server):
    status, body, _ = ask(server, "GET", EVENTS, AZURE)
    assert status == 200
    return json.loads(body)


def test_azure_s_header_and_version_are_needed():
    with AzureMetadataServer() as server:
        assert ask(server, "GET", EVENTS, {})[0] == 400
        assert ask(server, "GET", EVENTS, AZURE | {"X-Forwarded-For": "::1"})[0] == 400
        for query in ("", "?api-version=1999-01-01"):
            assert ask(server, "GET", EVENTS_PATH + query, AZURE)[0] == 400
        assert ask(server, "GET", "/metadata/none", AZURE)[0] == 404
        assert ask(server, "DELETE", EVENTS, AZURE)[0] == 405
        compute = COMPUTE_PATH + "?api-version=2021-02-01"
        assert json.loads(ask(server, "GET", compute, AZURE)[1])["name"] == "set_3"
        assert ask(server, "POST", compute, AZURE)[0] == 405


def test_azure_s_events_have_another_incarnation_with_each_change():
    with AzureMetadataServer(clock=lambda: NOW) as server:
        seen = [events(server)]
        assert seen[0]["Events"] == []
        deadline_t = server.preempt(in_s=30.0)
        server.preempt(in_s=900.0, kind="Reboot", resources=["set_1"])
        seen.append(events(server))
        first, other = seen[-1]["Events"]
        assert (first["EventType"], first["EventStatus"]) == ("Preempt", "Scheduled")
        assert parsedate_to_datetime(first["NotBefore"]).timestamp() == deadline_t == 1_505_722_830
        assert (other["Resources"], first["Resources"]) == (["set_1"], ["set_3"])
        server.begin()
        seen.append(events(server))
        assert seen[-1]["Events"][0]["EventStatus"] == "Started"
        assert seen[-1]["Events"][0]["NotBefore"] == ""
        server.withdraw()
        seen.append(events(server))
        assert seen[-1]["Events"] == []
        assert len({document["DocumentIncarnation"] for document in seen}) == len(seen)


def test_azure_starts_what_is_approved_and_refuses_what_it_does_not_know():
    with AzureMetadataServer() as server:
        server.preempt()
        name = events(server)["Events"][0]["EventId"]
        for body in (b"", b"{}", b'{"StartRequests":[]}', b'{"StartRequests":[{"EventId":"x"}]}'):
            assert ask(server, "POST", EVENTS, AZURE, body)[0] == 400
        right = json.dumps({"StartRequests": [{"EventId": name}]}).encode()
        assert ask(server, "POST", EVENTS, {}, right)[0] == 400
        assert ask(server, "POST", EVENTS, AZURE, right)[0] == 200
        assert events(server)["Events"][0]["EventStatus"] == "Started"


def test_leaving_ends_the_wait_for_azure_s_first_answer():
    before = set(threading.enumerate())
    with AzureMetadataServer(first_answer_s=3600.0) as server:
        asking = threading.Thread(target=ask, args=(server, "GET", EVENTS, AZURE))
        asking.start()
        while server._on_from is None:
            pass
    asking.join(60)
    assert set(threading.enumerate()) <= before


# --- Alibaba -------------------------------------------------------------------------------------


def token(server):
    status, body, _ = ask(server, "PUT", TOKEN_PATH, {TTL: "60"})
    assert status == 200
    return {"X-aliyun-ecs-metadata-token": body}


def test_alibaba_s_modes():
    with AlibabaMetadataServer(mode="normal") as server:
        assert ask(server, "GET", RELEASE_PATH, {})[0] == 404
        assert ask(server, "GET", RELEASE_PATH, token(server))[0] == 404
        assert ask(server, "GET", ZONE_PATH, {})[:2] == (200, "cn-hangzhou-i")
        assert ask(server, "PUT", TOKEN_PATH, {})[0] == 400
        right = token(server)
        server.expire_tokens()
        assert ask(server, "GET", RELEASE_PATH, right)[0] == 401
        assert ask(server, "PUT", RELEASE_PATH, {})[0] == 405
        server.mode = "hardened"
        assert ask(server, "GET", RELEASE_PATH, {})[0] == 403
        assert ask(server, "GET", RELEASE_PATH, token(server))[0] == 404
        server.mode = "old"
        assert ask(server, "PUT", TOKEN_PATH, {TTL: "60"})[0] == 404
        assert ask(server, "GET", RELEASE_PATH, right)[0] == 404


def test_alibaba_s_notice_is_a_bare_time():
    with AlibabaMetadataServer(clock=lambda: NOW) as server:
        assert server.preempt(in_s=300.0) == 1_505_723_100
        assert ask(server, "GET", RELEASE_PATH, {})[:2] == (200, "2017-09-18T08:25:00Z")
        server.withdraw(empty=True)
        assert ask(server, "GET", RELEASE_PATH, {})[:2] == (200, "")
        server.withdraw()
        assert ask(server, "GET", RELEASE_PATH, {})[0] == 404


def test_a_fault_holds_for_its_path_and_is_answered_without_hanging():
    with GcpMetadataServer() as server:
        server.inject(AnswerFault(status=503), path=PREEMPTED_PATH)
        assert ask(server, "GET", PREEMPTED_PATH + "?wait_for_change=true", GOOGLE)[0] == 503
        assert ask(server, "GET", MAINTENANCE_PATH, GOOGLE)[0] == 200
