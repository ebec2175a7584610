"""A new job's weights, out of whatever somebody has written them to."""

import collections
import copyreg
import io
import json
import os
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMATS
from unit_checkpoints import write
from unit_fakes import Hub, bits

from outlast.attempt.link import LocalLink
from outlast.checkpoint.foreign import Weights
from outlast.checkpoint.tree import flatten
from outlast.errors import ConfigError, OutlastError
from outlast.script.initial import Initial
from outlast.script.objects import Objects
from outlast.storage import Directory


class Net(torch.nn.Module):
    """Layers, a buffer that is counted, and a head whose weight is the embedding's."""

    def __init__(self, seed=0, *, classes=3, dtype=torch.float32, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 4)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.out = torch.nn.Linear(4, 7, bias=False)
        self.head = torch.nn.Linear(4, classes)
        if tied:
            self.out.weight = self.embed.weight
        self.to(dtype)


def trained(**how):
    """Weights that no fresh model has, and an optimizer that has stepped."""
    model = Net(9, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    model.body[1].running_mean.fill_(3.0)
    return model, optimizer


def as_state(model, _):
    return dict(model.state_dict())


def to_torch(path, model, _):
    torch.save(model.state_dict(), path / "w.pt")
    return path / "w.pt"


def to_old_torch(path, model, _):
    torch.save(model.state_dict(), path / "w.bin", _use_new_zipfile_serialization=False)
    return path / "w.bin"


def to_nested_torch(path, model, optimizer):
    state = {"epoch": 3, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path / "w.ckpt")
    return path / "w.ckpt"


def to_lightning(path, model, _):
    state = {f"net.{name}": one for name, one in model.state_dict().items()}
    torch.save({"state_dict": {**state, "loss.weight": torch.ones(2)}, "epoch": 1}, path / "w.pt")
    return path / "w.pt"


def to_wrapped_torch(path, model, _):
    state = {f"module._orig_mod.{name}": one for name, one in model.state_dict().items()}
    torch.save({"model": state}, path / "w.pt")
    return path / "w.pt"


def to_safetensors(path, model, _):
    state = {name: one.contiguous() for name, one in model.state_dict().items()}
    del state["out.weight"]  # as transformers leaves out what is tied
    save_file(state, path / "w.safetensors")
    return path / "w.safetensors"


def to_shards(path, model, _):
    state = {k: v for k, v in model.state_dict().items() if k != "out.weight"}
    names = sorted(state)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, its in halves.items():
        save_file({name: state[name] for name in its}, path / file)
    index = {"weight_map": {name: file for file, its in halves.items() for name in its}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def to_dcp(path, model, optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = [f"p{i}" for i, _ in enumerate(model.parameters())]
        state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "names": names}
        dcp.save(state, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def to_ours(path, model, optimizer):
    state = Objects({"model": model, "optimizer": optimizer}).capture()
    write(Directory(path / "job" / "checkpoints"), [{**state, "outlast": {"step": 7}}])
    return path / "job"


FORMS = [
    *(to_torch, to_old_torch, to_nested_torch, to_lightning, to_wrapped_torch),
    *(to_safetensors, to_shards, to_dcp, to_ours),
]


def bits_of(one):
    data, tensors = flatten(one.state_dict(), "it")
    return data, {name: bits(tensor) for name, tensor in tensors.items()}


def start(source, *, left_out=(), **named):
    named = named or {"model": Net()}
    return Initial(Objects(named), source, left_out).start(LocalLink())


def refusal(source, *, left_out=(), **named):
    named = named or {"model": Net()}
    before = {key: bits_of(one) for key, one in named.items()}
    with pytest.raises(OutlastError) as caught:
        start(source, left_out=left_out, **named)
    assert before == {key: bits_of(one) for key, one in named.items()}
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    return str(caught.value)


# --- what is taken -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_model_has_the_weights_that_were_written_in_any_form(tmp_path, form):
    model, optimizer = trained()
    (origin,) = start(form(tmp_path, model, optimizer), model=(new := Net()))
    assert bits_of(new) == bits_of(model)
    assert new.out.weight is new.embed.weight
    assert origin.objects == ["model"]
    assert len(origin.digest) == 32


@pytest.mark.parametrize("form", FORMS)
def test_they_are_cast_to_the_models_dtype_and_it_is_said(tmp_path, form):
    model, optimizer = trained()
    new = Net(dtype=torch.bfloat16)
    (origin,) = start(form(tmp_path, model, optimizer), model=new)
    model.to(torch.bfloat16)
    assert bits_of(new) == bits_of(model)
    assert "cast from float32 to bfloat16" in origin.remarks[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_head_of_another_shape_is_refused_by_name_or_left_as_the_script_made_it(tmp_path, form):
    model, optimizer = trained()
    path = form(tmp_path, model, optimizer)
    said = refusal(path, model=Net(classes=5))
    assert "head.weight is (3, 4) there and (5, 4) in the model" in said
    assert 'init_except=("head",)' in said
    (origin,) = start(path, left_out="head", model=(new := Net(classes=5)))
    fresh, then = Net(classes=5).state_dict(), model.state_dict()
    for name, one in new.state_dict().items():
        assert torch.equal(one, fresh[name] if name.startswith("head") else then[name])
    assert "2 left as they are (head.bias, head.weight)" in origin.remarks[0]


@pytest.mark.parametrize("form", FORMS)
def test_names_that_are_missing_or_too_many_are_counted_and_named(tmp_path, form):
    class More(Net):
        def __init__(self):
            super().__init__()
            del self.body[0]
            self.lora_a, self.lora_b = torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)

    path = form(tmp_path, *trained())
    said = refusal(path, model=More())
    assert "lacks 7 of its 13 names (" in said
    assert '"lora_a", "lora_b"' in said


def test_names_of_a_flat_file_that_the_model_has_not(tmp_path):
    state = as_state(*trained()) | {"pooler.weight": torch.ones(2), "pooler.bias": torch.ones(1)}
    torch.save(state, tmp_path / "w.pt")
    said = refusal(tmp_path / "w.pt")
    assert "has 2 that model does not have (pooler.bias, pooler.weight)" in said
    assert 'init_except=("pooler",)' in said
    start(tmp_path / "w.pt", left_out=("pooler",))


def test_the_patterns_that_are_proposed_are_enough(tmp_path):
    model, optimizer = trained()
    path = to_torch(tmp_path, model, optimizer)

    class Other(Net):
        def __init__(self):
            super().__init__(classes=8)
            self.adapters = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))

    said = refusal(path, model=Other())
    proposed = said.rpartition("init_except=(")[2].rstrip(",)").split(", ")
    start(path, left_out=[one.strip('"') for one in proposed], model=Other())


def test_an_exception_that_matches_nothing_is_refused(tmp_path):
    path = to_torch(tmp_path, *trained())
    said = refusal(path, left_out=("haed",))
    assert "'haed'" in said


def test_an_empty_path_is_not_the_working_directory(tmp_path, monkeypatch):
    """It is what an option that was not given, or a variable that is not set, comes to."""
    monkeypatch.chdir(tmp_path)
    assert "empty path" in refusal("")


def test_another_model_altogether(tmp_path):
    torch.save({"encoder.0.kernel": torch.ones(3)}, tmp_path / "w.pt")
    assert "none of the 11 names" in refusal(tmp_path / "w.pt")


def test_an_average_and_the_model_itself_in_one_file(tmp_path):
    model, _ = trained()
    other = Net(4)
    torch.save({"ema": other.state_dict(), "model": model.state_dict()}, tmp_path / "w.pt")
    start(tmp_path / "w.pt", model=(new := Net()))
    assert bits_of(new) == bits_of(model)
    start(tmp_path / "w.pt", ema=(new := Net()))
    assert bits_of(new) == bits_of(other)
    torch.save({"a": other.state_dict(), "b": model.state_dict()}, tmp_path / "x.pt")
    assert "in several places (a, b)" in refusal(tmp_path / "x.pt")


def test_two_models_from_two_sources(tmp_path):
    (a, b) = Net(3), Net(4)
    torch.save(a.state_dict(), tmp_path / "a.pt")
    torch.save(b.state_dict(), tmp_path / "b.pt")
    new = {"one": Net(), "two": Net(), "three": Net()}
    start({"one": tmp_path / "a.pt", "two": tmp_path / "b.pt"}, **new)
    for name, expected in zip(new, (a, b, Net()), strict=True):
        assert bits_of(new[name]) == bits_of(expected)


def test_numbers_of_another_kind_are_not_cast(tmp_path):
    state = as_state(*trained())
    state["head.weight"] = torch.ones(3, 4, dtype=torch.int8)
    torch.save(state, tmp_path / "w.pt")
    assert "head.weight is int8 there and float32 in the model" in refusal(tmp_path / "w.pt")


def test_names_that_are_one_tensor_now_and_were_two(tmp_path):
    torch.save(Net(3, tied=False).state_dict(), tmp_path / "w.pt")
    with pytest.raises(OutlastError, match=r"out\.weight and embed\.weight are one tensor"):
        start(tmp_path / "w.pt")
    model = Net(3)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    start(tmp_path / "w.pt", model=(new := Net(tied=False)))
    assert torch.equal(new.out.weight, model.embed.weight)


class OwnWay(torch.nn.Module):
    """A module with a state that is no tensor."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.weight = torch.nn.Parameter(torch.full((2,), float(scale)))

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


@pytest.mark.parametrize("form", [to_torch, to_dcp, to_ours])
def test_a_module_that_loads_in_its_own_way_is_given_its_part(tmp_path, form):
    def make(scale):
        return torch.nn.Sequential(torch.nn.Linear(2, 2), OwnWay(scale))

    model = make(7)
    path = form(tmp_path, model, torch.optim.SGD(model.parameters()))
    start(path, model=(new := make(1)))
    assert new[1].scale == 7
    assert torch.equal(new[1].weight, model[1].weight)
    start(path, left_out="1", model=(new := make(1)))
    assert new[1].scale == 1
    assert torch.equal(new[1].weight, torch.ones(2))
    assert torch.equal(new[0].weight, model[0].weight)


# --- more than weights ---------------------------------------------------------------------------


def everything(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("form", [to_ours, to_nested_torch])
def test_an_optimizer_is_taken_where_it_is_named_and_only_there(tmp_path, form):
    model, optimizer = trained()
    path = form(tmp_path, model, optimizer)
    start(path, **(fresh := everything(Net())))
    assert not fresh["optimizer"].state
    start({"model": path, "optimizer": path}, **(new := everything(Net())))
    assert bits_of(new["model"]) == bits_of(model)
    assert bits_of(new["optimizer"]) == bits_of(optimizer)


def test_what_holds_weights_alone_gives_no_optimizer(tmp_path):
    path = to_safetensors(tmp_path, *trained())
    said = refusal({"model": path, "optimizer": path}, **everything(Net()))
    assert "weights alone, and 'optimizer' is no model" in said
    path = to_torch(tmp_path, *trained())
    assert "holds no 'optimizer'" in refusal({"optimizer": path}, **everything(Net()))


def test_a_step_of_ours(tmp_path):
    path, model = tmp_path / "job", Net()
    for step, seed in ((7, 3), (9, 4)):
        state = Objects({"model": Net(seed)}).capture()
        write(Directory(path / "checkpoints"), [{**state, "outlast": {"step": step}}], step=step)
    (origin,) = start(f"{path}@7", model=model)
    assert origin.step == 7
    assert bits_of(model) == bits_of(Net(3))
    (origin,) = start(path, model=model)
    assert origin.step == 9
    assert bits_of(model) == bits_of(Net(4))
    (save,) = (path / "checkpoints").glob("step-*7*")
    (origin,) = start(save, model=model)
    assert origin.step == 7
    assert "has no step 8; it has 7, 9" in refusal(f"{path}@8")


# --- what cannot be started from -----------------------------------------------------------------


class Explosive:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_nothing_that_a_file_names_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Net().state_dict(), "args": Explosive()}, "w.pt")
    said = refusal("w.pt")
    assert "needs pickle" in said
    assert "posix.mkdir" in said
    assert "torch.save(x.state_dict(), NEW)" in said
    torch.save(Net(), "module.pt")
    assert "needs pickle: it holds " in refusal("module.pt")
    to_dcp(tmp_path, *trained())
    Path("dcp/.metadata").write_bytes(pickle.dumps(Explosive()))
    assert "names posix.mkdir" in refusal("dcp")
    assert not Path("exploded").exists()


def by_name(path, of):
    """Write a DCP directory's metadata as some Pythons do: members of enumerations by name."""
    metadata = pickle.loads(path.read_bytes())
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = copyreg.dispatch_table | {
        MEMORY_FORMATS: lambda member: (getattr, of(member))
    }
    pickler.dump(metadata)
    assert b"getattr" in buffer.getvalue()
    path.write_bytes(buffer.getvalue())


def test_a_dcp_directory_that_another_python_wrote_is_read(tmp_path):
    model, optimizer = trained()
    path = to_dcp(tmp_path, model, optimizer)
    by_name(path / ".metadata", lambda member: (type(member), member.name))
    start(path, model=(new := Net()))
    assert bits_of(new) == bits_of(model)


@pytest.mark.parametrize("name", ["__init__", "mro", "_missing_"])
def test_nothing_but_members_is_asked_for_by_name(tmp_path, name):
    path = to_dcp(tmp_path, *trained())
    by_name(path / ".metadata", lambda member: (type(member), name))
    assert f"asks for '{name}' of" in refusal(path)


def test_what_is_no_tensor_in_a_dcp_directory_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Bad(OwnWay):
        def get_extra_state(self):
            return {"scale": Explosive()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": Bad(1).state_dict()}, checkpoint_id="dcp", no_dist=True)
    refusal("dcp", model=OwnWay(2))
    assert not Path("exploded").exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", [0, 0.01, 0.5, 0.97])
def test_a_file_that_was_cut_short_is_refused_in_one_line(tmp_path, form, keep):
    path = form(tmp_path, *trained())
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    for file in files:
        if file.name == "save.json":  # is for retention
            continue
        whole = file.read_bytes()
        file.write_bytes(whole[: int(len(whole) * keep)])
        with pytest.raises(OutlastError) as caught:
            start(path)
        assert "\n" not in str(caught.value)
        assert "damaged" in str(caught.value) or "not valid" in str(caught.value)
        file.unlink()
        refusal(path)
        file.write_bytes(whole)
    start(path)


def test_a_flipped_byte_of_ours_is_found(tmp_path):
    path = to_ours(tmp_path, *trained())
    (file,) = path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"rank-00000\.safetensors"):
        start({"model": path, "optimizer": path}, **everything(Net()))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda at: at / "nowhere", "no such file or directory"),
        (lambda at: at / "nowhere@12", "no such file or directory"),
        (lambda at: f"{to_torch(at, *trained())}@12", "only checkpoints of Outlast's"),
        (lambda at: at, "holds nothing to start from"),
        (lambda at: "s3://bucket/job@3", "a bucket is not read"),
    ],
)
def test_what_is_no_source_is_said(tmp_path, make, expected):
    assert expected in refusal(make(tmp_path))


