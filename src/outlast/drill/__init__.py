"""The drill: a job is broken on purpose, and it is proved what that changed.

``demo``             two runs, three faults, one comparison
``demo_train``       the training script of both runs
``demo_faults``      what the demo does to the running job: kills and a notice
``digests``          digests of whatever a script holds, by which runs are compared
``inside``           starts in each worker of a job under test, and runs its script
``metadata_server``  EC2's metadata service on loopback; the base of such servers in the tests
``record``           what a worker consumed and computed, step by step: its format, and reading it
``recorder``         sees each step from inside the process, whatever kind of script it is
``target``           a job under test as a fault sees it, and the orders that a worker obeys
``trace``            what the demo's runs consumed and computed, step by step
"""
