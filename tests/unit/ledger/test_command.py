"""The same command is the same job; another one is refused, and no secret is written down."""

import fcntl
import os
import threading

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outlast import config
from outlast.errors import ConfigError
from outlast.ledger.command import (
    FILE_NAME,
    has_commits,
    module_command,
    program_command,
    refuse_other,
    script_command,
    settle,
    without_secrets,
)
from outlast.ledger.file import Ledger
from outlast.ledger.job import JobLock, NoRecord, new_job, write_record
from thorough import examples

SECRET = "s3cr3t-0x5f"
ALONE, WITH_OTHERS = (lambda: True), (lambda: False)
WORDS = st.sampled_from(
    ["--lr", "0.1", "--lr=0.1", "0.5", "--fast", "-x", "data/a", "", "ü", "--", "a b", "--name=val"]
)
SECRETS = st.sampled_from(
    [
        ("--api-key", SECRET),
        (f"--hf_token={SECRET}",),
        (f"wandb.api_key={SECRET}",),
        (f"postgres://me:{SECRET}@host/db",),
    ]
)
ARGUMENTS = st.lists(WORDS.map(lambda word: (word,)) | SECRETS, max_size=7).map(
    lambda groups: [word for group in groups for word in group]
)


def settings_of(path, **given_):
    return config.load({"dir": path, **given_}, environ={})


def begin(path, *, committed=True):
    """A job's directory, in which something was committed."""
    path.mkdir(parents=True, exist_ok=True)
    settings = settings_of(path)
    job = new_job(settings)
    write_record(path, job, NoRecord("", there=False))
    ledger = Ledger(path, job=job.id)
    ledger.append("job_started", command="x")
    if committed:
        ledger.append("commit", step=3, bytes=1)
    ledger.close()
    return settings


def refusal(settings, command, **options):
    with pytest.raises(ConfigError) as caught:
        settle(settings, command, is_alone=ALONE, **options)
    with pytest.raises(ConfigError) as early:
        refuse_other(settings, command)
    assert "\n" not in str(caught.value)
    assert str(early.value).partition(". ")[0] == str(caught.value).partition(". ")[0]
    return str(caught.value)


@examples(50)  # a secret's digest is slow to compute
@given(ARGUMENTS, ARGUMENTS)
def test_the_same_is_the_same_and_another_is_refused(tmp_path_factory, first, second):
    settings = begin(tmp_path_factory.mktemp("job"))
    command, other = (script_command("train.py", words) for words in (first, second))
    settle(settings, command, is_alone=ALONE)
    assert SECRET not in (settings.dir / FILE_NAME).read_text()
    for _ in range(2):
        refuse_other(settings, command)
        settle(settings, command, is_alone=WITH_OTHERS)
    assume(first != second)
    said = refusal(settings, other)
    assert SECRET not in said
    accepted = settings_of(settings.dir, resume=True)
    refuse_other(accepted, other)
    settle(accepted, other, is_alone=WITH_OTHERS)
    settle(settings, other, is_alone=ALONE)  # it is the job's from then on
    refusal(settings, command)


def test_another_secret_is_another_command(tmp_path):
    settings = begin(tmp_path)
    settle(settings, script_command("t.py", ["--api-key", SECRET]), is_alone=ALONE)
    said = refusal(settings, script_command("t.py", ["--api-key", "other"]))
    assert "t.py was given another value of --api-key" in said
    assert "other" not in said.partition("--api-key")[2].partition(". ")[0]


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (["0.1"], ["0.5"], "was given 0.1 and is now given 0.5"),
        (["--lr", "0.1", "-x"], ["--lr", "0.5", "-x"], "--lr 0.1 and is now given --lr 0.5"),
        (["--lr=0.1"], ["--lr=0.5"], "--lr=0.1 and is now given --lr=0.5"),
        ([], ["--fast"], "was given no --fast, which it is given now"),
        (["a", "--fast"], ["a"], "was given --fast and is not now"),
        (list("abcde"), list("vbxdz"), "a and is now given v, c and is now given x"),
        (["a b"], ["c"], "'a b' and is now given c"),
    ],
)
def test_the_difference_is_said(tmp_path, before, now, words):
    settings = begin(tmp_path)
    settle(settings, script_command("t.py", before), is_alone=ALONE)
    assert words in refusal(settings, script_command("t.py", now))


def test_the_ways_on_are_those_of_who_asks(tmp_path):
    settings = begin(tmp_path)
    settle(settings, script_command("t.py", ["1"]), is_alone=ALONE)
    said = refusal(settings, script_command("t.py", ["2"]))
    assert "outlast run --dir NEW" in said
    assert "outlast run --resume" in said
    said = refusal(settings, script_command("t.py", ["2"]), in_script=True)
    assert "resume=True" in said
    assert "OUTLAST_RESUME=1" in said
    assert 'dir="NEW"' in said


