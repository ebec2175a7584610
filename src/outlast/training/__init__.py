"""What a training loop holds: ``outlast.session`` and what it needs inside a worker.

``session``    the object itself: steps, log, save
``link``       messages between the workers and agents of one attempt
``agreement``  all ranks act at the same step, without a collective
"""
