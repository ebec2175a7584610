"""Whether a machine is fit to train: judgements over what was measured, for the doctor.

``finding``   one finding: what was seen, and what to do about it
``storage``   a tier and the job's directory; the notice against the bandwidth
``machine``   memory, limits, stacks, the platform, GPUs, versions of one machine
``peers``     machines compared with each other: reach, clocks, versions, speeds; who is left out

Guarantees: pure: the same facts give the same findings on every machine, so that each of them knows
alone what all have concluded. A finding that is not ok says what to do. ``failed`` means that the
job should not start; what costs speed, or a convenience, is a ``warning``.

What can go wrong: with two machines nobody can tell which of them is the odd one; both are named.

Rejected: scores (an owner cannot act upon 0.73); limits as settings (a limit that nobody can judge
is no help; what is accepted on purpose is said with the settings that there are, such as
``checkpoint.buffers = 0``).
"""

from outlast.policy.fitness.finding import CheckResult, Status, failures, gigabytes

__all__ = ["CheckResult", "Status", "failures", "gigabytes"]
