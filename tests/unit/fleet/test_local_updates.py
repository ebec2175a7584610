"""DiLoCo and Streaming DiLoCo: beside the algorithm written down plainly, and across resumes."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from unit_replicas import Replicas, same

from outlast import LocalUpdates
from outlast.errors import ConfigError, StateMismatch
from thorough import examples, some

STEPS = 11  # two rounds of five, and one
CASES = {
    "DiLoCo": {"every": 4},
    "plain outer SGD": {"every": 3, "nesterov": False, "outer_momentum": 0.0, "outer_lr": 1.0},
    "heavy ball": {"every": 3, "nesterov": False},
    "fragments": {"every": 5, "fragments": 3},
    "streaming": {"every": 5, "fragments": 2, "overlap": 2},
    "all but given up": {"every": 4, "overlap": 3, "alpha": 0.0},
    "int8": {"every": 4, "exchange": "int8"},
    "streaming int8": {"every": 5, "fragments": 2, "overlap": 4, "exchange": "int8"},
}
EXACT = [name for name, case in CASES.items() if "exchange" not in case]


def build(seed=0):
    draw = torch.Generator().manual_seed(seed)  # its own: replicas are threads
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=draw)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, rank, step):
    """One step on this replica's batch of that step."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 5, generator=draw)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def state_of(model, optimizer, local):
    """As a checkpoint has it: bytes of a moment."""
    file = io.BytesIO()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "local": local.state_dict(),
        },
        file,
    )
    return file.getvalue()


def load(state, model, optimizer, local):
    state = torch.load(io.BytesIO(state))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    local.load_state_dict(state["local"])


def states(replicas, size, case, steps=STEPS):
    """Each replica's state behind each step."""

    def script(rank):
        model, optimizer = build(rank)  # replica 0's become everybody's
        local = LocalUpdates(model, optimizer, **case)
        found = []
        for step in range(steps):
            train(model, optimizer, rank, step)
            found.append(state_of(model, optimizer, local))
        return found

    return replicas.run(size, script)


def written_down(size, every, steps=STEPS, fragments=1, overlap=0, alpha=None, **outer):
    """Algorithm 2 of Streaming DiLoCo, replica by replica, in one process; fp32."""
    lr, momentum = outer.get("outer_lr", 0.7), outer.get("outer_momentum", 0.9)
    alpha = (0.5 if alpha is None else alpha) if overlap else 0.0
    model, _ = build(0)
    all_of_them = [copy.deepcopy(model) for _ in range(size)]
    inner = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in all_of_them]
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    local = LocalUpdates(*build(0), every, fragments=fragments)
    parts = [each.fragment.names for each in local._rounds]
    assert sorted(name for part in parts for name in part) == sorted(names), sizes
    anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
    speed = {name: torch.zeros_like(value) for name, value in anchor.items()}
    flying = {}
    for step in range(steps):
        for rank in range(size):
            train(all_of_them[rank], inner[rank], rank, step)
        now = step + 1
        for number, part in enumerate(parts):
            if now % every == number * every // len(parts):
                flying[now + overlap, number] = {
                    name: [anchor[name] - dict(one.named_parameters())[name] for one in all_of_them]
                    for name in part
                }
        for key in sorted(flying):
            if key[0] != now:
                continue
            for name, deltas in flying.pop(key).items():
                gradient = deltas[0].clone()
                for delta in deltas[1:]:
                    gradient = gradient + delta
                gradient = gradient / size
                speed[name] = momentum * speed[name] + gradient
                move = gradient + momentum * speed[name]
                if not outer.get("nesterov", True):
                    move = speed[name]
                anchor[name] = anchor[name] - lr * move
                for one in all_of_them:
                    parameter = dict(one.named_parameters())[name]
                    with torch.no_grad():
                        if alpha:
                            parameter.copy_(alpha * parameter + (1 - alpha) * anchor[name])
                        else:
                            parameter.copy_(anchor[name])
    return [one.state_dict() for one in all_of_them]


@pytest.mark.parametrize("name", EXACT)
def test_it_is_the_algorithm_bit_for_bit(replicas, name):
    replicas.alone()
    wanted = written_down(3, **CASES[name])
    found = states(replicas, 3, CASES[name])
    for rank in range(3):
        last = torch.load(io.BytesIO(found[rank][-1]))
        assert same(dict(last["model"]), dict(wanted[rank])), rank


