"""Replays failures against the very policy objects that the runtime uses, on a virtual clock.

``clock``       time that costs nothing
``failures``    what goes wrong, and when: published rates, correlated losses, recorded traces
``parts``       what surrounds the decisions: costs, storage, machines
``coordinator`` the role, with the real roster
``cluster``     all of it, around one job's membership
``membership``  scenarios, and what is measured in them

What is modelled is what surrounds the decisions: how long messages, storage and workers take. The
decisions themselves (:class:`~outlast.policy.membership.Roster`, ``Silence``, ``Intake``,
``Seeking``, ``heirs``) are not modelled: they run, and the processor time they take is measured.
What can go wrong: a cost that is left out, or a network that behaves in no way that is modelled
here; figures from real processes come first where there are any.
"""