def test_several_things_in_a_directory(tmp_path):
    to_safetensors(tmp_path, *trained())
    start(tmp_path)
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes())
    assert "several things to start from" in refusal(tmp_path)


def test_arguments_that_make_no_sense():
    objects = Objects(everything(Net()))
    with pytest.raises(ConfigError, match="'modle', and the session model, optimizer"):
        Initial(objects, {"modle": "x"})
    with pytest.raises(ConfigError, match="there is none"):
        Initial(objects, None, "head")
    scheduler = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ConfigError, match="names none"):
        Initial(Objects({"optimizer": scheduler}), "x")


# --- several workers -----------------------------------------------------------------------------


def test_whatever_goes_wrong_on_one_worker_no_other_waits_for_it(tmp_path, monkeypatch):
    models = [Net(), Net()]
    read = Weights.read

    def fails(self, wanted):
        if any(one.data_ptr() == models[1].head.weight.data_ptr() for _, one in wanted):
            raise LookupError("nobody thought of it")
        read(self, wanted)

    monkeypatch.setattr(Weights, "read", fails)
    path = to_dcp(tmp_path, *trained())
    words = "a start from init_from failed: LookupError: nobody thought of it"
    assert start_all([path, path], models) == [words, words]


def start_all(sources, models, left_out=()):
    """What each rank came to: None, or the refusal."""
    hub = Hub(len(models))

    def one(rank):
        initial = Initial(Objects({"model": models[rank]}), sources[rank], left_out)
        try:
            initial.start(hub.link(rank))
        except OutlastError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(one, range(len(models))))