@pytest.mark.parametrize("name", ["DiLoCo", "streaming"])
def test_momentum_as_torchs(replicas, name):
    """The outer step is torch.optim.SGD's."""
    replicas.alone()
    model, optimizer = build()
    local = LocalUpdates(model, optimizer, **CASES[name])
    anchors = [each.anchor for each in local._rounds]
    beside = [nn.Parameter(torch.zeros_like(one)) for one in anchors]
    sgd = torch.optim.SGD(beside, lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        for each, parameter in zip(local._rounds, beside, strict=True):
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient.clone()
            local._move(each, gradient)
        sgd.step()
    for anchor, parameter in zip(anchors, beside, strict=True):
        torch.testing.assert_close(anchor, parameter.detach())


@pytest.mark.parametrize("name", CASES)
def test_all_replicas_have_the_same_anchor_and_parameters_after_a_round(replicas, name):
    found = [torch.load(io.BytesIO(each[-1])) for each in states(replicas, 3, CASES[name])]
    for key in ("anchor", "momentum", "launched", "local_step"):
        assert all(same(one["local"][key], found[0]["local"][key]) for one in found)
    assert found[0]["local"]["momentum"][0].abs().max() > 0 or "plain" in name
    anchors = found[0]["local"]["anchor"]
    assert all(one.isfinite().all() for one in anchors)


@pytest.mark.parametrize("name", CASES)
def test_a_resume_at_any_step_has_the_same_bits(replicas, name):
    """Two rounds and more, with exchanges in flight: what comes after is what came after."""
    case = CASES[name]
    undisturbed = states(replicas, 3, case)
    steps = range(STEPS - 1)
    for at in steps if "streaming" in name else some(steps, 3):

        def script(rank, at=at):
            model, optimizer = build(7)
            local = LocalUpdates(model, optimizer, **case)
            load(undisturbed[rank][at], model, optimizer, local)
            for step in range(at + 1, STEPS):
                train(model, optimizer, rank, step)
            return state_of(model, optimizer, local)

        for rank, found in enumerate(replicas.run(3, script)):
            wanted = torch.load(io.BytesIO(undisturbed[rank][-1]))
            assert same(torch.load(io.BytesIO(found)), wanted), (at, rank)


@examples(30)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=7),
    share=st.floats(0, 1),
    size=st.integers(1, 3),
    exchange=st.sampled_from(["fp32", "int8"]),
)
def test_every_tensor_is_averaged(sizes, share, size, exchange):
    """Whatever the sizes and the fragments: no tensor is left out, as torchft's buckets do."""
    fragments = 1 + int(share * (len(sizes) - 1))

    def script(rank):
        model = nn.ParameterList([nn.Parameter(torch.zeros(num)) for num in sizes])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        local = LocalUpdates(
            *(model, optimizer, 1),
            outer_lr=1.0,
            outer_momentum=0.0,
            nesterov=False,
            fragments=fragments,
            exchange=exchange,
        )
        for number, parameter in enumerate(model):
            parameter.grad = torch.full_like(parameter, -(rank + 1.0) * (number + 1))
        optimizer.step()
        assert len(local._rounds) == fragments
        assert sum(each.fragment.num_elements for each in local._rounds) == sum(sizes)
        return list(model)

    mean = sum(range(1, size + 1)) / size
    with pytest.MonkeyPatch.context() as patch:
        all_of_them = Replicas(patch).run(size, script)
    for found in all_of_them:
        for number, parameter in enumerate(found):
            torch.testing.assert_close(
                parameter.detach(),
                torch.full((sizes[number],), mean * (number + 1)),
                rtol=0.01,
                atol=0,
            )