def test_a_script_is_known_by_its_place_its_name_or_its_content(tmp_path):
    settings = begin(tmp_path / "job")
    for name in ("here", "there", "copy", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(f"print({name!r})")
    scripts = {name: tmp_path / name / "train.py" for name in ("here", "there", "copy", "gone")}
    settle(settings, script_command(str(scripts["here"]), []), is_alone=ALONE)
    scripts["here"].write_text("print('mended')")
    settle(settings, script_command(str(scripts["here"]), []), is_alone=ALONE)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    settle(settings, script_command(str(tmp_path / "link" / "train.py"), []), is_alone=ALONE)
    settle(settings, script_command(os.path.relpath(scripts["here"]), []), is_alone=ALONE)
    scripts["copy"].write_text("print('mended')")
    settle(settings, script_command(str(scripts["copy"]), []), is_alone=ALONE)
    said = refusal(settings, script_command(str(scripts["there"]), []))
    assert str(scripts["here"]) in said
    assert str(scripts["there"]) in said
    said = refusal(settings, script_command(str(tmp_path / "here" / "eval.py"), []))
    assert "it ran train.py, and this is eval.py" in said
    refusal(settings, module_command("train", []))
    scripts["here"].unlink()  # unpacked elsewhere at the next start
    settle(settings, script_command(str(scripts["there"]), []), is_alone=ALONE)


def test_modules_and_programs(tmp_path):
    settings = begin(tmp_path)
    settle(settings, module_command("pkg.__main__", ["1"]), is_alone=ALONE)
    settle(settings, module_command("pkg", ["1"]), is_alone=ALONE)
    assert "it ran -m pkg, and this is -m gkp" in refusal(settings, module_command("gkp", ["1"]))
    assert "and this is bash" in refusal(settings, program_command("bash", ["1"]))


@pytest.mark.parametrize("words", [["--local-rank=1"], ["--local_rank", "1"], ["--local_rank=7"]])
def test_what_launchers_give_to_each_worker_is_not_compared(tmp_path, words):
    settings = begin(tmp_path)
    settle(settings, script_command("t.py", ["--local-rank=0", "--lr", "1"]), is_alone=ALONE)
    settle(settings, script_command("t.py", [*words, "--lr", "1"]), is_alone=ALONE)


def test_before_the_first_commit_a_command_is_replaced(tmp_path):
    settings = begin(tmp_path, committed=False)
    settle(settings, script_command("t.py", ["--lrr", "1"]), is_alone=ALONE)
    assert not has_commits(settings)
    refuse_other(settings, script_command("t.py", ["--lr", "1"]))
    with pytest.raises(ConfigError, match="was given --lrr and is now given --lr"):
        settle(
            settings, script_command("t.py", ["--lr", "1"]), is_alone=WITH_OTHERS
        )  # it runs there
    settle(settings, script_command("t.py", ["--lr", "1"]), is_alone=ALONE)
    settle(settings, script_command("t.py", ["--lr", "1"]), is_alone=WITH_OTHERS)


def test_checkpoints_without_a_ledger_count(tmp_path):
    settings = begin(tmp_path, committed=False)
    (tmp_path / "checkpoints" / "step-000000000003").mkdir(parents=True)
    assert has_commits(settings)


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[]", b'{"kind": 3}'])
def test_a_job_without_a_record_takes_the_next_command(tmp_path, content):
    settings = begin(tmp_path)
    if content is not None:
        (tmp_path / FILE_NAME).write_bytes(content)
    refuse_other(settings, script_command("t.py", ["1"]))
    settle(settings, script_command("t.py", ["1"]), is_alone=ALONE)
    refusal(settings, script_command("t.py", ["2"]))


def test_secrets_are_left_out():
    given_ = ["--token", "a", "--flag", "--key=b", "tokenizer", "x.secret=c", "s3://u:p@h/x", "-k"]
    assert without_secrets(given_) == [
        *("--token", "***", "--flag", "--key=***", "tokenizer", "x.secret=***"),
        *("s3://***@h/x", "-k"),
    ]


def test_whether_a_lock_is_held_alone(tmp_path):
    begin(tmp_path)
    first = JobLock(tmp_path, shared=True)
    assert first.is_alone()
    second = JobLock(tmp_path, shared=True)
    assert not first.is_alone()
    assert not second.is_alone()
    second.release()
    assert first.is_alone()
    with pytest.raises(ConfigError):  # it is still held
        JobLock(tmp_path)

    def look():
        while not stop.wait(0.001):
            first.is_alone()

    stop = threading.Event()
    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(100):  # whoever joins meanwhile is let in
            JobLock(tmp_path, shared=True).release()
    finally:
        stop.set()
        looking.join()
    first.release()
    alone = JobLock(tmp_path)
    assert alone.is_alone()
    fd = os.open(tmp_path / "job.json", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(fd)
    alone.release()
