"""``outlast checkpoints export``: what the export room is asked for; nothing is written over."""

import json

import pytest

from outlast.errors import CheckpointInvalid, ConfigError


@pytest.fixture(name="calls")
def _calls(monkeypatch):
    """What the export room was asked for; it writes nothing."""
    asked = []

    def export(places, step, to, out, progress):
        asked.append(([place.name for place in places], step.step, to, out))
        progress(1, 2)

    monkeypatch.setattr("outlast.checkpoint.export.export", export)
    return asked


def export(outlast, *flags):
    return outlast("checkpoints", "export", *flags)


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch"])
def test_the_newest_from_every_tier_that_has_it(job, outlast, calls, to):
    job.save(100, 200)
    job.save(300, tiers=["slow"])
    code, out, err = export(outlast, "--to", to, "--out", "there/new", "--step", "200")
    assert (code, err) == (0, "")
    target = job.place / "there/new"
    assert out.splitlines() == [
        f"step 200 as {to} (4.1 kB) in {target}, every byte verified",
        f"Next: ls {target}",
    ]
    code, out, _ = export(outlast, "--to", to, "--out", "~/x", "--json")
    assert json.loads(out)["step"] == 300
    assert calls[0] == (["fast", "slow"], 200, to, target)
    assert calls[1][:3] == (["slow"], 300, to)
    assert export(outlast, "--to", to, "--out", "y", "--tier", "fast")[0] == 0
    assert calls[2][:2] == (["fast"], 200)


@pytest.mark.parametrize("occupied", ["a file", "a full directory"])
def test_nothing_is_written_over(job, outlast, calls, occupied):
    job.save(100)
    target = job.place / "target"
    if occupied == "a file":
        target.write_text("mine")
    else:
        (target / "mine").mkdir(parents=True)
    code, out, err = export(outlast, "--to", "dcp", "--out", "target")
    assert (code, out, calls) == (2, "", [])
    assert err == f"outlast: {target} exists and is not empty; give another --out\n"


def test_an_empty_directory_will_do(job, outlast, calls):
    job.save(100)
    (job.place / "target").mkdir()
    assert export(outlast, "--to", "dcp", "--out", "target")[0] == 0
    assert len(calls) == 1


@pytest.mark.parametrize("out", ["~nobody-of-this-name/x", "a\0b"])
def test_a_place_that_cannot_be(job, outlast, calls, out):
    job.save(100)
    code, _, err = export(outlast, "--to", "dcp", "--out", out)
    assert (code, calls) == (2, [])
    assert "cannot be used: " in err
    assert err.endswith("; give another --out\n")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OSError(28, "No space left on device"), 77, "No space left on device; free space there"),
        (CheckpointInvalid(100, "rank-00000.json is missing"), 1, "step 100 is not valid: rank"),
        (ConfigError("state has no place in dcp"), 2, "state has no place in dcp"),
    ],
)
def test_what_goes_wrong_is_one_line(job, outlast, monkeypatch, error, code, says):
    def fail(*_):
        raise error

    job.save(100)
    monkeypatch.setattr("outlast.checkpoint.export.export", fail)
    got, out, err = export(outlast, "--to", "dcp", "--out", "target")
    assert (got, out) == (code, "")
    (line,) = err.splitlines()
    assert says in line
