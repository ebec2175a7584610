"""The processes of one attempt: how workers reach each other and their agents, and their groups.

Between processes:

``link``       messages and keys over the attempt's own store; all ranks act at the same step
``beat``       a worker's newest step, and what only one rank knows, readable after its death
``over``       whether the attempt is over; what agents say of it to workers that live through it

Within a worker:

``groups``     torch's process groups: broken where a loss has them wait, and made again without it
``subgroups``  those of device meshes, likewise
``early``      changes to torch that are made before the script imports it
``trackers``   a run that was continued is one run for W&B, MLflow and TensorBoard too, and has the
               job's incidents and goodput

What can go wrong: the store goes (ConnectionError: the attempt is over), a rank does not answer
(TimeoutError). Neither is repaired here: the agent forms a new attempt.
"""
