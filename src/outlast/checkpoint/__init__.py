"""A training state as files that can be checked: written, committed, verified, read back.

``tree``       nested state ↔ small state as data, and named tensors
``optimizers`` an optimizer's state under its parameters' names
``snapshot``   a consistent copy of the tensors in this process's memory
``shard``      one rank's safetensors file
``manifest``   what a checkpoint consists of; writing it is the commit
``save``       the order of a save, across ranks
``load``       verifying and reading
``catalog``    which steps there are, and which may go

Guarantees: a checkpoint exists if and only if its manifest is whole and verifies; every byte that
is loaded was hashed first; no pickle is read or written.
What can go wrong: the storage fails (OSError, as it came), a checkpoint does not verify
(CheckpointInvalid, naming the file).
Rejected: torch.save and DCP's own files (pickle, no checksums); a rename of a whole directory as
the commit (object stores have no rename).
"""
