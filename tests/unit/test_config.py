"""Settings: every source, every parser, every refusal in words."""

from datetime import UTC, datetime
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from unit_prices import priced

from outlast import config
from outlast.config import Every, load, parse_every
from outlast.errors import ConfigError
from outlast.prices import PriceList
from outlast.tiers import Tier


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key in config.SETTINGS:
        monkeypatch.delenv(config.variable_name(key), raising=False)
    monkeypatch.delenv("OUTLAST_CONFIG", raising=False)


def write(text, name="outlast.toml"):
    path = Path(name)
    path.write_text(text)
    return path


def refusal(*args, **more):
    with pytest.raises(ConfigError) as caught:
        load(*args, **{"environ": {}} | more)
    return str(caught.value)


# --- sources -------------------------------------------------------------------------------------


def test_defaults():
    settings = load(environ={})
    assert settings.dir == Path.cwd() / "outlast-job"
    assert settings.checkpoints_dir == settings.dir / "checkpoints"
    assert settings.checkpoint_every == Every()
    assert settings.checkpoint_keep == 3
    assert settings.checkpoint_buffers is None
    assert (settings.checkpoint_optimizer_every, settings.checkpoint_moments) == (1, "exact")
    assert settings.tiers == (
        Tier(name="local", url=str(settings.dir / "checkpoints"), every=1, keep=3),
    )
    assert (settings.notice_platform, settings.notice_base_url) == ("auto", "")
    assert settings.notice_grace_s is None
    assert settings.notice_requeue is False
    assert (settings.price_spot, settings.price_on_demand) == (PriceList(), PriceList())
    assert set(settings.origin.values()) == {"default"}
    assert set(settings.origin) == {*config.SETTINGS, "tier"}


def rate(num_bytes):
    return f"{num_bytes / 1e9:g} GB/s" if num_bytes >= 1e9 else f"{num_bytes / 1e6:g} MB/s"