def test_ranks_with_other_files_are_refused_on_all_of_them(tmp_path):
    for rank, seed in enumerate((3, 3, 4)):
        (tmp_path / str(rank)).mkdir()
        torch.save(Net(seed).state_dict(), tmp_path / str(rank) / "w.pt")
    same, other = ([tmp_path / str(rank) / "w.pt" for rank in pair] for pair in ((0, 1), (0, 2)))
    assert start_all(same, [Net(), Net()]) == [None, None]
    said = start_all(other, [Net(), Net()])
    assert all(one.startswith("rank 1 finds other weights") for one in said)


def test_one_ranks_refusal_is_everybodys(tmp_path):
    path = to_torch(tmp_path, *trained())
    models = [Net(), Net(classes=5)]
    before = bits_of(models[0])
    said = start_all([path, path], models)
    assert said[0] == said[1]
    assert "head.weight" in said[0]
    assert bits_of(models[0]) == before


@pytest.mark.parametrize("form", FORMS)
def test_stages_of_a_pipeline_take_their_own_layers_each(tmp_path, form):
    def stage(*names):
        net = Net()
        for name in {"embed", "body", "out", "head"} - set(names):
            delattr(net, name)
        return net

    model, optimizer = trained()
    stages = [stage("embed", "out"), stage("body", "head")]
    path = form(tmp_path, model, optimizer)
    assert start_all([path, path], stages) == [None, None]
    for one in stages:
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name])
    if form is not to_lightning:
        said = start_all([path, path], [stages[0], stage("body")])
        assert said[0] == said[1]
        assert "has 2 that model does not have (head.bias, head.weight)" in said[0]


def test_all_that_is_read_is_closed(tmp_path):
    def open_files():
        links = collections.Counter()
        for one in Path("/proc/self/fd").iterdir():
            try:
                links[str(one.readlink())] += 1
            except OSError:
                continue
        return {name for name in links if str(tmp_path) in name}

    for form in FORMS:
        start(form(tmp_path, *trained()))
    assert not open_files()
