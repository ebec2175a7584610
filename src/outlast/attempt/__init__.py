"""What the processes of one attempt share: workers among themselves, and with their agents.

``link``       messages and keys over the attempt's own store; all ranks act at the same step
``beat``       a worker's newest step, and what only one rank knows, readable after its death
``over``       what an agent and a worker say to each other that may live through an attempt's end;
               whether the attempt is over
``groups``     process groups: broken where a loss has them wait, and made again without it
``subgroups``  those of device meshes, likewise
``early``      what a worker has torch do otherwise, before its script imports it
``trackers``   a run that was continued is one run for W&B, MLflow and TensorBoard too

What can go wrong: the store goes (ConnectionError: the attempt is over), a rank does not answer
(TimeoutError). Neither is repaired here: the agent forms a new attempt.
"""