CASES = {
    "dir": ("/a", "/b", "/c", lambda s: str(s.dir)),
    "resume": ("true", "false", "true", lambda s: str(s.resume).lower()),
    "tell.urls": ("json://a", "json://b", "json://c", lambda s: " ".join(s.tell_urls.urls)),
    "tell.file": ("/a", "/b", "/c", lambda s: str(s.tell_file)),
    "tell.least": ("info", "warning", "critical", lambda s: s.tell_least),
    "tell.group": ("1 s", "2 s", "3 s", lambda s: f"{s.tell_group_s:g} s"),
    "tell.per_hour": ("2", "3", "4", lambda s: str(s.tell_per_hour)),
    "checkpoint.every": ("1 steps", "2 steps", "3 steps", lambda s: str(s.checkpoint_every)),
    "checkpoint.keep": ("4", "5", "6", lambda s: str(s.checkpoint_keep)),
    "checkpoint.buffers": ("1", "2", "0", lambda s: str(s.checkpoint_buffers)),
    "checkpoint.overhead": ("0.02", "0.03", "0.5", lambda s: f"{s.checkpoint_overhead:g}"),
    "checkpoint.optimizer_every": ("2", "3", "4", lambda s: str(s.checkpoint_optimizer_every)),
    "checkpoint.each_step": (
        "true",
        "false",
        "true",
        lambda s: str(s.checkpoint_each_step).lower(),
    ),
    "checkpoint.moments": ("bf16", "exact", "bf16", lambda s: s.checkpoint_moments),
    "notice.platform": ("aws", "none", "auto", lambda s: s.notice_platform),
    "notice.base_url": ("http://a", "http://b", "http://c", lambda s: s.notice_base_url),
    "notice.poll": ("1 s", "2 s", "3 s", lambda s: f"{s.notice_poll_s:g} s"),
    "membership.labels": (
        "zone=a",
        "zone=b, rack=1",
        "pool=x",
        lambda s: ", ".join(f"{name}={value}" for name, value in s.membership_labels.items()),
    ),
    "membership.silence": ("1 s", "2 s", "4 s", lambda s: f"{s.membership_silence_s:g} s"),
    "notice.grace": ("1 s", "2 s", "3 s", lambda s: f"{s.notice_grace_s:g} s"),
    "notice.early": ("leave", "save", "ignore", lambda s: s.notice_early),
    "notice.requeue": ("true", "false", "true", lambda s: str(s.notice_requeue).lower()),
    "notice.file": ("/a", "/b", "/c", lambda s: str(s.notice_file)),
    "notice.command": ("a", "b", "c", lambda s: " ".join(s.notice_command)),
    "notice.end": (
        *(f"2030-01-0{day}T00:00:00+00:00" for day in (1, 2, 3)),
        lambda s: s.notice_end.isoformat(),
    ),
    "notice.approve": ("true", "false", "true", lambda s: str(s.notice_approve).lower()),
    "peer.replicas": ("0", "1", "2", lambda s: str(s.peer_replicas)),
    "peer.rate": ("1 MB/s", "2 GB/s", "3 MB/s", lambda s: rate(s.peer_rate_bytes)),
    "peer.tls_cert": ("/a", "/b", "/c", lambda s: str(s.peer_tls_cert)),
    "peer.tls_key": ("/a", "/b", "/c", lambda s: str(s.peer_tls_key)),
    "peer.tls_ca": ("/a", "/b", "/c", lambda s: str(s.peer_tls_ca)),
    "health.hang": ("1 s", "2 s", "off", lambda s: str(s.health_hang)),
    "health.hang_floor": ("1 s", "2 s", "4 s", lambda s: f"{s.health_hang_floor_s:g} s"),
    "health.hang_ceiling": ("1 s", "2 s", "4 s", lambda s: f"{s.health_hang_ceiling_s:g} s"),
    "health.anomaly": ("report", "stop", "rollback", lambda s: s.health_anomaly),
    "health.window": ("30", "40", "50", lambda s: str(s.health_window)),
    "health.factor": ("11.0", "12.0", "13.0", lambda s: str(s.health_factor)),
    "health.settle": ("1", "2", "4", lambda s: str(s.health_settle)),
    "health.skip": ("2", "3", "4", lambda s: str(s.health_skip)),
    "health.rollbacks": ("0", "1", "2", lambda s: str(s.health_rollbacks)),
    "health.stretch": ("10", "20", "40", lambda s: str(s.health_stretch)),
    "metrics.port": ("9410", "9411", "9412", lambda s: str(s.metrics_port)),
    "metrics.bind": ("127.0.0.1", "0.0.0.0", "::1", lambda s: s.metrics_bind),
    "metrics.textfile": ("/a.prom", "/b.prom", "/c.prom", lambda s: str(s.metrics_textfile)),
    "metrics.trackers": ("false", "true", "false", lambda s: str(s.metrics_trackers).lower()),
    "price.spot": ("1.5", "2.5", "3.5", lambda s: str(s.price_spot)),
    "price.on_demand": ("1.5", "2.5", "3.5", lambda s: str(s.price_on_demand)),
    "price.currency": ("USD", "EUR", "GBP", lambda s: s.price_currency),
    "price.kind": ("a", "b", "c", lambda s: str(s.price_kind)),
    "health.straggler": ("replace", "leave out", "report", lambda s: s.health_straggler),
    "health.notify": ("a", "b", "c", lambda s: " ".join(s.health_notify)),
    "workers.warm": ("true", "false", "true", lambda s: str(s.workers_warm).lower()),
    "workers.in_process": ("true", "false", "true", lambda s: str(s.workers_in_process).lower()),
    "workers.late": ("move", "drop", "wait", lambda s: s.workers_late),
    "workers.late_factor": ("1.2", "1.3", "1.4", lambda s: str(s.workers_late_factor)),
    "restart.without_progress": ("2", "3", "4", lambda s: str(s.restart_without_progress)),
    "restart.failures": ("0", "1", "2", lambda s: str(s.restart_failures)),
    "restart.window": ("1 s", "2 s", "4 s", lambda s: f"{s.restart_window_s:g} s"),
    "restart.leave_out": ("1 s", "2 s", "4 s", lambda s: f"{s.restart_leave_out_s:g} s"),
    "restart.back_off": ("1 s", "2 s", "4 s", lambda s: f"{s.restart_back_off_s:g} s"),
    "restart.let_in": ("true", "false", "true", lambda s: str(s.restart_let_in).lower()),
}


def test_every_setting_is_tried():
    assert set(CASES) == set(config.SETTINGS)


