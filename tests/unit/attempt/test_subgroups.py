"""Groups of device meshes are made again, and whatever holds one is given the new one."""

import socket
import types
import weakref

import pytest
import torch
import torch.distributed as dist

from outlast.attempt.groups import Groups
from outlast.attempt.over import over
from outlast.errors import NotInProcess


@pytest.fixture(name="watched")
def _watched(monkeypatch):
    """Of one process, which is a job of its own, with what holds the groups that it makes."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in around.items():
        monkeypatch.setenv(name, str(value))
    groups = Groups()
    groups.watch()
    dist.init_process_group("gloo")
    yield groups
    groups.unwatch()
    if dist.is_initialized():
        dist.destroy_process_group()
    over.begin_again()


def mesh_group(name="mesh_shard"):
    return dist.new_group([0], group_desc=name)


def crossed(groups):
    groups.break_all(again=False)
    groups.let_go()
    groups.join()


def holders():
    """Of each kind that can be given another one."""
    first, second = mesh_group(), mesh_group("mesh_replicate")
    there = types.SimpleNamespace(group=first, known={"a": [second], "b": second})
    there.cell = (lambda: first).__closure__[0]
    return there


def test_whatever_holds_one_has_the_new_one(watched):
    there = holders()
    names = [there.group.group_name, there.known["b"].group_name]
    before = [weakref.ref(group) for group in (there.group, there.known["b"])]
    assert watched.why_not() == ""
    for _ in range(2):
        crossed(watched)
        assert there.cell.cell_contents is there.group
        assert there.known["a"] == [there.known["b"]]
        assert [there.group.group_name, there.known["b"].group_name] == names
        assert not {old() for old in before} & {there.group, there.known["b"]}
        dist.all_reduce(torch.ones(1), group=there.group)
        dist.all_reduce(torch.ones(1), group=there.known["b"])


def test_a_second_loss_on_the_way_changes_nothing(watched):
    there = holders()
    watched.let_go()
    dist.init_process_group("gloo")  # as far as that
    watched.let_go()
    watched.join()
    dist.all_reduce(torch.ones(1), group=there.group)


def test_a_variable_of_a_function_is_found(watched):
    mine = mesh_group()
    assert "in a variable of a function" in watched.why_not()
    with pytest.raises(NotInProcess, match="get_group"):
        watched.let_go()
    assert mine.size() == 1


@pytest.mark.parametrize("kind", [lambda group: (group,), lambda group: {group}])
def test_what_cannot_be_given_another_one_is_said(watched, kind):
    there = types.SimpleNamespace(groups=kind(mesh_group()))
    assert "cannot be replaced" in watched.why_not()
    assert there.groups


def test_groups_of_other_kinds_are_not_made_again(watched):
    there = holders()
    there.other = dist.new_group([0])
    assert "besides the default one" in watched.why_not()


def test_another_place_is_no_place_for_a_mesh(watched):
    there = holders()
    watched._others._place = 1, 2
    watched.let_go()
    with pytest.raises(NotInProcess, match="mesh is of 2 workers with this one as rank 1"):
        watched.join()
    assert there.group
