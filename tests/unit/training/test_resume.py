"""Which checkpoint a job goes on from: all ranks agree, and nothing is passed over in silence."""

import shutil

import pytest
import torch
from unit_checkpoints import damage, write
from unit_fakes import Hub, WatchedStorage, on_ranks, same
from unit_names import names as saves
from unit_names import save_name

from outlast.attempt.link import LocalLink
from outlast.checkpoint.manifest import Place
from outlast.errors import ResumeRefused, StateMismatch, StorageError
from outlast.script.restore import Restore
from outlast.storage import Directory
from outlast.training import resume

NEXT = "; run the same command again once it can be, or start anew with another --dir"


def fine(loaded):
    """Every checkpoint fits."""


def save(path, step, world_size=2, **fields):
    states = [
        {"model": {"w": torch.full((3,), float(step))}, "outlast": {"rank": rank}}
        for rank in range(world_size)
    ]
    write(Directory(path), states, step, **fields)


def find(path, world_size=2, *, promised=(), check=fine, storages=None, only=None, begins_at=0):
    storages = storages or [Directory(path)] * world_size

    def act(link):
        mine = check[link.rank] if isinstance(check, list) else check
        given = saves(*promised) if link.rank == 0 else ()
        return resume.find(storages[link.rank], link, given, mine, begins_at=begins_at)

    return on_ranks(world_size, act, hub=Hub(world_size), only=only)


def cannot_read(path, step):
    """A machine's view of the storage in which the files of ``step`` are unreadable."""

    def fail(did, name):
        hit = did == "open" and save_name(step) in name
        return OSError(5, "Input/output error") if hit else None

    return WatchedStorage(Directory(path), fail)


def refuse(step, error):
    """A check that refuses ``step`` alone."""

    def check(loaded):
        if loaded.manifest.step == step:
            raise error

    return check


def test_a_first_start(tmp_path):
    for outcome in find(tmp_path / "none"):
        assert (outcome.step, outcome.loaded, outcome.skipped) == (0, None, [])
        assert outcome.read_s >= 0


def test_unfinished_steps_are_no_promise(tmp_path):
    (tmp_path / save_name(5)).mkdir()
    assert [outcome.step for outcome in find(tmp_path)] == [0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_newest_valid_one_is_chosen_by_all(tmp_path, world_size):
    for step in (100, 300, 200):
        save(tmp_path, step)
    for rank, outcome in enumerate(find(tmp_path, world_size, promised=[100, 200, 300])):
        assert (outcome.step, outcome.skipped) == (300, [])
        assert same(outcome.loaded.state("model"), {"w": torch.full((3,), 300.0)})
        assert outcome.loaded.state("outlast") == {"rank": rank % 2}


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.json", "manifest.json"])
def test_a_damaged_one_is_passed_over_by_all_and_said(tmp_path, name):
    for step in (100, 200, 300):
        save(tmp_path, step)
    damage(tmp_path, 300, name)
    for outcome in find(tmp_path):
        assert outcome.step == outcome.loaded.manifest.step == 200
        ((step, reason),) = [(one.step, one.reason) for one in outcome.skipped]
        assert step == 300
        assert name in reason


def test_several_are_passed_over_newest_first(tmp_path):
    for step in (100, 200, 300, 400):
        save(tmp_path, step)
    damage(tmp_path, 300, "rank-00000.json")
    (tmp_path / save_name(400) / "rank-00001.safetensors").unlink(missing_ok=True)
    (tmp_path / save_name(400) / "rank-00001.json").unlink()
    for outcome in find(tmp_path, promised=[400, 500]):
        assert outcome.step == 200
        assert [(one.step, one.reason) for one in outcome.skipped] == [
            (500, "its manifest is missing, though the ledger has its commit"),
            (400, "rank-00001.json is missing"),
            (300, "rank-00000.json does not match its checksum (block 0 of 1)"),
        ]


@pytest.mark.parametrize(("begins_at", "wanted"), [(0, 200), (200, 200), (201, 201)])
def test_what_is_older_than_a_frameworks_own_checkpoint_is_passed_by(tmp_path, begins_at, wanted):
    for step in (100, 200):
        save(tmp_path, step)
    for outcome in find(tmp_path, promised=[100, 200], begins_at=begins_at):
        assert outcome.step == wanted
        assert (outcome.loaded is None) == (wanted == 201)
        assert ("up to step 200" in " ".join(outcome.notes)) == (wanted == 201)


def test_of_damaged_ones_a_frameworks_own_checkpoint_is_gone_on_from(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 300)
    damage(tmp_path, 300, "rank-00001.json")
    for outcome in find(tmp_path, promised=[300], begins_at=200):
        assert (outcome.step, outcome.loaded) == (200, None)
        assert [one.step for one in outcome.skipped] == [300]


def test_one_ranks_refusal_is_everybodys(tmp_path):
    """Rank 1's machine cannot read what rank 0's can."""
    for step in (100, 200):
        save(tmp_path, step)
    blind = cannot_read(tmp_path, 200)
    for outcome in find(tmp_path, storages=[Directory(tmp_path), blind]):
        assert outcome.step == 100
        assert [(one.step, one.reason) for one in outcome.skipped] == [
            (200, "EIO: Input/output error")
        ]


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), ValueError("x")])
def test_small_state_that_nobody_understands_is_passed_over(tmp_path, error):
    for step in (100, 200):
        save(tmp_path, step)
    for outcome in find(tmp_path, check=[fine, refuse(200, error)]):
        assert outcome.step == 100
        assert "its small state is not understood" in outcome.skipped[0].reason


