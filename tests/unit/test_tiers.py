"""[[tier]]: what is read, what follows from what, and every refusal in words."""

from pathlib import Path

import pytest

from outlast.config import as_rows, load
from outlast.errors import ConfigError
from outlast.tiers import Tier


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text, name="outlast.toml"):
    path = Path(name)
    path.write_text(text)
    return path


def refusal(*args, **more):
    with pytest.raises(ConfigError) as caught:
        load(*args, **{"environ": {}} | more)
    return str(caught.value)


def tables(*tiers):
    return "\n".join(
        "[[tier]]\n" + "\n".join(f"{key} = {value!r}" for key, value in tier.items())
        for tier in tiers
    )


MEMORY = {"url": "memory:"}
LOCAL = {"url": "/a"}
CLOUD = {"url": "s3://bucket/job"}

BAD_URLS = [
    ("3", "tier number 1: 3 is not a directory or a url; write"),
    ("''", "'' is not a directory or a url"),
    ("' '", "' ' is not a directory or a url"),
    ("'~nobody-of-this-name/x'", "there is no such user"),
    ("'memory'", "'memory' is not a tier; memory is written \"memory:\""),
    ("'memory://x'", "'memory://x' is not a tier; memory is written \"memory:\""),
    ("'Memory:'", 'memory is written "memory:"'),
    ("'s3:bucket'", "'s3:bucket' is not a url; write it as s3://BUCKET/PREFIX"),
    ("'S3:/bucket'", "write it as s3://BUCKET/PREFIX"),
    ("'s3://'", "'s3://' is not a url"),
    ("'s3:///x'", "'s3:///x' is not a url"),
    ("'gs://a//b'", "write it as gs://BUCKET/PREFIX"),
    ("'s3://a/../b'", "write it as s3://BUCKET/PREFIX"),
    ("'az://a b'", "write it as az://BUCKET/PREFIX"),
    ("'ftp://host/a'", "ftp:// is no place for checkpoints that outlast knows; write"),
    ("'file:///a'", "file:// is no place for checkpoints"),
    ('"a\\u0000b"', "is not a directory"),
]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tier = 3", "a tier is written as [[tier]] with name and url"),
        ("tier = []", "a tier is written as [[tier]] with name and url"),
        ("tier = ['/a']", "a tier is written as [[tier]] with name and url"),
        ("[tier]\nurl = '/a'", "a tier is written as [[tier]] with name and url"),
        ("[[tier]]\nurll = '/a'", "tier.urll is not a setting; did you mean url?"),
        ("[[tier]]\nurl = '/a'\nzz = 1", "tier.zz is not a setting; known: name, url, every, keep"),
        ("[[tier]]\nname = 'local'", "tier local: it needs a url, such as url ="),
        ("[[tier]]\nurl='/a'\n[[tier]]\nkeep = 2", "tier number 2: it needs a url"),
        *((f"[[tier]]\nurl = {url}", says) for url, says in BAD_URLS),
        *(
            (f"[[tier]]\nurl='/a'\nname = {name}", f"tier number 1: {name} is not a name; write")
            for name in ("''", "'Local'", "'a b'", "'-a'", "'a-'", "'a/b'", "3", f"'{'a' * 33}'")
        ),
        *(
            (
                f"[[tier]]\nurl='/a'\n[[tier]]\nname='b'\nurl='/b'\nevery = {every}",
                "tier b: every =",
            )
            for every in ("0", "-1", "1.5", "true", "'x'", "[]")
        ),
        *(
            (f"[[tier]]\nname = 'fast'\nurl='/a'\nkeep = {keep}", "tier fast: ")
            for keep in ("0", "-1", "1.5", "true", "'x'")
        ),
    ],
)
def test_a_tier_that_cannot_be_used(text, says):
    write(text)
    line = refusal()
    assert line.startswith("outlast.toml: ")
    assert says in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        ([LOCAL, {"url": "/b"}], "two tiers are named local; give each a name of its own"),
        (
            [LOCAL, {"name": "b", "url": "/c/../a/"}],
            "tiers local and b are both /c/../a; a second copy in the same place saves nothing",
        ),
        ([CLOUD, {"name": "b", "url": "s3://bucket/job/"}], "tiers object and b are both s3://"),
        (
            [LOCAL, {"name": "b", "url": "/a/b"}],
            "tier b lies inside tier local, which is pruned as a whole; give them directories side",
        ),
        ([LOCAL | {"url": "/a/b/c"}, {"name": "b", "url": "/x/../a"}], "tier local lies inside"),
        ([CLOUD, {"name": "b", "url": "s3://bucket/job/b"}], "tier b lies inside tier object"),
        ([LOCAL, MEMORY], "tier memory: memory is the fastest tier; put it first, and only once"),
        ([MEMORY, {"name": "b"} | MEMORY], "tiers memory and b are both memory:"),
        ([MEMORY], "memory is the only tier, and what is in memory is gone with the machine; add"),
        ([LOCAL | {"every": 2}], "tier local: the first tier takes each checkpoint; leave every"),
        ([MEMORY | {"every": 2}, LOCAL], "tier memory: the first tier takes each checkpoint"),
        (
            [MEMORY, LOCAL | {"every": 4}, CLOUD | {"every": 6}],
            (
                "tier object: every = 6 is not a multiple of 4, which is how often local before "
                "it has a checkpoint; write 8"
            ),
        ),
        ([MEMORY, LOCAL | {"every": 4}, CLOUD | {"every": 1}], "1 is not a multiple of 4"),
        ([LOCAL, CLOUD | {"gb_price": -1}], "gb_price = -1 is not a price of 10^9 bytes"),
    ],
)
def test_tiers_that_cannot_be_used_together(tiers, says):
    write(tables(*tiers))
    assert says in refusal()


