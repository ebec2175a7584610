"""Decisions as small pure objects: facts and times come in as arguments, a decision comes out.

``cadence``   when the next checkpoint is due
``retention`` which checkpoints may go
``restart``   whether a failed attempt is worth another
"""
