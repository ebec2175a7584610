"""A training state as files that can be checked: written, committed, verified, read back.

What a checkpoint is:

``manifest``       a save's name; what it consists of, as its manifest and the ranks' parts say
``spreads``        how a tensor is spread over ranks, in few words
``tensors``        a tensor: its bytes, its memory, its spread, its inner tensors
``tree``           nested state ↔ small state as data, and named tensors; all ranks' as one
``attributes``     what an optimizer holds besides its ``state_dict``; where generators stand
``optimizers``     an optimizer's state under its parameters' names

A worker's part in writing one (the keeper, above this room, writes, compares and commits):

``plan``           which rank writes what, and where it lies in its file
``capture``        the copy into memory, behind the next forward and backward; changes are noticed
``writers``        what would change a tensor past its version counter waits for the copy
``devices``        the GPU that is the rank's, threads that may touch it, copies from it

Reading one:

``catalog``        which saves there are, whose they are, and which may go
``transfer``       what a save consists of, found in all its places; its blocks read, verified
``chunks``         tensors found in the ranks' parts, which must cover every one
``mend``           files copied to other places, and places mended from each other
``reader``         opening, verifying, a rank's state, boxes of tensors; what is damaged, mended
``foreign``        weights for a new job, in whatever form somebody has written them
``foreign_dcp``    … a directory that ``torch.distributed.checkpoint`` wrote

For other programs:

``dcp``            a reader and a writer for ``torch.distributed.checkpoint``
``export``         a checkpoint as other programs' files, whole or not at all

Guarantees: a checkpoint exists if and only if its manifest is whole and verifies; every byte that
is loaded from it was hashed first; none of its files is a pickle.
Files of others have neither: ``foreign`` reads weights that nothing hashes, out of pickles too, and
runs no code that they name. ``export`` writes a pickle where that format is asked for.
What can go wrong: the storage fails (OSError, as it came), a checkpoint does not verify
(CheckpointInvalid, naming the file), a tensor changes while it is copied (the snapshot is void).
Rejected: torch.save and DCP's own files (pickle, no checksums); a rename of a whole directory as
the commit (object stores have no rename); an exchange of digests between ranks before anything is
written (every rank waited for rank 0, which wrote everything that is replicated).
"""
