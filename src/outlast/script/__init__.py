"""What is found of the user's script: where its loops are, and what state its objects have.

``callsite``    which loop of the script calls, what counts there, and which epoch it is in
``excepthook``  errors as one line, with the right exit code
``loop_names``  what its loops set and fill, and whether other code of it reads that
``hyper``       what the script sets, what the checkpoint sets, and which of them counts
``objects``     the named objects as one state tree, and what is saved of it
``modules``     those that take their state back in a way of their own
``gradients``   whether gradients are in the making at a boundary
``restore``     what one rank takes from a checkpoint
``initial``     a new job's first state, out of what somebody has written
``unnamed``     what is at work, or changes, and is in no checkpoint

Nothing here knows of a session or its keeper. Where ranks must decide alike (``initial``,
``excepthook``) they are given the attempt's link.
"""
