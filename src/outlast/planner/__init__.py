"""The questions before renting: formulas asked by people, a simulator, recordings of failures.

``formulas``     budgets, flushes, memory, spares, restarts, replicas, zones: a few lines each
``intervals``    all models of the interval beside one another; the price of a useful hour on spot;
                 several places to save: the additive and the Markov model, and the best schedule
``deadline``     spot and on-demand under a deadline: uniform progress
``links``        what a link between replicas leaves of the time, with local updates and without
``backup``       workers that nobody waits for, and redundancy in the data
``pipelines``    checkpoints, templates and layouts on a fleet that comes and goes
``redundancy``   pipelines whose machines hold their successors' stages
``fleet_modes``  all of these beside one another for one job; when local updates pay
``breakeven``    where one thing is ahead of another, along a quantity of many magnitudes
``traces``       recordings of spot fleets, failures and lifetimes, read
``draws``        failures drawn from a law; the law that recorded times are most likely under
``job``          one run of a job, checkpoint by checkpoint, with the runtime's decisions
``many``         many runs side by side, from failure to failure
``study``        policies compared on the same failures

Times are in hours (``_h``) and rates per hour (``_per_h``) in formulas, seconds (``_s``) in the
simulator. Rates of failures are λ throughout, never probabilities. Formulas take failures as
independent and exponential; where they are not (bathtubs, zones that go together), the simulator
replays them. The formulas on which decisions of a running job stand are in :mod:`outlast.policy`:
``interval`` and ``hazard``.

The simulator models only what surrounds the decisions: how long saves, storage and workers take.
The decisions themselves (:mod:`outlast.policy`) run as they are, on a virtual clock. One is written
a second time: ``many`` has the cadence ``Auto`` in arrays, and a test compares the two.

What can go wrong: a formula outside its range, which it names (the exact model decides); a cost
that is left out. Figures from real processes come first where there are any.
"""