@pytest.mark.parametrize("small", [[0.3, 0.3, 0.3], [1.0, 0.0, 0.0]])
def test_what_int8_rounds_off_is_sent_later(replicas, small):
    """Beside 127, either too small to be sent, or so after it was averaged."""
    rounds = 9

    def script(rank):
        model = nn.ParameterList([nn.Parameter(torch.zeros(2))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
        LocalUpdates(model, optimizer, 1, exchange="int8", **plain)
        for _ in range(rounds):
            model[0].grad = torch.tensor([-127.0, -small[rank]])
            optimizer.step()
        return model[0].detach()

    for found in replicas.run(3, script):
        assert found[0] == pytest.approx(127 * rounds, rel=1e-3)
        assert found[1] == pytest.approx(sum(small) / 3 * rounds, abs=1.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_averaged_in_fp32_and_rounded_once(replicas, dtype):
    def script(rank):
        model = nn.Linear(4, 2).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        LocalUpdates(model, optimizer, 1, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
        before = model.weight.detach().clone()
        model.weight.grad = torch.full_like(model.weight, rank / 8)
        model.bias.grad = torch.zeros_like(model.bias)
        optimizer.step()
        return before, model.weight.detach()

    (before, one), (_, other) = replicas.run(2, script)
    assert one.equal(other)
    local = [(before - before.new_full((), rank / 8)).float() for rank in range(2)]
    deltas = [before.float() - each for each in local]
    assert one.equal((before.float() - (deltas[0] + deltas[1]) / 2).to(dtype))


def test_fragments_by_name_and_their_phases(replicas):
    case = {"every": 6, "fragments": [["0", "3"], ["2.weight"], ["2.bias"]]}

    def script(rank):
        model, optimizer = build()
        local = LocalUpdates(model, optimizer, **case)
        moved, before = [], [each.anchor.clone() for each in local._rounds]
        for step in range(13):
            train(model, optimizer, rank, step)
            if not step:  # the anchor is there from the first step on
                before = [each.anchor.clone() for each in local._rounds]
            for number, each in enumerate(local._rounds):
                if not each.anchor.equal(before[number]):
                    moved.append((step + 1, number))
                    before[number] = each.anchor.clone()
        return [each.fragment.names for each in local._rounds], moved

    for names, moved in replicas.run(2, script):
        assert names[0] == ("0.weight", "0.bias", "3.weight", "3.bias")
        assert moved == [(2, 1), (4, 2), (6, 0), (8, 1), (10, 2), (12, 0)]


@pytest.mark.parametrize("name", ["DiLoCo", "streaming", "streaming int8"])
def test_sync_makes_all_alike_once(replicas, name):
    def script(rank):
        model, optimizer = build()
        local = LocalUpdates(model, optimizer, **CASES[name])
        local.sync()  # before the first step there is nothing to exchange
        for step in range(11):
            train(model, optimizer, rank, step)
        local.sync()
        first = copy.deepcopy(model.state_dict()), copy.deepcopy(local.state_dict())
        local.sync()
        assert same(dict(first[0]), dict(model.state_dict()))
        train(model, optimizer, rank, 11)
        return first

    (model, local), *others = replicas.run(3, script)
    assert all(same(dict(model), dict(other)) for other, _ in others)
    assert same(torch.cat([one.view(-1) for one in model.values()]), torch.cat(local["anchor"]))


def saved_by(replicas, size, case, steps):
    return [each[-1] for each in states(replicas, size, case, steps)]


@pytest.mark.parametrize("name", ["DiLoCo", "streaming", "streaming int8"])
@pytest.mark.parametrize(("before", "now"), [(3, 2), (2, 3), (3, 1)])
def test_another_number_of_replicas_closes_the_round(replicas, name, before, now, capsys):
    """Those that have their own parameters are averaged; newcomers take the anchor."""
    case, steps = CASES[name], 7
    saved = saved_by(replicas, before, case, steps)

    def script(rank):
        model, optimizer = build(5)
        local = LocalUpdates(model, optimizer, **case)
        load(saved[rank] if rank < before else saved[0], model, optimizer, local)
        found = copy.deepcopy(model.state_dict())
        speed = torch.cat(local.state_dict()["momentum"]).clone()
        for step in range(steps, 11):
            train(model, optimizer, rank, step)
        return dict(found), speed, local.closed, local.local_step

    stayed = min(before, now)
    old = [torch.load(io.BytesIO(one)) for one in saved[:stayed]]
    anchor, speed = (torch.cat(old[0]["local"][key]) for key in ("anchor", "momentum"))
    flat = [torch.cat([value.view(-1) for value in one["model"].values()]) for one in old]
    mean = anchor - flat[0]
    for each in flat[1:]:
        mean = mean + (anchor - each)
    wanted = anchor - mean / stayed  # and no outer step: it was no round
    done = replicas.run(now, script)
    for found, kept, closed, local_step in done:
        assert kept.equal(speed)
        assert torch.cat([value.view(-1) for value in found.values()]).equal(wanted)
        assert closed == {
            "local_step": steps,
            "from_replicas": before,
            "replicas": now,
            "averaged": list(range(stayed)),
        }
        assert local_step == 11
    assert f"{now} replicas in place of {before}" in capsys.readouterr().err


PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}


def parts_of(local):
    state = local.state_dict()
    return copy.deepcopy({name: state[name] for name in ("anchor", "momentum", "own")})


@pytest.mark.parametrize("name", ["DiLoCo", "int8", "all but given up"])
def test_sync_right_behind_a_round_moves_nothing(replicas, name):
    def script(rank):
        model, optimizer = build()
        local = LocalUpdates(model, optimizer, **CASES[name])
        for step in range(8):
            train(model, optimizer, rank, step)
        if local._overlap:  # which is what ends the overlap
            local._apply(local._rounds[0])
        before = copy.deepcopy(model.state_dict()), parts_of(local)
        local.sync()
        return before, (copy.deepcopy(model.state_dict()), parts_of(local))

    for before, behind in replicas.run(3, script):
        assert same(dict(before[0]), dict(behind[0]))
        assert same(before[1], behind[1])
        assert before[1]["momentum"][0].abs().max() > 0


def test_sync_within_a_round_is_the_mean_and_no_outer_step(replicas):
    def script(rank):
        model, optimizer = build()
        local = LocalUpdates(model, optimizer, 4)
        for step in range(6):
            train(model, optimizer, rank, step)
        before = copy.deepcopy(model.state_dict()), parts_of(local)
        local.sync()
        behind = parts_of(local)
        for step in range(6, 8):  # the round's end, of two steps
            train(model, optimizer, rank, step)
        return before, copy.deepcopy(model.state_dict()), behind, local.local_step

    done = replicas.run(3, script)
    flat = [torch.cat([one.view(-1) for one in before[0].values()]) for before, *_ in done]
    anchor, speed = (done[0][0][1][key][0] for key in ("anchor", "momentum"))
    total = (anchor - flat[0]) + (anchor - flat[1]) + (anchor - flat[2])
    wanted = anchor - total / 3
    torch.testing.assert_close(wanted, (flat[0] + flat[1] + flat[2]) / 3)
    for _, model, behind, _ in done:
        assert behind["anchor"][0].equal(wanted)
        assert behind["momentum"][0].equal(speed)
        assert same(dict(model), dict(done[0][1]))


def test_another_number_of_replicas_right_behind_a_round_moves_nothing(replicas):
    case = CASES["DiLoCo"]
    saved = saved_by(replicas, 3, case, 8)

    def script(rank):
        model, optimizer = build(5)
        local = LocalUpdates(model, optimizer, **case)
        load(saved[rank], model, optimizer, local)
        return copy.deepcopy(model.state_dict()), parts_of(local), local.closed["averaged"]

    old = torch.load(io.BytesIO(saved[0]))
    for model, parts, averaged in replicas.run(2, script):
        assert same(dict(model), dict(old["model"]))
        assert same(parts["momentum"], old["local"]["momentum"])
        assert not averaged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outer_steps_below_half_a_place_add_up(replicas, dtype):
    rounds = 12

    def script(rank):
        model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=dtype))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        local = LocalUpdates(model, optimizer, 1, **{**PLAIN, "outer_lr": 0.25})
        place = torch.finfo(dtype).eps
        for _ in range(rounds):
            model[0].grad = torch.full_like(model[0], -place)
            optimizer.step()
        return model[0].detach(), local.state_dict()["anchor"][0], place

    for parameter, anchor, place in replicas.run(2, script):
        wanted = torch.full((3,), 1 + rounds * place / 4)
        assert anchor.equal(wanted)
        assert parameter.equal(wanted.to(dtype))


def test_sync_sends_what_int8_has_held_back(replicas):
    """Of what each replica sent, and of the means."""
    rounds, small = 3, [1.0, 0.0, 0.0]

    def script(rank):
        model = nn.ParameterList([nn.Parameter(torch.zeros(600))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        local = LocalUpdates(model, optimizer, 2, exchange="int8", **PLAIN)
        made = torch.full((600,), small[rank])
        made[::256] = 127.0
        for _ in range(2 * rounds + 1):
            model[0].grad = -made
            optimizer.step()
        local.sync()
        return model[0].detach()

    for found in replicas.run(3, script):
        wanted = torch.full((600,), (2 * rounds + 1) / 3)
        wanted[::256] = 127.0 * (2 * rounds + 1)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_weights_that_are_loaded_later_are_the_anchor(replicas):
    def script(rank):
        model, optimizer = build()
        local = LocalUpdates(model, optimizer, 2)
        model.load_state_dict(build(9)[0].state_dict())
        train(model, optimizer, rank, 0)
        return local.state_dict()["anchor"]

    (one,), (other,) = replicas.run(2, script)
    wanted = torch.cat([value.view(-1) for value in build(9)[0].state_dict().values()])
    assert one.equal(other)
    assert one.equal(wanted)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 2.0}, "every=2.0"),
        ({"every": True}, "every=True"),
        ({"overlap": 4}, "below every=4"),
        ({"overlap": -1}, "overlap=-1"),
        ({"overlap": 1, "alpha": 1.1}, "alpha=1.1"),
        ({"overlap": 1, "alpha": -0.1}, "alpha=-0.1"),
        ({"overlap": 1, "alpha": float("nan")}, "alpha=nan"),
        ({"alpha": 0.5}, "overlap is 0"),
        ({"outer_lr": 0}, "outer_lr=0"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"exchange": "fp4"}, 'exchange=\'fp4\' is not known; write "fp32" or "int8"'),
        ({"bandwidth": 0}, "bandwidth=0"),
        ({"bandwidth": "1 MB"}, "bandwidth='1 MB'"),
        ({"fragments": 0}, "fragments=0 cannot be"),
        ({"fragments": 7}, "6 trained tensors"),
        ({"fragments": [["0"], ["2"]]}, "do not cover 3.weight"),
        ({"fragments": [["0", "2", "3"], ["2.bias"]]}, "2.bias is in fragments 0 and 1"),
        ({"fragments": [["0", "2", "3"], ["4"]]}, "fragment 1 (4) has none"),
        ({"fragments": ["0", "2", "3"]}, "for each fragment a list of names"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(replicas, given, words):
    replicas.alone()
    with pytest.raises(ConfigError) as caught:
        LocalUpdates(*build(), **{"every": 4, **given})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def refused(model, optimizer):
    with pytest.raises(ConfigError) as caught:
        LocalUpdates(model, optimizer, 4)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_models_and_optimizers_that_cannot_be(replicas):
    replicas.alone()
    model, optimizer = build()
    assert "is not the model's" in refused(nn.Linear(2, 2), optimizer)
    assert "give the torch.optim.Optimizer" in refused(model, model)
    assert "give a torch.nn.Module" in refused(optimizer, optimizer)
    frozen = build()
    frozen[0].requires_grad_(False)
    assert "no parameter that requires a gradient" in refused(*frozen)
    wide = nn.Linear(2, 2, dtype=torch.float64)
    assert "weight is of torch.float64" in refused(wide, torch.optim.SGD(wide.parameters()))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"every": 5}, "every: 4 and 5"),
        ({"fragments": 2}, "number of fragments: 1 and 2"),
        ({"exchange": "int8"}, "exchange: fp32 and int8"),
        ({"outer_lr": 0.4}, "outer_lr: 0.7 and 0.4"),
    ],
)
def test_replicas_that_are_not_alike_are_told_at_the_beginning(replicas, changed, words):
    def script(rank):
        LocalUpdates(*build(), **{"every": 4, **(changed if rank == 2 else {})})

    with pytest.raises(ConfigError, match=f"rank 0 and rank 2 differ in {words}"):
        replicas.run(3, script)


