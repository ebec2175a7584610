"""A training state as files that can be checked: written, committed, verified, read back.

What a checkpoint is:

``tree``           nested state ↔ small state as data, and named tensors
``optimizers``     an optimizer's state under its parameters' names
``shard``          one rank's safetensors file
``blocks``         a file's bytes and their hashes
``manifest``       what a checkpoint consists of; writing it is the commit
``reshard``        which part of a tensor is whose

A worker's part in writing one (the keeper, above this room, writes, compares and commits):

``plan``           which rank writes what, and where it lies in its file
``flat``           a state flattened again, at a boundary where time is short
``sources``        pieces as they were at the boundary, and how it is seen that they changed
``capture``        the copy into memory, behind the next forward and backward
``streams``        the same from GPUs
``aliases``        who could change them past their counters, and waits until they are copied
``devices``        the GPU that is the rank's, and threads that may touch it

Reading one:

``catalog``        which steps there are, and which may go
``places``         where they may lie, the fastest first
``copies``         one file in all its places: each block from the first where it is right
``destinations``   from wanted tensors to ranges of files
``read``           many blocks at the speed of the disk
``load``           opening, verifying, all of a rank's state
``source``         parts of it, as they are asked for
``paths``          from a path to the places in which checkpoints lie
``foreign``        weights for a new job, in whatever form somebody has written them
``foreign_dcp``    … a directory that ``torch.distributed.checkpoint`` wrote
``transfer``       from place to place, and mending one place from the others

For other programs:

``dcp``            a reader and a writer for ``torch.distributed.checkpoint``
``dcp_reader``     … its reader
``dcp_writer``     … its writer
``export``         a checkpoint as other programs' files, whole or not at all
``export_formats`` … how those lay out what it holds

Guarantees: a checkpoint exists if and only if its manifest is whole and verifies; every byte that
is loaded was hashed first; no pickle is read or written, but where an export is asked for in a
format that is one.
What can go wrong: the storage fails (OSError, as it came), a checkpoint does not verify
(CheckpointInvalid, naming the file), a tensor changes while it is copied (the snapshot is void).
Rejected: torch.save and DCP's own files (pickle, no checksums); a rename of a whole directory as
the commit (object stores have no rename); an exchange of digests between ranks before anything is
written (every rank waited for rank 0, which wrote everything that is replicated).
"""
