"""What a training loop holds: ``outlast.session`` and what it stands on.

A session:

``session``     from what a script names to the object itself: steps, epochs, log, save
``driven``      a loop that a framework runs, in place of steps()
``position``    where the worker is in its data, over all loops
``saving``      what is saved at a boundary, when, and how it ends; saves that were asked for
``afresh``      what a script does outside of its loops counts once
``void_steps``  a loop that had ended hands out a batch once more, for the code behind it
``passage``     from an attempt into the next one, in the process

What it stands on, made anew for each attempt:

``footing``     all that belongs to one attempt: a loop's end, the session's end
``leaving``     what is heard when the machine must go, and the way out
``books``       which attempt this is, and what goes into the ledger
``resume``      the newest checkpoint that verifies on every rank, or what survivors hold
``timing``      what a step's time was spent on
``turns``       when the next checkpoint is due, and in which tiers
``late``        workers that are late: others make their shards, or they are left out
``anomalies``   the loss, judged while the loop goes on

A worker's part in a save:

``engine``      from a state to a committed checkpoint: snapshots, and saves on their way
``each_step``   each completed step kept in two machines' memory, before the next one begins
``sharing``     what it needs before: memory for snapshots, who writes what, the keepers' meeting

Below it, :mod:`outlast.inprocess` (others are lost and this process goes on) and
:mod:`outlast.script` (what is found of the user's script).
"""