@pytest.mark.parametrize("key", CASES)
def test_argument_over_variable_over_file_over_default(key):
    in_file, in_environment, argument, read = CASES[key]
    table, _, name = key.rpartition(".")
    write((f"[{table}]\n" if table else "") + f'{name} = "{in_file}"\n')
    variable = config.variable_name(key)
    assert variable == "OUTLAST_" + key.replace(".", "_").upper()
    environ = {variable: in_environment}
    for arguments, surroundings, value, origin in [
        ({key: argument}, environ, argument, "argument"),
        ({key: None}, environ, in_environment, variable),
        (None, environ, in_environment, variable),
        (None, {variable: ""}, in_file, "outlast.toml"),
        (None, {}, in_file, "outlast.toml"),
    ]:
        settings = load(arguments, environ=surroundings)
        assert (read(settings), settings.origin[key]) == (value, origin)


def test_the_processs_own_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("OUTLAST_CHECKPOINT_KEEP", "9")
    assert load().checkpoint_keep == 9
    assert load(environ={}).checkpoint_keep == 3


def test_which_file():
    write("[checkpoint]\nkeep = 4\n")
    other = write("[checkpoint]\nkeep = 5\n", "other.toml")
    third = write("[checkpoint]\nkeep = 6\n", "third.toml")
    environ = {"OUTLAST_CONFIG": str(other)}
    assert load(environ={}).checkpoint_keep == 4
    assert load(environ=environ).checkpoint_keep == 5
    settings = load(environ=environ, file=third)
    assert settings.checkpoint_keep == 6
    assert settings.origin["checkpoint.keep"] == str(third)


def test_the_documented_file_is_read_but_for_what_is_not_there_yet():
    write(
        """
        dir = "./outlast-job"
        [checkpoint]
        every = "auto"
        keep = 3
        buffers = "auto"
        optimizer_every = 1
        moments = "exact"
        [[tier]]
        name = "local"
        url = "/mnt/nvme/job"
        every = 1
        [notice]
        platform = "auto"
        base_url = ""
        grace = "auto"
        [price]
        spot = 0.70
        on_demand = 1.00
        """
    )
    settings = load(environ={})
    assert settings.checkpoints_dir == Path("/mnt/nvme/job")
    assert settings.prices == priced(0.70, 1.00)


def test_the_page_of_settings_shows_each_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    block = page.partition("```toml\n")[2].partition("```")[0]
    shown = load(environ={}, file=write(block))
    assert {key for key, name in shown.origin.items() if name == "default"} == set()
    for key, (attribute, _) in config.SETTINGS.items():
        if key not in ("price.spot", "price.on_demand"):  # which have none
            default = getattr(load(environ={}, file=write("")), attribute)
            assert (key, getattr(shown, attribute)) == (key, default)


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        load(environ={}).checkpoint_keep = 1


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[checkpoint]\nevry = 3",
            "checkpoint.evry is not a setting; did you mean checkpoint.every?",
        ),
        (
            "[checkpoints]\nkeep = 3",
            "checkpoints.keep is not a setting; did you mean checkpoint.keep?",
        ),
        ("dri = '/a'", "dri is not a setting; did you mean dir?"),
        ("[zzz]\nqqq = 1", "zzz.qqq is not a setting; known: dir, resume, checkpoint.every"),
        ("checkpoint = 3", "checkpoint is not a setting; did you mean checkpoint."),
        ("[workers]\nmin = 2", "workers.min: an elastic number of workers is not there yet"),
        (
            "[checkpoint.every]\na = 1",
            "checkpoint.every (from outlast.toml): {'a': 1} is not a cad",
        ),
        ("dir = 3", "dir (from outlast.toml): 3 is not a directory"),
        ("dir = ''", "dir (from outlast.toml): '' is not a directory"),
        ("dir = 's3://bucket/x'", "Checkpoints go to an object store through a [[tier]]"),
        ("dir = '~nobody-of-this-name/x'", "dir (from outlast.toml): ~nobody-of-this-name/x"),
        ("a = ", "outlast.toml is not valid TOML"),
        ("[[checkpoint]]\nkeep = 1", "checkpoint is not a setting"),
    ],
)
def test_a_file_that_cannot_be_meant(text, says):
    write(text)
    assert says in refusal()