def test_not_enough_memory_is_not_the_checkpoints_fault(tmp_path):
    save(tmp_path, 100)
    results = find(tmp_path, check=[fine, refuse(100, MemoryError())])
    assert all(isinstance(result, StorageError) for result in results)
    assert "not enough memory to read it" in str(results[0])


@pytest.mark.parametrize("unhappy", [0, 1])
def test_a_mismatch_on_one_rank_is_raised_on_all(tmp_path, unhappy):
    """Older ones are not tried: the newest is whole, the session is another."""
    for step in (100, 200):
        save(tmp_path, step)
    tried = []
    checks = [lambda loaded: tried.append(loaded.manifest.step)] * 2
    checks[unhappy] = refuse(200, StateMismatch("model.w has shape (3,) in step 200"))
    results = find(tmp_path, check=checks)
    assert [type(result) for result in results] == [StateMismatch, StateMismatch]
    assert {str(result) for result in results} == {"model.w has shape (3,) in step 200"}
    assert tried == [200]


@pytest.mark.parametrize("unhappy", [0, 1])
def test_what_one_rank_cannot_read_is_not_compared_by_the_other(tmp_path, unhappy):
    """A session that is another is told of by the older one, which both ranks can read."""
    for step in (100, 200):
        save(tmp_path, step)
    blind = cannot_read(tmp_path, 200)
    storages = [Directory(tmp_path), Directory(tmp_path)]
    storages[1 - unhappy] = blind
    checks = [fine, fine]
    checks[unhappy] = refuse(200, StateMismatch("model.w has shape (3,) in step 200"))
    for outcome in find(tmp_path, storages=storages, check=checks):
        assert (outcome.step, outcome.skipped[0].step) == (100, 200)


def test_none_is_valid(tmp_path):
    for step in (100, 200):
        save(tmp_path, step)
    damage(tmp_path, 100, "manifest.json")
    damage(tmp_path, 200, "rank-00000.json")
    results = find(tmp_path, promised=[100, 200])
    assert [type(result) for result in results] == [ResumeRefused, ResumeRefused]
    assert str(results[0]) == str(results[1])
    says = str(results[0])
    assert says.startswith(
        f"checkpoints were committed to {tmp_path} and none is valid (step 200: "
    )
    assert "rank-00000.json does not match its checksum" in says
    assert "; step 100: manifest.json" in says
    assert says.endswith("bring one back from a copy, or start anew with another --dir")


def test_a_manifest_alone_is_a_promise(tmp_path):
    """The ledger may be lost too."""
    save(tmp_path, 100)
    damage(tmp_path, 100, "manifest.json")
    assert all(isinstance(result, ResumeRefused) for result in find(tmp_path))