@pytest.mark.parametrize(
    ("buffers", "memory", "says"),
    [
        (0, MEMORY, "checkpoint.buffers = 0 leaves no memory for the memory tier"),
        (2, MEMORY | {"keep": 3}, "3 snapshots do not fit checkpoint.buffers = 2; set keep to 2"),
    ],
)
def test_a_memory_tier_that_memory_cannot_hold(buffers, memory, says):
    write(f"[checkpoint]\nbuffers = {buffers}\n" + tables(memory, LOCAL))
    assert says in refusal()


@pytest.mark.parametrize(
    ("buffers", "memory", "keep"),
    [('"auto"', {}, 3), ("2", {}, 2), ("8", {}, 3), ("2", {"keep": 2}, 2), ("2", {"keep": 1}, 1)],
)
def test_what_memory_keeps(buffers, memory, keep):
    write(f"[checkpoint]\nbuffers = {buffers}\n" + tables(MEMORY | memory, LOCAL))
    settings = load(environ={})
    assert [tier.keep for tier in settings.tiers] == [keep, 3]


def test_several_tiers():
    write(
        "[checkpoint]\nkeep = 4\n"
        + tables(
            {"url": "memory:", "keep": 2},
            {"name": "nvme", "url": "~/nvme", "every": "2"},
            {"name": "shared", "url": "relative/place", "every": 2, "keep": 10},
            {"url": "s3://bucket/jobs/mine/", "every": 10},
            {"name": "other-cloud", "url": "GS://bucket", "every": 10},
            {"name": "third", "url": "az://container/x=1/y_z", "every": 20},
        )
    )
    settings = load(environ={})
    home = Path("~").expanduser()
    assert settings.tiers == (
        Tier(name="memory", url="memory:", every=1, keep=2),
        Tier(name="nvme", url=f"{home}/nvme", every=2, keep=4),
        Tier(name="shared", url=str(Path.cwd() / "relative/place"), every=2, keep=10),
        Tier(name="object", url="s3://bucket/jobs/mine", every=10, keep=4),
        Tier(name="other-cloud", url="gs://bucket", every=10, keep=4),
        Tier(name="third", url="az://container/x=1/y_z", every=20, keep=4),
    )
    kinds = ["memory", "directory", "directory", "object", "object", "object"]
    assert [tier.kind for tier in settings.tiers] == kinds
    assert settings.checkpoints_dir == home / "nvme"
    assert load({"checkpoint.keep": 7}, environ={}).tiers[1].keep == 7


def test_only_an_object_store():
    write(tables(CLOUD))
    settings = load(environ={})
    assert [tier.name for tier in settings.tiers] == ["object"]
    assert settings.checkpoints_dir == settings.dir / "checkpoints"


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/job",
        "s3://bucket/job?secret=hunter2",
        "gs://bucket#hunter2@x",
        "https://me:hunter2@host/bucket",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url):
    write(tables({"name": "cloud", "url": url}))
    line = refusal()
    assert "tier cloud: " in line
    assert "hunter2" not in line
    assert "hunter2" not in refusal({"dir": url}, file=write("", "empty.toml"))


def test_a_password_in_an_address_is_refused_and_not_repeated():
    line = refusal({"notice.base_url": "http://me:hunter2@host"})
    assert "an address with a password in it; write it as http://HOST[:PORT]" in line
    assert "hunter2" not in line


def test_one_tier_is_where_checkpoints_lie():
    write("[[tier]]\nurl = 'relative/place'\nname = 'local'\nevery = 1\n")
    settings = load(environ={})
    assert settings.checkpoints_dir == Path.cwd() / "relative/place"
    assert settings.dir == Path.cwd() / "outlast-job"
    assert settings.origin["tier"] == "outlast.toml"


def test_a_slower_tiers_interval_is_open_where_the_jobs_is():
    write(tables(MEMORY, LOCAL | {"every": 4}, CLOUD | {"gb_price": 0.02}))
    found = load(environ={})
    assert [tier.every for tier in found.tiers] == [1, 4, None]
    shown = "s3://bucket/job, every auto, keep 3, 0.02 a GB"
    assert ("tier.object", shown, "outlast.toml", False) in as_rows(found)
    with pytest.raises(ConfigError, match="every = 1 is not a multiple of 4"):
        load({"checkpoint.every": "5 steps"}, environ={})
    write(tables(MEMORY, LOCAL, CLOUD | {"every": "auto"}))
    asked = load({"checkpoint.every": "5 steps"}, environ={})
    assert [tier.every for tier in asked.tiers] == [1, 1, None]
