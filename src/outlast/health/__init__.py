"""What is wrong with a job, a rank or a machine: found here, acted upon elsewhere.

``doctor``  before a job: whether this machine, and those it works with, are fit
"""
