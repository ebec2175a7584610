"""Machines that come, go and fail on a virtual clock, for the policies of membership.

``parts`` and ``coordinator`` stand for storage, network and the coordinating agent, ``cluster``
puts them together, ``runs`` runs a job on them and counts. The policy objects are the runtime's.
"""
