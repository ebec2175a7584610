"""Loaders that a script iterates itself while a session is open."""

from torch.utils.data import DataLoader

from outlast.data.shield import Cover, ShieldedInit


class Own(DataLoader):
    """Makes its iterators itself, as torchdata's does; here without any process."""

    def _get_iterator(self):
        return iter([self.worker_init_fn])


class OnTop(Own):
    """Made on top of another one, with a loop of its own, as some libraries have it."""

    def __iter__(self):
        yield from super().__iter__()


def init(worker_id):
    del worker_id


def given(loader):
    return next(iter(loader))


def test_loaders_are_covered_while_it_is_open():
    loaders = [kind(range(4), num_workers=2, worker_init_fn=init) for kind in (Own, OnTop)]
    methods = vars(DataLoader)["_get_iterator"], vars(Own)["_get_iterator"]
    cover, inner = Cover(), Cover()
    cover.open()
    inner.open()  # and one within: there is one shield
    for loader in loaders:
        shielded = given(loader)
        assert isinstance(shielded, ShieldedInit)
        assert shielded.user_init is loader.worker_init_fn is init
    assert given(Own(range(4), worker_init_fn=init)) is init  # it starts no process
    assert list(DataLoader(range(4), batch_size=2))[1].tolist() == [2, 3]
    inner.close()
    assert isinstance(given(loaders[0]), ShieldedInit)
    cover.close()
    assert (vars(DataLoader)["_get_iterator"], vars(Own)["_get_iterator"]) == methods
    assert given(loaders[0]) is init


def test_what_somebody_else_put_on_top_stays(monkeypatch):
    cover = Cover()
    monkeypatch.setattr(Own, "_get_iterator", vars(Own)["_get_iterator"])  # put back at the end
    cover.open()
    ours = Own._get_iterator
    theirs = lambda loader: ours(loader)  # noqa: E731, PLW0108 - another function
    Own._get_iterator = theirs
    assert isinstance(given(Own(range(4), num_workers=1)), ShieldedInit)
    cover.close()
    assert Own._get_iterator is theirs
    assert given(Own(range(4), num_workers=1, worker_init_fn=init)) is init