def test_other_shapes_on_another_replica(replicas):
    def script(rank):
        model = nn.Linear(2, 2 + rank)
        LocalUpdates(model, torch.optim.SGD(model.parameters()), 4)

    with pytest.raises(ConfigError, match="names, shapes or dtypes of the parameters"):
        replicas.run(2, script)


def test_a_replica_that_was_changed_by_itself_is_found(replicas):
    def script(rank):
        model, optimizer = build()
        LocalUpdates(model, optimizer, 4)
        if rank:
            nn.init.zeros_(model[0].bias)
        train(model, optimizer, rank, 0)

    with pytest.raises(ConfigError, match="replicas 0 and 1 differ before their first step"):
        replicas.run(2, script)


def stopped(replicas, size, script):
    with pytest.raises(ConfigError) as caught:
        replicas.run(size, script)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("overlap", [0, 1])
def test_replicas_with_other_numbers_of_steps_are_named(replicas, overlap):
    """As a gradient scaler, or batches that end sooner, make them."""

    def script(rank):
        model, optimizer = build()
        local = LocalUpdates(model, optimizer, 4, fragments=2, overlap=overlap)
        for step in range(9 - (rank == 1)):
            train(model, optimizer, rank, step)
        local.sync()

    told = stopped(replicas, 3, script)
    assert "replica 1 is in sync() behind its step 8" in told
    assert "replica 0 is in sync() behind its step 9" in told


