"""A roster in the middle of an attempt, and what its orders say."""

from outlast.policy.membership import Form, MembershipRules, Roster, StopWorkers


def roster_of(names="abc", *, min_nodes=1, max_nodes=8, **more):
    """A roster whose machines are all in a running attempt, at 100 s."""
    roster = Roster(
        MembershipRules(min_nodes=min_nodes, max_nodes=max_nodes), 0.0, first=names[0], **more
    )
    orders = []
    for name in names:
        roster.joined(name, 0.0)
        orders += roster.ready(name, 0.0)
    form = formed(orders + roster.tick(99.0))
    assert form.members == tuple(names)
    assert roster.claimed(form, 100.0)
    return roster


def formed_any(orders):
    return [order for order in orders if isinstance(order, Form)]


def formed(orders):
    forms = formed_any(orders)
    assert len(forms) == 1, orders
    return forms[0]


def stops(orders):
    return [order for order in orders if isinstance(order, StopWorkers)]


def all_ready(roster, names, now_s):
    orders = []
    for name in names:
        orders += roster.ready(name, now_s)
    return orders
