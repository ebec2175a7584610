"""The demo: a job that is killed and given notice, and the proof that nothing changed.

``demo``             two runs, three faults, one comparison
``demo_train``       the training script of both runs
``faults``           what is done to the running job: kills and a notice
``metadata_server``  EC2's metadata service on loopback; the base of such servers in the tests
``trace``            what a run consumed and computed, step by step
"""