def test_an_unknown_argument():
    says = refusal({"checkpoint.kep": 3})
    assert says == "argument: checkpoint.kep is not a setting; did you mean checkpoint.keep?"


def test_a_bad_variable_is_named():
    says = refusal(environ={"OUTLAST_CHECKPOINT_KEEP": "none"})
    assert says.startswith("checkpoint.keep (from OUTLAST_CHECKPOINT_KEEP): 'none' checkpoints")


def test_files_that_cannot_be_read(tmp_path):
    assert "cannot be read: No such file" in refusal(environ={"OUTLAST_CONFIG": "missing.toml"})
    assert "cannot be read: Is a directory" in refusal(file=tmp_path)
    Path("latin.toml").write_bytes(b"dir = '\xe4'")
    assert "latin.toml is not valid TOML" in refusal(file=Path("latin.toml"))


# --- parsers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "every"),
    [
        ("auto", Every()),
        (" auto ", Every()),
        (200, Every(steps=200)),
        ("200", Every(steps=200)),
        (" 200 ", Every(steps=200)),
        ("200 steps", Every(steps=200)),
        ("1 step", Every(steps=1)),
        ("200Steps", Every(steps=200)),
        ("5 min", Every(seconds=300.0)),
        ("5min", Every(seconds=300.0)),
        ("1.5 h", Every(seconds=5400.0)),
        (".5 s", Every(seconds=0.5)),
        ("250 ms", Every(seconds=0.25)),
        ("2 hours", Every(seconds=7200.0)),
        ("3 SECONDS", Every(seconds=3.0)),
    ],
)
def test_cadences(value, every):
    assert parse_every(value) == every


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, True, False, None, 1.5, [], {}),
        *(
            "",
            "0",
            "0 steps",
            "-1",
            "-5 min",
            "0.0 s",
            "1.5 steps",
            "1e3 s",
            "five",
            "5 fortnights",
        ),
        *("min", "5 min min", "²", "nan s", "inf s", "1,5 s", "5 min\nx"),
    ],
)
def test_what_is_no_cadence(value):
    with pytest.raises(ConfigError, match="is not a cadence; write"):
        parse_every(value)


@given(st.text(max_size=8) | st.integers() | st.floats() | st.none())
def test_a_cadence_is_positive_or_refused(value):
    try:
        every = parse_every(value)
    except ConfigError:
        return
    given_value = every.steps if every.steps is not None else every.seconds
    assert given_value is None or given_value > 0
    assert (every == Every()) == (isinstance(value, str) and value.strip() == "auto")


@given(st.integers(1, 10**6), st.floats(0.001, 9e4))
def test_a_cadence_reads_what_it_shows(steps, seconds):
    assert parse_every(str(Every(steps=steps))) == Every(steps=steps)
    shown = parse_every(str(Every(seconds=float(f"{seconds:.3f}") or 1.0)))
    assert shown.seconds == pytest.approx(float(f"{seconds:.3f}") or 1.0, rel=1e-5)
    assert parse_every(str(Every())) == Every()


