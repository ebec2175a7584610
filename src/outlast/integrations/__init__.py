"""Frameworks that have a training loop of their own: one module for each, imported only there.

Each puts a framework's loop on ``training/driven.py`` and gives it back what it counts; with
Accelerate the loop is the script's own, and goes through ``Session.steps()``. None of them is
imported by Outlast itself, so none of the frameworks has to be installed.

``transformers``         Transformers' Trainer: the callback, and the Trainer's loop under it
``trainer_run``          one call of its ``train()``: session, batches, what the Trainer counts
``trainer_checkpoints``  checkpoints that it has written itself: which are whole
``trainer_export``       a job's checkpoint as one of them, for the Trainer alone
``lightning``            Lightning's Trainer
``lightning_checkpoints``  those that it writes itself: whole, and verified
``state_file``           what is in them
``accelerate``           a session over what an Accelerator has prepared
``prepared_loader``      a loader that it has prepared, with a place that is saved
"""
