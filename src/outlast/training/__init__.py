"""What a training loop holds: ``outlast.session`` and what it needs inside a worker.

``opening``     from what a script names to a session
``session``     the object itself: steps, log, save
``rig``         everything it stands on, put together
``objects``     the named objects as one state tree
``resume``      finding the newest checkpoint that verifies on every rank
``candidates``  which steps there are to be tried
``restore``     what one rank takes from a checkpoint
``hyper``       what the script sets, what the checkpoint sets, and which of them counts
``initial``     a new job's first state, out of what somebody has written
``matching``    the names of a model beside those that a file offers
``engine``      from a state at a boundary to a committed checkpoint, a worker's part in it
``flight``      what is saved, how it ends, what is known of it on its way
``lazy``        which tensors only the optimizers change
``sharing``     the ranks agree on who writes what
``room``        the memory that snapshots are copied into
``line``        the connection to the keeper
``meeting``     where the keepers of several machines find each other
``pending``     what save() returns
"""