GOOD = [
    ("checkpoint.keep", 1, "checkpoint_keep", 1),
    ("checkpoint.keep", "12", "checkpoint_keep", 12),
    ("checkpoint.keep", " 12 ", "checkpoint_keep", 12),
    ("checkpoint.buffers", "auto", "checkpoint_buffers", None),
    ("checkpoint.buffers", 0, "checkpoint_buffers", 0),
    ("checkpoint.buffers", "8", "checkpoint_buffers", 8),
    ("checkpoint.overhead", "2.5%", "checkpoint_overhead", 0.025),
    ("checkpoint.overhead", 0.3, "checkpoint_overhead", 0.3),
    ("checkpoint.optimizer_every", "3", "checkpoint_optimizer_every", 3),
    ("checkpoint.moments", "bf16", "checkpoint_moments", "bf16"),
    ("notice.platform", "none", "notice_platform", "none"),
    ("notice.base_url", "", "notice_base_url", ""),
    ("notice.base_url", "http://127.0.0.1:80/", "notice_base_url", "http://127.0.0.1:80"),
    ("notice.poll", "200 ms", "notice_poll_s", 0.2),
    ("notice.poll", "5 s", "notice_poll_s", 5.0),
    ("membership.silence", "200 ms", "membership_silence_s", 0.2),
    ("membership.silence", "5 min", "membership_silence_s", 300.0),
    ("notice.grace", "auto", "notice_grace_s", None),
    ("notice.grace", "2 min", "notice_grace_s", 120.0),
    *(("notice.requeue", value, "notice_requeue", True) for value in (True, "true", "Yes", "1", 1)),
    *(("notice.requeue", value, "notice_requeue", False) for value in (False, "FALSE", "no", 0)),
    *(
        ("notice.platform", name, "notice_platform", name)
        for name in ("gcp", "azure", "alibaba", "slurm", "kubernetes", "signal")
    ),
    ("notice.file", "", "notice_file", None),
    ("notice.file", "/run/leave", "notice_file", Path("/run/leave")),
    ("notice.command", "", "notice_command", ()),
    ("notice.command", "ask 'the site' $HOME", "notice_command", ("ask", "the site", "$HOME")),
    ("notice.end", "2030-01-01T02:00+02:00", "notice_end", datetime(2030, 1, 1, tzinfo=UTC)),
    (
        *("notice.end", datetime(2030, 1, 1, tzinfo=UTC), "notice_end"),
        datetime(2030, 1, 1, tzinfo=UTC),
    ),
    ("notice.end", "", "notice_end", None),
    ("notice.approve", True, "notice_approve", True),
    ("notice.approve", "true", "notice_approve", True),
    ("notice.approve", "False", "notice_approve", False),
    ("peer.replicas", "auto", "peer_replicas", None),
    ("peer.replicas", 2, "peer_replicas", 2),
    ("peer.rate", "auto", "peer_rate_bytes", None),
    ("peer.rate", "1.5 GB/s", "peer_rate_bytes", 1.5e9),
    ("peer.rate", "200MB/s", "peer_rate_bytes", 2e8),
    ("peer.tls_ca", "", "peer_tls_ca", None),
    ("price.spot", 0, "price_spot", PriceList(other=0.0)),
    ("price.spot", "0.70", "price_spot", PriceList(other=0.7)),
    ("price.spot", {"p5": 12}, "price_spot", PriceList(kinds={"p5": 12.0})),
    ("price.spot", "p5=12, other=.7", "price_spot", PriceList(kinds={"p5": 12.0}, other=0.7)),
    ("price.currency", " EUR ", "price_currency", "EUR"),
    ("price.currency", "€", "price_currency", "€"),
    ("price.kind", "auto", "price_kind", None),
    ("price.kind", " p5.48xlarge", "price_kind", "p5.48xlarge"),
    ("dir", Path("x"), "dir", None),
]


@pytest.mark.parametrize(("key", "value", "attribute", "parsed"), GOOD)
def test_good_values(key, value, attribute, parsed):
    found = getattr(load({key: value}, environ={}), attribute)
    assert found == (parsed if key != "dir" else Path.cwd() / "x")


def test_a_file_is_meant_from_the_working_directory():
    assert load({"notice.file": "leave"}, environ={}).notice_file == Path.cwd() / "leave"


@pytest.mark.parametrize("platform", ["file", "command"])
def test_a_file_or_a_command_alone_must_be_named(platform):
    assert refusal({"notice.platform": platform}).startswith(
        f'notice.platform is "{platform}", and notice.{platform} is not set: nothing would be heard'
    )
    settings = load({"notice.platform": platform, f"notice.{platform}": "/x"}, environ={})
    assert settings.notice_platform == platform


def test_each_step_needs_its_buffers():
    few = {"checkpoint.each_step": True, "checkpoint.buffers": 2}
    assert refusal(few) == (
        "checkpoint.buffers is 2, and checkpoint.each_step needs 4: two versions of a snapshot, "
        'one in the making, and one on its way to storage; write checkpoint.buffers = 4, or "auto"'
    )
    assert load({**few, "checkpoint.buffers": 4}, environ={}).checkpoint_each_step


