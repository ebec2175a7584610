"""What ``outlast plan`` reads, and what it refuses in one plain line."""

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from outlast import config, units
from outlast.cli import cli, quantities
from outlast.cli.quantities import DURATION
from outlast.errors import ConfigError
from thorough import examples


@pytest.fixture(autouse=True)
def _nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "hours"),
    [("1h30m", 1.5), ("2d 12h", 60.0), ("1h 5min 3s", 1 + 303 / 3600), ("30m", 0.5)],
)
def test_times_as_people_write_them(text, hours):
    assert DURATION.read(text) == pytest.approx(hours, rel=1e-12)


@pytest.mark.parametrize("text", ["1h30x", "1h-3m", "1h30", "h", "1hm"])
def test_times_that_nobody_can_read(text):
    with pytest.raises(ValueError, match="write 90s, 3min or"):
        DURATION.read(text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("failures --rate -2/h", "a rate is above 0"),
        ("failures --rate 0/h", "a rate is above 0"),
        ("failures --rate 100%/gpu-day --gpus 8", "a probability is below 100 %"),
        ("failures --rate 2/fortnight", "'fortnight' is not a unit of time"),
        ("failures --rate lots", "'lots' is not a rate; write 2/h"),
        ("failures --rate llama-4 --gpus 8", "did you mean llama-3?"),
        ("failures --rate 0.5%/gpu-day", "a rate per gpu needs the number of GPUs"),
        ("failures --rate 1e-5/step", "a rate per step needs the step's time"),
        ("failures", "no rate is known; give --rate 2/h"),
        ("failures --gpus 0 --rate 1/h", "a number is above 0"),
        ("failures --gpus 1.5 --rate 1/h", "is not a whole number"),
        ("interval --rate 2/h", "--checkpoint is missing"),
        ("interval --rate 2/h --checkpoint 3", "'3' has no unit; write 90s, 3min or 1.5h"),
        ("interval --rate 2/h --checkpoint 3lightyears", "is not a unit of a time"),
        ("interval --rate 2/h --checkpoint -3min", "a time is above 0"),
        ("interval --rate 2/h --checkpoint nan", "is not a time"),
        ("spot --rate 2/h --checkpoint 3min --discount 1.3 --on-demand 1", "at most 1, like 0.3"),
        ("spot --rate 2/h --checkpoint 3min --spot -1 --on-demand 1", "a price is at least 0"),
        ("spot --rate 2/h --checkpoint 3min --spot 0.7", "--on-demand is missing"),
        ("spot --rate 2/h --checkpoint 3min --on-demand 1", "--spot is missing"),
        (
            "spot --rate 2/h --checkpoint 3min --spot 0.7 --on-demand 1 --flush-probability 2",
            "a share is at least 0 and at most 1",
        ),
        ("flush --state 640 --bandwidth 1GB/s --notice 3min", "'640' has no unit"),
        ("flush --state 640GB --bandwidth 1GB --notice 3min", "not a unit of a bandwidth"),
        ("interval --tier 9s", "is not a tier; write what a save blocks"),
        ("interval --tier 9s,1e-5/gpu-day", "a tier's rate is the whole job's"),
        ("interval --tier 9s,1/h --rate 2/h", "--rate and --tier do not go together"),
        ("memory --params 7", "'7': a number of parameters is above 1000"),
        ("zones --machines 64 --reclaim 5%/h --zones 100", "in more zones than there are of them"),
        (
            "deadline --work 1h --deadline 5h --rate 1/h --away 1h --spot 1 --on-demand 0",
            "--on-demand 0: machines on demand for nothing",
        ),
        ("memory", "give one of --params 7B and --state 98GB"),
        ("replicas --nodes 15", "pairs need an even number"),
        ("replicas --nodes 4 --lost 5", "there are only 4 machines"),
        ("zones --machines 8 --reclaim 5%/gpu-day", "--reclaim is of a whole zone"),
        (
            "deadline --work 1h --deadline 5h --rate 1/s --away 1s --spot 1 --on-demand 2",
            "come and go too often",
        ),
        ("intervals", "did you mean interval?"),
        ("--gpus 8 interval", "write outlast plan interval --gpus"),
        ("--nodes 7", "these flags answer no question yet"),
        ("failures --rate 2/h --plot x.svg", "there is no picture of this"),
        ("interval --rate 2/h --checkpoint 1s --plot x.gif", "end it in .svg, .html or .png"),
    ],
)
def test_refusals(refused, line, words):
    assert words in refused(line)