def test_a_replica_that_has_ended_meets_a_round_of_the_others(replicas):
    def script(rank):
        model, optimizer = build()
        local = LocalUpdates(model, optimizer, 4)
        for step in range(8 if rank else 7):
            train(model, optimizer, rank, step)
        local.sync()

    told = stopped(replicas, 3, script)
    assert "replica 0 is in sync() behind its step 7" in told
    assert "exchanges fragment 0 behind its step 8" in told


def test_what_is_trained_later_is_refused_at_the_next_exchange(replicas):
    def later(change, *, frozen=()):
        def script(rank):
            model, optimizer = build()
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
            LocalUpdates(model, optimizer, 3)
            train(model, optimizer, rank, 0)
            change(model, optimizer)
            train(model, optimizer, rank, 1)
            train(model, optimizer, rank, 2)

        return stopped(replicas, 2, script)

    thawed = later(lambda model, _: model.requires_grad_(True), frozen=["2.bias"])
    assert "2.bias requires a gradient now" in thawed
    frozen = later(lambda model, _: model[0].bias.requires_grad_(False))
    assert "0.bias does not require a gradient any more" in frozen
    other = {"params": [nn.Parameter(torch.zeros(2, 9))]}
    added = later(lambda _, optimizer: optimizer.add_param_group(other))
    assert "shape [2, 9] that is not the model's" in added


