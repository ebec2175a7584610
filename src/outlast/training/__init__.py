"""What a training loop holds: ``outlast.session`` and what it needs inside a worker.

``session``  the object itself: steps, log, save
``rig``      everything it stands on, put together
``objects``  the named objects as one state tree
``resume``   finding the newest checkpoint that verifies on every rank
``engine``   from a state at a boundary to a committed checkpoint
``pending``  what save() returns
"""
