"""Whose a directory is where job.json is lost: proven, or refused; never another job's."""

import fcntl
import json
import re

import pytest
from unit_fakes import at_once

from outlast import config
from outlast.checkpoint.catalog import open_job
from outlast.checkpoint.manifest import SaveName, sign
from outlast.errors import ConfigError, ResumeRefused, StorageError
from outlast.ledger.file import Ledger
from outlast.ledger.job import FILE_NAME, read_job
from outlast.storage import Directory

LOST = {
    "missing": None,
    "empty": b"",
    "zeros": b"\0" * 4096,
    "torn": b'{\n "id": "0123',
}
EARLY = 1000.5


class Case:
    """A job's directory, and a tier elsewhere."""

    def __init__(self, path):
        self.path = path / "job"
        self.elsewhere = Directory(path / "elsewhere")
        self.below = Directory(self.path / "checkpoints")
        tiers = [
            {"name": "local", "url": str(self.below.root)},
            {"name": "shared", "url": str(self.elsewhere.root)},
        ]
        lines = "".join(f"[[tier]]\nname = '{t['name']}'\nurl = '{t['url']}'\n" for t in tiers)
        (path / "outlast.toml").write_text(lines)
        self.settings = config.load(
            {"dir": self.path}, environ={"OUTLAST_CONFIG": str(path / "outlast.toml")}
        )
        self.record = self.path / FILE_NAME
        self.path.mkdir()

    def lose(self, how):
        self.record.unlink(missing_ok=True)
        if LOST[how] is not None:
            self.record.write_bytes(LOST[how])

    def open(self):
        return open_job(self.path, self.settings)

    def ledger(self, job):
        Ledger(self.path, job=job).append("job_started")

    def save(self, storage, job, step, *, signed=True, named=True):
        save = SaveName(step, 1, step, "0123abcd")
        if signed:
            sign(storage, save, job)
        text = {"job": job} if named else {}
        storage.put(f"{save}/manifest.json", json.dumps(text).encode())


@pytest.fixture(name="case")
def _case(tmp_path):
    return Case(tmp_path)


@pytest.mark.parametrize("how", LOST)
def test_found_by_the_ledger(case, how, capsys):
    case.ledger("mine")
    case.save(case.below, "stray", 3)  # somebody has copied it there
    case.lose(how)
    assert case.open().id == "mine"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{case.record}: it is " in line
    assert f"it is job mine, as {case.path}/ledger.jsonl says, and is written anew" in line
    assert read_job(case.path).id == "mine"
    assert case.open().id == "mine"
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in case.path.iterdir()) == [
        *("checkpoints", "job.json", "ledger.jsonl")
    ]


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("said", [(True, False), (False, True), (True, True)])
def test_found_by_its_checkpoints(case, how, said, capsys):
    signed, named = said
    for step in (3, 6):
        case.save(case.below, "mine", step, signed=signed, named=named)
    case.save(case.elsewhere, "other", 9)
    case.lose(how)
    assert case.open().id == read_job(case.path).id == "mine"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"it is job mine, as each checkpoint in {case.below.root} says" in line


def test_found_where_the_ledger_names_several_and_the_checkpoints_one(case):
    for job in ("mine", "mistaken"):
        case.ledger(job)
    case.save(case.below, "mine", 3)
    assert case.open().id == "mine"


UNPROVEN = {
    "two in the ledger": lambda case: [case.ledger("a"), case.ledger("b")],
    "two in the tier": lambda case: [case.save(case.below, job, ord(job)) for job in "ab"],
    "none of the ledger's": lambda case: [
        *(case.ledger("a"), case.ledger("b")),
        case.save(case.below, "c", 1),
    ],
    "elsewhere": lambda case: [
        (case.path / "membership").mkdir(),
        *(case.save(case.elsewhere, job, ord(job)) for job in "ab"),
    ],
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("kind", UNPROVEN)
def test_what_is_not_proven_is_refused_and_what_to_do_is_said(case, how, kind):
    UNPROVEN[kind](case)
    case.lose(how)
    with pytest.raises(ResumeRefused) as caught:
        case.open()
    words = str(caught.value)
    assert "\n" not in words
    assert words.startswith(f"{case.record}: it is ")
    assert words.endswith("or start anew with another --dir")
    (choice,) = re.findall(r"put (.*) into it to go on", words)
    assert '{"id": "a"} or {"id": "b"}' in choice
    assert case.record.exists() == (LOST[how] is not None)  # nothing was touched
    case.record.write_text(choice.split(" or ")[1])  # as it says
    assert case.open().id == "b"


def test_checkpoints_that_do_not_say_whose_they_are(case):
    case.save(case.below, "", 3, signed=False, named=False)
    with pytest.raises(ResumeRefused, match=r"put its old content into it"):
        case.open()


def test_a_new_job_beside_anothers_checkpoints_is_one(case, capsys):
    case.save(case.elsewhere, "other", 9)
    assert case.open().id != "other"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", [how for how in LOST if LOST[how] is not None])
def test_a_record_of_which_nothing_is_left_is_a_new_jobs_and_that_is_said(case, how, capsys):
    case.lose(how)
    job = case.open()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"nothing else is left of its job; this is a new one, {job.id}" in line


def test_a_tier_that_cannot_be_read_proves_nothing(case, monkeypatch):
    case.lose("empty")

    def children(self, name=""):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Directory, "children", children)
    with pytest.raises(StorageError, match=r"cannot be read: Input/output error; .*job\.json back"):
        case.open()
    assert case.record.read_bytes() == b""


def test_many_that_find_it_lost_at_once_agree(case, capsys):
    case.lose("torn")
    jobs = at_once(8, lambda _: case.open().id)
    assert jobs == [read_job(case.path).id] * 8
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_damaged_record_that_a_running_job_holds_is_left_alone(case):
    case.lose("torn")
    with case.record.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="held by a job that runs; wait for it, or give"):
            case.open()
        case.ledger("mine")
        assert case.open().id == "mine"  # as a worker of that job
        assert case.record.read_bytes() == LOST["torn"]
    assert case.open().id == read_job(case.path).id == "mine"