NUMBERS = (
    "0",
    "1",
    "-1",
    "1e-300",
    "1e300",
    "nan",
    "abc",
    "",
    "3",
    "64",
    "0.01",
    "1,000",
    "5e-324",
)


UNITS = (
    "s",
    "min",
    "h",
    "year",
    "",
    "x",
    "%/h",
    "/h",
    "%/gpu-day",
    "/1e9 h",
    " in 5h",
    "GB",
    "GB/s",
)


AMOUNTS = st.builds(str.__add__, st.sampled_from(NUMBERS), st.sampled_from(UNITS)) | st.text(
    max_size=6
)


FLAGS = {
    "failures": ("gpus", "rate", "days"),
    "interval": ("gpus", "rate", "checkpoint", "restore", "lag", "every", "step", "tier"),
    "spot": ("rate", "checkpoint", "spot", "on-demand", "flush-probability", "discount", "useful"),
    "budget": ("gpus", "rate", "days", "lost", "price", "local-steps", "step"),
    "flush": ("state", "bandwidth", "notice", "nodes", "poll"),
    "memory": ("params", "nodes", "buffers", "memory"),
    "zones": ("machines", "reclaim", "zones", "back"),
    "spares": ("rate", "repair"),
    "restarts": ("rate", "max-restarts", "days"),
    "replicas": ("nodes", "lost"),
    "deadline": ("work", "deadline", "rate", "away", "spot", "on-demand", "changeover"),
}


@examples(100)
@given(st.data())
def test_planless_input_is_refused_in_words(data):
    question = data.draw(st.sampled_from(sorted(FLAGS)))
    line = ["plan", question, "--json"]
    line += [f"--{flag}={data.draw(AMOUNTS)}" for flag in FLAGS[question]]
    try:
        CliRunner().invoke(cli, line, catch_exceptions=False, standalone_mode=False)
    except (ConfigError, click.ClickException) as error:
        words = error.format_message() if isinstance(error, click.ClickException) else str(error)
        assert words


def test_a_billion_machines(ask, refused):
    assert ask("replicas --nodes 1000000000 --lost 2")["recovers_probability"] == pytest.approx(1)
    assert "at most 1e+09" in refused("replicas --nodes 1e12")
    assert "are no place" in refused("zones --machines 8 --reclaim 1e6/h")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("failures --rate 0,5/h --days 3", "'0,5/h' is not a rate; write 0.5; a comma parts"),
        ("failures --rate 0,500/h --days 3", "write 0.500; a comma"),
        ("failures --gpus 8 --rate 0,5%/gpu-day --days 3", "write 0.5; a comma"),
        ("interval --rate 2/h --checkpoint 1,5min", "'1,5min' is not a time; write 1.5; a comma"),
        ("spot --rate 2/h --checkpoint 3min --spot 0,70 --on-demand 1", "write 0.70; a comma"),
        ("flush --state 1_5TB --bandwidth 1GB/s --notice 2min", "write 1.5; a comma"),
        (
            "flush --state 1TB --bandwidth 1.5Gb/s --notice 2min",
            "Gb/s are bits or bytes; write GB/s for bytes, Gbit/s for bits",
        ),
        ("flush --state 640Gb --bandwidth 1GB/s --notice 2min", "write GB for bytes"),
    ],
)
def test_a_decimal_comma_and_a_unit_of_two_meanings_are_refused(refused, line, says):
    assert says in refused(line)


