"""What the processes of one attempt share: workers among themselves, and with their agents.

``link``       messages and keys, over the attempt's own store
``agreement``  all ranks act at the same step, without a collective
``beat``       a worker's newest step, readable after its death
``trackers``   a run that was continued is one run for W&B, MLflow and TensorBoard too

What can go wrong: the store goes (ConnectionError: the attempt is over), a rank does not answer
(TimeoutError). Neither is repaired here: the agent forms a new attempt.
"""
