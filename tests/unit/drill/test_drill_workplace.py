"""What a run of the drill has of the working directory: copies, and links to what is too large."""

import shutil

import pytest

from outlast.drill import workplace
from outlast.drill.workplace import (
    MARK,
    copy_tree,
    empty_place,
    linked_directories,
    part_of,
)
from outlast.errors import ConfigError

MOST = 12


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A script, a package, and more samples than are copied; few of them in each directory."""
    monkeypatch.setattr(workplace, "FILES_MAX", MOST)
    place = tmp_path / "source"
    for name in ("train.py", "package/model.py", *(f"data/{n % 4}/{n}.txt" for n in range(40))):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)
    (place / "drill").mkdir()
    (place / "drill" / "earlier").write_text("a run")
    return place


def copied(source, target):
    linked = copy_tree(source, target, apart=source / "drill")
    assert [f"{one}/" for one in linked_directories(source, source / "drill")] == linked
    return linked


def test_directories_beyond_the_limit_are_linked_as_a_whole(source, tmp_path):
    copy = tmp_path / "copy"
    assert copied(source, copy) == ["data/0/", "data/1/", "data/2/", "data/3/"]
    assert (copy / "data" / "0").readlink() == source / "data" / "0"
    assert (copy / "data" / "3" / "39.txt").read_text() == "data/3/39.txt"
    for name in ("train.py", "package/model.py", "package", "data"):
        assert not (copy / name).is_symlink(), f"{name} is the copy's: it lies ahead of the data"
    assert not (copy / "drill").exists()


def test_a_link_of_the_users_is_a_link_to_the_same(source, tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "FILES_MAX", 100)
    (source / "latest").symlink_to("data/1")
    (source / ".venv").symlink_to("package")
    assert copied(source, tmp_path / "copy") == []
    assert (tmp_path / "copy" / "latest").readlink() == source / "data" / "1"
    assert not (tmp_path / "copy" / ".venv").exists()


def test_no_more_of_a_directory_is_looked_at_than_may_be_copied(source, tmp_path, monkeypatch):
    looked = []
    is_file = type(source).is_file
    monkeypatch.setattr(type(source), "is_file", lambda one: looked.append(one) or is_file(one))
    copied(source, tmp_path / "copy")
    assert len(looked) <= 2 * MOST, "once for the copy, once for the line ahead of it"


def test_what_fits_is_copied(source, tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "FILES_MAX", 100)
    assert copied(source, tmp_path / "copy") == []
    assert len(list((tmp_path / "copy" / "data").rglob("*.txt"))) == 40


def test_a_file_that_is_too_large_is_linked_alone(source, tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "FILES_MAX", 100)
    (source / "package" / "weights.bin").write_bytes(bytes(1000))
    monkeypatch.setattr(workplace, "FILE_BYTES_MAX", 999)
    assert copy_tree(source, tmp_path / "copy", apart=source / "drill") == ["package/weights.bin"]
    assert not (tmp_path / "copy" / "package").is_symlink()


def test_what_an_earlier_drill_has_made_is_not_copied(source, tmp_path, monkeypatch):
    monkeypatch.setattr(workplace, "FILES_MAX", 100)
    with empty_place(source / "of another name"):
        (source / "of another name" / "undisturbed").mkdir()
    assert copied(source, tmp_path / "copy") == []
    assert not (tmp_path / "copy" / "of another name").exists()


def test_a_place_is_one_drills_until_it_ends(tmp_path):
    root = tmp_path / "drill"
    with empty_place(root):
        (root / "run").mkdir()
        with pytest.raises(ConfigError, match="another drill is at work in"), empty_place(root):
            pass
        assert (root / "run").exists()
    with empty_place(root):
        assert [path.name for path in root.iterdir()] == [MARK]


def test_no_command_empties_anothers_part(source, tmp_path):
    root = source / "outlast-drill"
    for name in ("faults", "resume", "faults"):
        with empty_place(part_of(root, name)) as _:
            (root / name / "run").mkdir()
    assert (root / "resume" / "run").exists()
    copied(source, tmp_path / "copy")
    assert not (tmp_path / "copy" / root.name).exists()
    (tmp_path / "thesis.tex").write_text("years of work")
    for other, words in ((tmp_path, "no drill made it"), (tmp_path / "thesis.tex", "is a file")):
        with pytest.raises(ConfigError, match=words):
            part_of(other, "faults")
    assert sorted(path.name for path in tmp_path.glob("*")) == ["copy", "source", "thesis.tex"]


def test_what_is_no_drills_stays(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for root, words in ((tmp_path, "no drill made it"), (tmp_path / "thesis.tex", "is a file")):
        with pytest.raises(ConfigError, match=words), empty_place(root):
            pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_what_could_not_be_emptied_remains_a_drills(tmp_path, monkeypatch):
    root = tmp_path / "drill"
    with empty_place(root):
        (root / "run").mkdir()

    def refused(path):
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refused)
        with pytest.raises(ConfigError, match="run: Read-only file system"), empty_place(root):
            pass
    with empty_place(root):
        assert [path.name for path in root.iterdir()] == [MARK]
