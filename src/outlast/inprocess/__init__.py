"""Where other workers are lost and this process goes on.

``survivor``     the line to the agent
``interrupted``  the step in the making comes to nothing
``divided``      a state that is divided over the workers: who has the same part
``looks``        a step's end: what is looked at and copied there, at each step
``living``       the state at the newest step's end, kept for the next attempt
``handover``     state changes hands: before workers leave together, and after a loss

The way from an attempt into the next one, which puts these together, is the session's
(:mod:`outlast.training.passage`).
"""
