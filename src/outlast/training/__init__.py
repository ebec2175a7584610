"""What a training loop holds: ``outlast.session`` and what it needs inside a worker.

A session:

``opening``     from what a script names to a session
``session``     the object itself: steps, epochs, log, save
``callsite``    which loop of the script calls, and what counts there
``position``    where the worker is in its data, over all loops
``epochs``      which epoch of the script's it is
``hyper``       what the script sets, what the checkpoint sets, and which of them counts
``excepthook``  errors as one line, with the right exit code
``unnamed``     what was seen at work and not given to the session
``transient``   tensors that training changes and no checkpoint holds

What it stands on, made anew for each attempt:

``footing``     all that belongs to one attempt
``rig``         the parts of it, put together
``attempts``    which attempt this is, and with what command it was started
``timing``      what a step's time was spent on
``turns``       when the next checkpoint is due, and in which tiers
``judging``     the loss, judged while the loop goes on

State, saved and taken back:

``objects``     the named objects as one state tree
``modules``     how models give and take their state
``gradients``   whether gradients are in the making at a boundary
``lazy``        which tensors only the optimizers change
``bits``        whether a resume will have the same bits
``saving``      what is saved at a boundary, and its commit
``engine``      a worker's part from a state to a committed checkpoint
``flight``      what is saved, how it ends, what is known of it on its way
``sharing``     the ranks agree on who writes what, the keepers find each other
``room``        the memory that snapshots are copied into
``line``        the connection to the keeper
``pending``     what save() returns
``resume``      finding the newest checkpoint that verifies on every rank
``restore``     what one rank takes from a checkpoint
``afresh``      what a script does outside of its loops counts once
``initial``     a new job's first state, out of what somebody has written
``ending``      a loop's end and a session's end
``leaving``     a drain: all ranks leave behind the same step

Where others are lost and this process goes on:

``survivor``    the line to the agent
``interrupted`` the step in the making comes to nothing
``living``      the state at the newest step's end, where it lies
``keeping``     what is done for that at each step
``passage``     from an attempt into the next one
``regain``      who has the state gives it to who has not
``parcel``      small state as bytes
``parting``     a machine that leaves hands over what it alone knows
"""
