"""Copies in memory, machines in pairs: what is recovered when k of N go at once.

Each machine of a pair holds the other's snapshot; the state survives unless both of a pair go.
P(recover | k lost) = C(N/2, k)·2^k / C(N, k), for losses anywhere with equal chance (Wang et al.,
GEMINI, SOSP'23). What is not recovered so is read from storage, and the job rewinds to what stands
there; whether copies pay is that time against what copying costs. Machines that fail together (a
rack, a zone) must not be one another's pair: then this is what placement buys, and not less.
"""

from __future__ import annotations


def recovers_in_pairs(num_nodes: int, num_lost: int) -> float:
    """Probability that no pair is lost whole.

    Args:
        num_nodes: N, even.
        num_lost: k, at most N.
    """
    pairs = num_nodes // 2
    if num_lost > pairs:
        return 0.0
    chance = 1.0
    for i in range(num_lost):  # the next one must not be the other half of one that is lost
        chance *= 2 * (pairs - i) / (num_nodes - i)
        if chance == 0:
            break
    return chance


def lost_h(recovers: float, *, pause_h: float, from_storage_h: float) -> float:
    """Hours of the whole job that a loss takes on average.

    Args:
        recovers: probability that the copies are enough.
        pause_h: until the job goes on from them.
        from_storage_h: restore, and half of what lies between two checkpoints there.
    """
    return recovers * pause_h + (1 - recovers) * from_storage_h
