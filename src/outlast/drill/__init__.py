"""Faults as small objects, scenarios, the verdict.

``demo_train``      the training script of the demo
``faults``          what is done to a running job: kills and notices
``metadata_server`` EC2's metadata service on loopback, and what such servers share
``trace``           what a run consumed and computed, step by step
``demo``            two runs, three faults, one comparison
"""