@pytest.mark.parametrize(
    ("written", "bytes_per_s"),
    [
        ("100Gbps", 12.5e9),
        ("100Gbit/s", 12.5e9),
        ("12.5GBps", 12.5e9),
        ("12.5gb/s", 12.5e9),
        ("12,500MB/s", 12.5e9),
    ],
)
def test_bits_are_no_bytes(ask, written, bytes_per_s):
    found = ask(f"flush --state 640GB --bandwidth {written} --notice 3min")
    assert found["bandwidth_bytes_per_s"] == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "spot --rate 2/h --checkpoint 3min --discount 30% --spot 0.9 --on-demand 1",
            "--spot and --discount say the same thing twice",
        ),
        ("interval --tier 9s,7.78e-6/s --lag 3min", "--lag and --tier do not go together"),
        ("interval --tier 9s,7.78e-6/s --restore 3min", "--restore and --tier do not go together"),
        ("interval --tier 9s,1/h --gpus-per-node 4", "--gpus-per-node and --tier do not go"),
        ("interval" + " --tier 9s,1/h" * 6, "6 times --tier: more than 5 are not planned for"),
    ],
)
def test_what_would_be_ignored_is_refused(refused, line, says):
    assert says in refused(line)


@pytest.mark.parametrize("unit", ["m", "M"])
def test_a_minute_is_no_month(refused, unit):
    assert "could be a minute or a month; write min or month" in refused(
        f"failures --rate 5/{unit} --days 3"
    )


@pytest.mark.parametrize("text", ["MTBF 3h", "mtbf=180min", "MTTF: 3h"])
def test_a_mean_time_between_failures_is_a_rate(ask, text):
    assert ask(f"failures --rate '{text}'")["mtbf_h"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("failures --rate 3h", "'3h' is a time; write 1/3h for one in each"),
        ("failures --rate 'MTBF 0h'", "a time is above 0 and at most 1,000 years"),
        ("nonsense", "See: outlast plan --help"),
    ],
)
def test_a_refusal_says_what_to_write(refused, line, says):
    assert says in refused(line)


def test_a_number_of_one_or_none(say):
    assert say("spares --rate 1e-5/h --repair 24h").startswith("Hold no machines in reserve: that")
    assert say("spares --rate 1e-3/h --repair 24h").startswith("Hold 1 machine in reserve: that")


def test_spot_that_is_dearer_is_not_taken(say):
    words = say("deadline --work 48h --deadline 49h --rate 1/h --away 2h --spot 2 --on-demand 1")
    assert words.startswith("Yes, within 2 d 01 h: 48.10 on demand alone; spot does not pay.")


# --- the same forms and the same words as in outlast.toml -----------------------------------------


TIMES = (
    *("90s", "90 sec", "1.5 min", "1 minute", "3 hours", "2 h", "1 hr", "1h30m", "1 h 30 min"),
    *("2d", "2 days", "1 week", "1d 12h", "250 ms"),
)


@pytest.mark.parametrize("text", TIMES)
def test_a_time_is_read_alike_as_a_flag_and_as_a_setting(text):
    hours = quantities.DURATION.read(text)
    assert units.read_seconds(text, least_s=0.0, most_s=1e9) == pytest.approx(hours * 3600)
    assert config.parse_every(text).seconds == pytest.approx(hours * 3600)


@pytest.mark.parametrize("text", ["90", "3x", "1h30", "h", "1h 2parsecs"])
def test_what_is_no_time_is_none_in_either(text):
    with pytest.raises(ValueError, match="write"):
        quantities.DURATION.read(text)
    with pytest.raises(config.ConfigError, match="write"):
        config.parse_span(text)


def test_a_number_alone_is_answered_in_the_same_words():
    with pytest.raises(ValueError, match=r"^'90' has no unit; write "):
        quantities.DURATION.read("90")
    for read in (config.parse_span, config.parse_poll, config.parse_hang, config.parse_grace):
        with pytest.raises(config.ConfigError, match=r"^'90' has no unit; write "):
            read("90")
    with pytest.raises(config.ConfigError, match=r"^200 has no unit; write "):
        config.parse_rate(200)


@pytest.mark.parametrize(("hours", "is_little"), [("10s", True), ("59 min", True), ("2h", False)])
def test_evidence_of_less_than_an_hour_is_marked(hours, is_little):
    source = quantities.RATE.read(f"1 in {hours}").source
    assert ("(little evidence: less than an hour)" in source) == is_little
    assert source.endswith("over the prior of 1 in 10 h")
