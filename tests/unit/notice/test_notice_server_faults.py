"""A fault with nothing set spoils nothing; each field spoils what it says."""

from outlast.drill.metadata_server import AnswerFault, MetadataAnswer

RIGHT = MetadataAnswer(200, b"right", (("A", "b"),))


def test_nothing_set_spoils_nothing():
    assert AnswerFault().spoil(RIGHT) == RIGHT


def test_each_field():
    assert AnswerFault(status=503).spoil(RIGHT) == MetadataAnswer(503)
    assert AnswerFault(body=b"").spoil(RIGHT) == MetadataAnswer(200, b"")
    assert AnswerFault(status=302, headers=(("Location", "/"),)).spoil(RIGHT).headers == (
        ("Location", "/"),
    )
    assert AnswerFault(raw=b"").spoil(RIGHT) == MetadataAnswer(0)
    assert AnswerFault(delay_s=1, drip_s=1, padding_bytes=1).spoil(RIGHT) == RIGHT
