"""Formulas: what failures cost, how often to save, what pays. Pure functions with their units.

``rates``         failures per hour, from probabilities, published figures, or what was seen
``interval``      how often to save: linear, Young, Daly, exact; with lag and with notices
``comparison``    all of these models beside one another, and where the linear one leaves its range
``tiers``         several places to save, each against its own failures
``spot``          the price of a useful hour, and at which rate or discount the choice flips
``budget``        what failures cost in money, and a run without any checkpoint
``flush``         whether the state leaves the machine within the notice
``memory``        bytes of training state, and of its copies in a machine's memory
``zones``         spreading over zones, by how the job recovers
``spares``, ``restarts``  Poisson quantiles and tails
``replicas``      copies in pairs: what is recovered when several machines go
``local_updates`` islands that meet every H steps
``deadline``      spot and on-demand under a deadline: uniform progress
``distributions`` Poisson and gamma without scipy, whose import costs more than all of this

Times are in hours (``_h``) and rates per hour (``_per_h``) unless a name says otherwise. Rates of
failures are λ throughout, never probabilities: :func:`~outlast.plan.rates.from_probability` is the
one place where a percentage becomes a rate.

What can go wrong: a model outside its range. Every formula says where it holds; the exact one is
the one that decides. Arguments are taken as checked (``outlast plan`` does that): rates above 0,
costs from 0. A job that makes no progress takes ``inf`` hours for a useful one; that is an answer.

Failures are taken as independent and exponential here. Where they are not (bathtubs, zones that go
together), :mod:`outlast.simulate` replays them.
"""
