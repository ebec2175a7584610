"""What the processes of one attempt share: workers among themselves, and with their agents.

``link``       messages and keys, over the attempt's own store
``agreement``  all ranks act at the same step, without a collective
``beat``       a worker's newest step, readable after its death
``own``        what only one rank knows, readable after its death
``line``       what an agent and a worker say to each other that may live through an attempt's end
``over``       whether the attempt is over, for whoever waits inside of such a worker
``trackers``   a run that was continued is one run for W&B, MLflow and TensorBoard too

What can go wrong: the store goes (ConnectionError: the attempt is over), a rank does not answer
(TimeoutError). Neither is repaired here: the agent forms a new attempt.
"""