def test_the_ledger_alone_is_a_promise(tmp_path):
    results = find(tmp_path, promised={100, 50})
    assert all(isinstance(result, ResumeRefused) for result in results)
    assert "step 100: its manifest is missing, though the ledger has its commit" in str(results[1])


@pytest.mark.parametrize("promised", [(), (100,)])
def test_a_storage_that_cannot_be_listed(tmp_path, promised):
    save(tmp_path, 100)
    error = OSError(13, "Permission denied")
    blind = WatchedStorage(Directory(tmp_path), lambda did, _: error if did == "children" else None)
    results = find(tmp_path, promised=promised, storages=[blind, Directory(tmp_path)])
    assert [type(result) for result in results] == [StorageError, StorageError]
    assert str(results[1]) == f"{tmp_path} cannot be listed: Permission denied{NEXT}"


def test_a_storage_that_cannot_be_read_is_not_a_loss(tmp_path):
    """Not 'none is valid': the checkpoints may be as good as ever."""
    save(tmp_path, 100)
    error = OSError(5, "Input/output error")
    blind = WatchedStorage(Directory(tmp_path), lambda did, _: error if did == "read" else None)
    results = find(tmp_path, promised=[100], storages=[blind, Directory(tmp_path)])
    assert all(isinstance(result, StorageError) for result in results)
    assert str(results[0]) == f"{tmp_path} cannot be read: EIO: Input/output error{NEXT}"


@pytest.mark.parametrize(("saved_by", "read_by"), [(3, 3), (4, 2), (2, 3), (5, 1)])
def test_all_files_are_verified_between_the_ranks_and_none_for_nothing(tmp_path, saved_by, read_by):
    save(tmp_path, 100, world_size=saved_by)
    storages = [WatchedStorage(Directory(tmp_path)) for _ in range(read_by)]
    find(tmp_path, read_by, storages=storages)
    read = [
        [name.rpartition("/")[2] for did, name in storage.log if did == "open"]
        for storage in storages
    ]
    for rank, names in enumerate(read):
        mine = f"rank-{rank % saved_by:05d}"
        needed = {"rank-00000.safetensors", "rank-00000.part.json", f"{mine}.json"}
        share = {
            f"rank-{number:05d}.{kind}"
            for number in range(saved_by * rank // read_by, saved_by * (rank + 1) // read_by)
            for kind in ("json", "part.json")
        }
        found = sorted(needed | share | {f"{mine}.part.json"})
        assert sorted(names) == found, "each is opened once"
    assert len(set().union(*read)) == 2 * saved_by + 1


def test_a_rank_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "READ_TIMEOUT_S", 0.05)
    save(tmp_path, 100)
    results = find(tmp_path, only=[0])
    assert isinstance(results[0], TimeoutError)
    results = find(tmp_path, only=[1])
    assert isinstance(results[1], TimeoutError)


def test_alone(tmp_path):
    save(tmp_path, 100, world_size=1)
    assert resume.find(Directory(tmp_path), LocalLink(), (), fine).step == 100


# --- several places ------------------------------------------------------------------------------


def copied(path, *steps, world_size=2):
    """The same steps in two places."""
    for step in steps:
        save(path / "local", step, world_size)
    if steps:
        shutil.copytree(path / "local", path / "shared")
    return [Place(name, Directory(path / name)) for name in ("local", "shared")]


def find_in(places, world_size=2, *, promised=(), check=fine, each=None):
    told, mended = [], []

    def act(link):
        mine = check[link.rank] if isinstance(check, list) else check
        return resume.find(
            each[link.rank] if each else places,
            link,
            saves(*promised) if link.rank == 0 else (),
            mine,
            on_damaged=lambda _step, file, place, _: told.append((link.rank, file, place.name)),
            on_repaired=lambda _step, file, place: mended.append((link.rank, file, place.name)),
        )

    outcomes = on_ranks(world_size, act, hub=Hub(world_size))
    return outcomes, sorted(told), sorted(mended)


