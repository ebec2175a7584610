"""Several machines on one, for tests and benchmarks: the drill's own (see its docstring)."""

from outlast.drill.network import (
    BlackHole,
    Cut,
    FreezeMachine,
    KillMachine,
    Machine,
    Network,
    NetworkError,
    NetworkFault,
    PacketLoss,
    Partition,
    Reset,
    nft,
    reclaim,
    run,
    unusable,
)

__all__ = [
    "BlackHole",
    "Cut",
    "FreezeMachine",
    "KillMachine",
    "Machine",
    "Network",
    "NetworkError",
    "NetworkFault",
    "PacketLoss",
    "Partition",
    "Reset",
    "nft",
    "reclaim",
    "run",
    "unusable",
]