def test_a_home_directory_is_meant(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert load({"dir": "~/job"}, environ={}).dir == Path("/home/me/job")


BAD = [
    *(
        ("checkpoint.keep", value, "write a whole number from 1")
        for value in (0, -1, 1.5, "x", True, "²", "+1", "1_0", "1" * 10, [])
    ),
    *(
        ("checkpoint.buffers", value, 'write "auto", or 0 to 8')
        for value in (9, -1, 1.5, "x", True, "AUTO", "")
    ),
    *(
        ("checkpoint.overhead", value, "is not a share of the time; write 1% or 0.01")
        for value in (0, 1, -0.1, "0%", "101%", "nan", "x", True)
    ),
    *(
        ("checkpoint.optimizer_every", value, "1 puts the optimizer's state into each checkpoint")
        for value in (0, -1, 1.5, "x", True)
    ),
    ("checkpoint.moments", "bf61", "the optimizer's moments; did you mean bf16?"),
    ("checkpoint.moments", 3, "the optimizer's moments; known: exact, bf16"),
    ("notice.platform", "awss", "'awss' is not a platform; did you mean aws?"),
    ("notice.platform", "zzzzz", "'zzzzz' is not a platform; known: auto, aws, gcp, azure,"),
    *(("notice.file", value, "is not a file's path") for value in (1, True, [], "a\0b")),
    *(
        ("notice.command", value, "write a program and its arguments, quoted as for a shell")
        for value in (1, ["ask"], "ask 'site", "a\0b")
    ),
    *(
        ("notice.end", value, "is not a moment; write it with its zone: 2026-12-01T11:00Z")
        for value in ("tomorrow", "2030-01-01T00:00", "2030-01-01", datetime(2030, 1, 1), 5)
    ),
    *(("notice.approve", value, "is neither true nor false") for value in ("perhaps", 2, "", [])),
    *(("peer.replicas", value, 'write "auto", or 0 to 2') for value in (3, -1, 1.5, "x", True, "")),
    *(
        ("peer.rate", value, 'has no unit; write "auto", "200 MB/s" or "1.5 GB/s"')
        for value in (200, "200")
    ),
    *(
        ("peer.rate", value, 'is not a rate; write "auto", "200 MB/s" or "1.5 GB/s"')
        for value in ("0 MB/s", "1 kB/s", "200 MB", "-1 MB/s", True, "")
    ),
    ("notice.base_url", "127.0.0.1", "write it as http://HOST[:PORT]"),
    *(
        ("notice.base_url", value, "write it as http://HOST[:PORT]")
        for value in (
            "ftp://host",
            "https://host",
            "http://host:99999",
            "http://[::1",
            "http://a b",
        )
    ),
    *(
        ("notice.grace", value, 'is not a grace period; write "auto" or "30 s"')
        for value in ("5 steps", "soon", 0, "-1 s", [])
    ),
    ("notice.grace", 5, 'has no unit; write "auto" or "30 s", up to a day'),
    *(
        ("notice.requeue", value, "is neither true nor false; write one of them")
        for value in ("on", "", "10", 2, [], 1.0)
    ),
    *(
        ("membership.labels", value, "does not say where a machine stands")
        for value in ("zone", "zone=", "=a", "row=1", "zone=a,zone=b", 3)
    ),
    *(
        ("health.hang", value, 'write "auto", "off" or "30 s", from 1 s to a day')
        for value in (0, "0 s", "soon", "2 h ago", True, "25 h")
    ),
    *(("health.hang_floor", value, "is not a limit") for value in (0, "auto", "off", "25 h")),
    *(
        ("membership.silence", value, "is not how long a machine may be silent")
        for value in ("auto", "100 ms", "6 min", "soon")
    ),
    *(("health.anomaly", value, "no answer to a loss that goes wrong") for value in ("x", 1)),
    *(("health.window", value, "from 10 to 10000") for value in (9, 1.5, True, "x")),
    *(("health.settle", value, "from 1 to") for value in (0, -1, "2 steps")),
    *(("health.factor", value, "a factor from 1 on") for value in (0.5, "x", "nan", "inf", True)),
    *(
        ("price.spot", value, "write a number like 0.70")
        for value in (-1, "x", "nan", "inf", True, "p5=-1", {"p5": "x"}, "p5=1, p5=2", [1])
    ),
    ("price.spot", "p 5=1", "'p 5' is not a kind of machine"),
    *(
        ("price.currency", value, "is not a currency; write its code")
        for value in (5, "usd", "dollars", "<b>")
    ),
    ("workers.late", "moved", "nothing that could be done about a late worker; did you mean move?"),
    *(("workers.late_factor", value, "from 1.1 on") for value in (1, "x", "nan", True)),
    *(("price.kind", value, "is not a kind of machine") for value in ("", 5, "a=b", "x" * 101)),
]


@pytest.mark.parametrize(("key", "value", "says"), BAD)
def test_bad_values(key, value, says):
    found = refusal({key: value})
    assert found.startswith(f"{key} (from argument): ")
    assert says in found


def test_late_workers_and_survivors_that_keep_their_processes_are_refused_together():
    both = {"workers.late": "move", "workers.in_process": True}
    with pytest.raises(ConfigError, match="leave one of the two settings out"):
        load(both)
    assert load({**both, "workers.late": "wait"}).workers_in_process


# --- explaining ----------------------------------------------------------------------------------


def test_rows_for_explain():
    write(
        "[checkpoint]\nevery = 50\n[[tier]]\nurl = '/tier'\n"
        "[[tier]]\nurl = 's3://b'\nevery = 5\nkeep = 9\n"
    )
    settings = load({"price.spot": 0.5}, environ={"OUTLAST_DIR": "/job"})
    rows = {row.key: (row.value, row.source) for row in config.as_rows(settings)}
    assert rows == {
        "dir": ("/job", "OUTLAST_DIR"),
        "resume": ("false", "default"),
        "checkpoint.every": ("50 steps", "outlast.toml"),
        "checkpoint.keep": ("3", "default"),
        "checkpoint.buffers": ("auto", "default"),
        "checkpoint.overhead": ("1%", "default"),
        "checkpoint.optimizer_every": ("1", "default"),
        "checkpoint.moments": ("exact", "default"),
        "checkpoint.each_step": ("false", "default"),
        "notice.platform": ("auto", "default"),
        "notice.base_url": ("", "default"),
        "notice.poll": ("1 s", "default"),
        "membership.labels": ("", "default"),
        "membership.silence": ("3 s", "default"),
        "notice.grace": ("auto", "default"),
        "notice.early": ("auto", "default"),
        "notice.requeue": ("false", "default"),
        "metrics.port": ("0", "default"),
        "metrics.bind": ("127.0.0.1", "default"),
        "metrics.textfile": ("", "default"),
        "metrics.trackers": ("true", "default"),
        "notice.file": ("", "default"),
        "notice.command": ("", "default"),
        "notice.end": ("", "default"),
        "notice.approve": ("false", "default"),
        "peer.replicas": ("auto", "default"),
        "peer.rate": ("auto", "default"),
        "peer.tls_cert": ("", "default"),
        "peer.tls_key": ("", "default"),
        "peer.tls_ca": ("", "default"),
        "health.hang": ("auto", "default"),
        "health.hang_floor": ("1.5 s", "default"),
        "health.hang_ceiling": ("10 min", "default"),
        "health.anomaly": ("report", "default"),
        "health.window": ("100", "default"),
        "health.factor": ("20", "default"),
        "health.settle": ("10", "default"),
        "health.skip": ("1", "default"),
        "health.rollbacks": ("3", "default"),
        "health.stretch": ("1000", "default"),
        "tell.urls": ("", "default"),
        "tell.file": ("", "default"),
        "tell.least": ("info", "default"),
        "tell.group": ("30 s", "default"),
        "tell.per_hour": ("12", "default"),
        "price.spot": ("0.5", "argument"),
        "price.on_demand": ("", "default"),
        "price.currency": ("", "default"),
        "price.kind": ("auto", "default"),
        "health.straggler": ("report", "default"),
        "health.notify": ("", "default"),
        "workers.warm": ("true", "default"),
        "workers.in_process": ("false", "default"),
        "workers.late": ("wait", "default"),
        "workers.late_factor": ("1.5", "default"),
        "restart.without_progress": ("5", "default"),
        "restart.failures": ("auto", "default"),
        "restart.window": ("1 h", "default"),
        "restart.leave_out": ("1 h", "default"),
        "restart.back_off": ("5 min", "default"),
        "restart.let_in": ("false", "default"),
        "tier.local": ("/tier, every 1, keep 3", "outlast.toml"),
        "tier.object": ("s3://b, every 5, keep 9", "outlast.toml"),
    }


@pytest.mark.parametrize("name", ["OUTLAST_CHECKPOINT_EVRY", "OUTLAST_NOTICE_PLATFROM"])
def test_a_misspelt_variable_names_the_nearest(name):
    with pytest.raises(ConfigError, match="did you mean OUTLAST_"):
        config.load({}, environ={name: "auto"})


@pytest.mark.parametrize(
    "name", ["OUTLAST_STORE", "OUTLAST_ATTEMPT", "OUTLAST_BEATS", "OUTLAST_AGENT_PID", "OUTLAST_X"]
)
def test_variables_that_are_no_settings_are_left_alone(name):
    config.load({}, environ={name: "1"})


def test_the_arguments_of_a_command_are_not_shown():
    settings = load({"notice.command": "curl -H 'Authorization: Bearer s3cr3t' http://site"})
    assert settings.notice_command[2] == "Authorization: Bearer s3cr3t"
    rows = {row.key: row.value for row in config.as_rows(settings)}
    assert rows["notice.command"] == "curl …"


def test_labels_are_shown_as_they_are_written():
    settings = load({"membership.labels": "zone=a,rack=7"}, environ={})
    rows = {row.key: row.value for row in config.as_rows(settings)}
    assert rows["membership.labels"] == "zone=a, rack=7"


IN_FORCE = {
    "checkpoint.every": "5 min",
    "checkpoint.overhead": "0.2%",
    "notice.grace": "90 s",
    "notice.poll": "200 ms",
    "membership.silence": "1.5 s",
    "peer.rate": "1.5 GB/s",
    "health.hang": "90 min",
    "health.factor": "2.5",
    "restart.window": "36 h",
    "price.spot": "p5.48xlarge=12.345678, other=0.7",
    "price.currency": "CHF",
    "price.kind": "p5.48xlarge",
}


def test_what_is_shown_may_be_written_into_the_file():
    settings = load(IN_FORCE, environ={})
    rows = {row.key: row for row in config.as_rows(settings)}
    assert {key: rows[key].value for key in IN_FORCE} == IN_FORCE
    shown = {key: row.value for key, row in rows.items() if row.value and "tier" not in key}
    again = load(shown, environ={})
    for key, (attribute, _) in config.SETTINGS.items():
        assert getattr(again, attribute) == getattr(settings, attribute), key


def test_what_differs_from_the_default_is_known_whoever_has_set_it():
    write("[checkpoint]\nkeep = 3\nevery = '50 steps'\n")
    rows = {row.key: row for row in config.as_rows(load(environ={"OUTLAST_NOTICE_POLL": "1 s"}))}
    assert rows["checkpoint.keep"].source == "outlast.toml"
    assert {key for key, row in rows.items() if not row.is_default} == {"checkpoint.every"}


def test_a_job_under_test_lies_where_the_drill_has_it_whatever_its_script_asks_for(tmp_path):
    asked = {"dir": str(tmp_path / "users"), "checkpoint.every": "7 steps"}
    environ = {"OUTLAST_DIR": str(tmp_path / "run")}
    assert config.load(asked, environ=environ).dir == tmp_path / "users"
    settings = config.load(asked, environ={**environ, config.DRILL_VARIABLE: str(tmp_path)})
    assert settings.dir == tmp_path / "run"
    assert settings.checkpoint_every == Every(steps=7)


def test_addresses_are_never_shown_whole(tmp_path):
    secret = "s3cr3t"
    urls = (
        f"json://u:{secret}@h:8/{secret} slack://{secret}/a/b mailto://{secret}:{secret}@mail.org"
    )
    settings = load(environ={"OUTLAST_TELL_URLS": urls})
    assert str(settings.tell_urls) == "json://h:8/… slack://… mailto://mail.org/…"
    assert secret not in repr(settings)
    assert secret not in str(config.as_rows(settings))
    with pytest.raises(ConfigError, match="number 2 of 2 is not an address") as caught:
        load(environ={"OUTLAST_TELL_URLS": f"json://h {secret}"})
    assert secret not in str(caught.value)


def test_a_file_of_addresses_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "addresses"
    path.write_text("# ours\njson://a/x\n\njson://b/y\n")
    settings = load(environ={"OUTLAST_TELL_FILE": str(path), "OUTLAST_TELL_URLS": "json://a/x"})
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        config.all_addresses(settings)
    path.chmod(0o600)
    assert config.all_addresses(settings).urls == ("json://a/x", "json://b/y")