def test_a_step_that_any_place_has_is_a_candidate(tmp_path):
    places = copied(tmp_path, 100)
    save(tmp_path / "shared", 300)
    save(tmp_path / "local", 200)
    outcomes, told, _ = find_in(places, promised=[300])
    assert [(one.step, one.skipped, told) for one in outcomes] == [(300, [], [])] * 2
    assert outcomes[0].origin == "from shared"
    shutil.rmtree(tmp_path / "shared")
    outcomes, *_ = find_in(places)
    assert [one.step for one in outcomes] == [200, 200]


def test_what_is_damaged_in_one_place_does_not_cost_the_step_and_is_mended_once(tmp_path):
    places = copied(tmp_path, 100, 200)
    damage(tmp_path / "local", 200, "rank-00000.safetensors")
    damage(tmp_path / "local", 200, "rank-00001.json")
    outcomes, told, mended = find_in(places)
    for rank, outcome in enumerate(outcomes):
        assert (outcome.step, outcome.skipped) == (200, [])
        assert same(outcome.loaded.state("model"), {"w": torch.full((3,), 200.0)})
        assert outcome.sources["rank-00000.safetensors"] == "shared"
        assert outcome.sources[f"rank-0000{rank}.json"] == ("local", "shared")[rank]
    assert told == [
        (0, "rank-00000.safetensors", "local"),
        (1, "rank-00000.safetensors", "local"),
        (1, "rank-00001.json", "local"),
    ]
    assert mended == [(0, "rank-00000.safetensors", "local"), (1, "rank-00001.json", "local")]
    assert outcomes[0].origin == "from local and shared, 1 file repaired from shared"
    for name in ("rank-00000.safetensors", "rank-00001.json"):
        files = [tmp_path / place / save_name(200) / name for place in ("local", "shared")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_each_machine_mends_its_own(tmp_path, monkeypatch):
    """What is called local is another directory on the other machine."""
    places = copied(tmp_path, 100)
    shutil.copytree(tmp_path / "local", tmp_path / "other")
    each = [places, [Place("local", Directory(tmp_path / "other")), places[1]]]
    for name in ("local", "other"):
        damage(tmp_path / name, 100, "rank-00000.safetensors")
    hosts = iter(["one", "two"])
    monkeypatch.setattr(resume.socket, "gethostname", lambda: next(hosts))
    _, _, mended = find_in(places, each=each)
    assert mended == [(rank, "rank-00000.safetensors", "local") for rank in (0, 1)]


def test_nothing_is_mended_of_a_step_that_is_passed_over(tmp_path):
    places = copied(tmp_path, 100, 200)
    damage(tmp_path / "local", 200, "rank-00000.safetensors")
    for name in ("local", "shared"):
        damage(tmp_path / name, 200, "rank-00001.json")
    outcomes, _, mended = find_in(places)
    assert [one.step for one in outcomes] == [100, 100]
    assert mended == []
    assert outcomes[0].skipped[0].reason == (
        "local: rank-00001.json does not match its checksum (block 0 of 1); "
        "shared: rank-00001.json does not match its checksum (block 0 of 1)"
    )


def unlisted(place):
    error = OSError(13, "Permission denied")
    blind = WatchedStorage(place.storage, lambda did, _: error if did == "children" else None)
    return Place(place.name, blind)


def test_a_place_that_cannot_be_listed_is_passed_over_in_words(tmp_path, caplog):
    places = copied(tmp_path, 100)
    outcomes, *_ = find_in([unlisted(places[0]), places[1]])
    for outcome in outcomes:
        assert outcome.step == 100
        assert outcome.notes == [
            f"{tmp_path / 'local'} cannot be listed: Permission denied; going on without it"
        ]
    assert caplog.text.count("cannot be listed") == 1


def test_the_silence_of_a_place_is_no_reason_to_start_anew(tmp_path):
    places = copied(tmp_path)
    (tmp_path / "shared").mkdir()
    results, *_ = find_in([unlisted(places[0]), places[1]])
    assert [type(result) for result in results] == [StorageError, StorageError]
    assert str(results[0]) == f"{tmp_path / 'local'} cannot be listed: Permission denied{NEXT}"


def test_no_place_can_be_listed(tmp_path):
    places = copied(tmp_path, 100)
    results, *_ = find_in([unlisted(place) for place in places])
    assert all(isinstance(result, StorageError) for result in results)
    assert str(results[0]).count("cannot be listed") == 2


def test_a_save_that_one_worker_does_not_see_makes_way_for_an_older_one_of_the_step(tmp_path):
    places = copied(tmp_path, 100, 200)
    save(tmp_path / "shared", 200, attempt=2)
    outcomes, *_ = find_in(places, each=[places, places[:1]])
    assert [(one.step, one.loaded.manifest.attempt) for one in outcomes] == [(200, 1)] * 2
    reason = "manifest.json is missing"
    assert outcomes[1].skipped[0].reason == reason


# --- what a manifest says of itself --------------------------------------------------------------


def test_weights_alone_are_passed_by_and_not_called_invalid(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200, kind="weights")
    for outcome in find(tmp_path, promised=[100, 200]):
        assert (outcome.step, outcome.skipped) == (100, [])


def test_weights_alone_are_no_reason_to_start_anew(tmp_path):
    save(tmp_path, 200, kind="weights")
    results = find(tmp_path)
    assert all(isinstance(result, ResumeRefused) for result in results)
    assert "none is valid (step 200: it holds weights alone)" in str(results[0])


def test_what_was_stored_in_fewer_bits_is_said(tmp_path, caplog):
    save(tmp_path, 200, exact=False)
    for outcome in find(tmp_path):
        (note,) = outcome.notes
        assert note.startswith("step 200: some of its tensors were stored in fewer bits")
    assert caplog.text.count("fewer bits") == 1


# --- names that one rank lacks -------------------------------------------------------------------


def lacking(names, claims, step=200):
    """A rank that has ``claims`` and whose source holds ``names`` besides."""

    def check(loaded):
        restore = Restore(loaded, f"step {loaded.manifest.step}")
        if loaded.manifest.step == step:
            restore.absent = {name: f"{name} is only in step {step}" for name in names}
            restore.claims = set(claims)
        restore.take("model")
        return restore

    return check


def test_names_that_another_rank_has_are_nobodys_trouble(tmp_path):
    save(tmp_path, 200)
    check = [lacking(["b"], ["a"]), lacking(["a"], ["b"])]
    outcomes, *_ = find_in([Place("local", Directory(tmp_path))], check=check)
    for outcome in outcomes:
        assert outcome.step == 200
        assert same(outcome.loaded.state("model"), {"w": torch.full((3,), 200.0)})


@pytest.mark.parametrize("unhappy", [0, 1])
def test_a_name_that_no_rank_has_is_a_mismatch_for_all(tmp_path, unhappy):
    for step in (100, 200):
        save(tmp_path, step)
    check = [lacking([], ["a"]), lacking([], ["b"])]
    check[unhappy] = lacking(["a", "b", "c"], [])
    results, *_ = find_in([Place("local", Directory(tmp_path))], check=check)
    assert [type(result) for result in results] == [StateMismatch] * 2
    assert [str(result) for result in results] == [f"{'ab'[unhappy]} is only in step 200"] * 2


def test_nothing_is_filled_before_such_names_are_settled(tmp_path):
    save(tmp_path, 200)
    target = torch.zeros(3)

    def check(loaded):
        restore = Restore(loaded, f"step {loaded.manifest.step}")
        restore.absent = {"a": "a is only in step 200"}
        restore.targets = [("model.w", target)]
        return restore

    results, *_ = find_in([Place("local", Directory(tmp_path))], 1, check=check)
    assert isinstance(results[0], StateMismatch)
    assert not target.any()


def test_damage_is_heard_before_names_that_are_lacking(tmp_path):
    for step in (100, 200):
        save(tmp_path, step)
    damage(tmp_path, 200, "rank-00000.safetensors")
    outcomes, *_ = find_in([Place("local", Directory(tmp_path))], 1, check=lacking(["a"], []))
    assert outcomes[0].step == 100
