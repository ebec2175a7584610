"""Frameworks that have a training loop of their own: one module for each, imported only there.

Each puts a framework's loop on ``training/driven.py`` and gives it back what it counts; with
Accelerate the loop is the script's own, and goes through ``Session.steps()``. None of them is
imported by Outlast itself, so none of the frameworks has to be installed.

``transformers``           Transformers' Trainer: the callback
``trainer_loop``           what it puts in front of the Trainer's loop and dataloader
``trainer_run``            one call of its ``train()``: session, batches, what the Trainer counts
``trainer_checkpoints``    checkpoints that it has written itself: which are whole
``trainer_export``         a job's checkpoint as one of them, for the Trainer alone
``lightning``              Lightning's Trainer: the callback
``lightning_run``          what it puts in front of Lightning's loops, and what these count
``lightning_checkpoints``  those that Lightning writes itself: whole, and verified
``state_file``             what is in them
``accelerate``             a session over what an Accelerator has prepared
``torchtitan``             torchtitan's trainer: its checkpoint manager
``prepared_loader``        a loader that it has prepared, with a place that is saved
"""
