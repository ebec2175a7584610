"""A fault with nothing set spoils nothing; each field spoils what it says."""

from outlast.drill.metadata_server import Answer, Fault

RIGHT = Answer(200, b"right", (("A", "b"),))


def test_nothing_set_spoils_nothing():
    assert Fault().spoil(RIGHT) == RIGHT


def test_each_field():
    assert Fault(status=503).spoil(RIGHT) == Answer(503)
    assert Fault(body=b"").spoil(RIGHT) == Answer(200, b"")
    assert Fault(status=302, headers=(("Location", "/"),)).spoil(RIGHT).headers == (
        ("Location", "/"),
    )
    assert Fault(raw=b"").spoil(RIGHT) == Answer(0)
    assert Fault(delay_s=1, drip_s=1, padding_bytes=1).spoil(RIGHT) == RIGHT