def test_an_optimizer_has_one_of_them(replicas):
    replicas.alone()
    model, optimizer = build()
    LocalUpdates(model, optimizer, 4)
    assert "counted by an outlast.LocalUpdates already" in refused(model, optimizer)
    LocalUpdates(model, torch.optim.SGD(model.parameters()), 4)


def test_replicas_of_several_ranks_resume_where_they_were(replicas):
    replicas.alone()
    state = LocalUpdates(*build(), 4).state_dict()
    four = {"rank": 2, "world_size": 4, "replicas": [0, 2]}
    eight = {"rank": 2, "world_size": 8, "replicas": [2, 6]}
    for then, now in ((four, eight), (four, {**four, "replicas": [2, 3]}), (four, None)):
        local = LocalUpdates(*build(), 4)
        local._place = now or local._place
        with pytest.raises(StateMismatch, match="resume on the same ranks") as no:
            local.load_state_dict({**state, "place": then})
        assert "\n" not in str(no.value)
    local = LocalUpdates(*build(), 4)
    local._place = dict(four)
    local.load_state_dict({**state, "place": four})


@pytest.mark.parametrize(
    ("now", "words"),
    [({"fragments": 2}, "fragments, or parameters"), ({"exchange": "int8"}, "other exchange")],
)
def test_a_state_of_another_layout_is_refused(replicas, now, words):
    replicas.alone()
    state = LocalUpdates(*build(), 4).state_dict()
    with pytest.raises(StateMismatch, match=words):
        LocalUpdates(*build(), 4, **now).load_state_dict(state)
