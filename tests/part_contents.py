"""A rank's part as a worker that is none says it, in the tests of both floors."""

from outlast.checkpoint.manifest import PLAIN, Contents, Holding, Slab, num_elements


def contents_of(tensors):
    """What a rank says that it wrote, of its entries' chunks, where it knows of no other rank."""
    held = {
        name: Holding(
            entry.dtype,
            entry.shape,
            PLAIN,
            tuple(Slab(chunk.offsets, chunk.shape, chunk.start) for chunk in entry.chunks),
        )
        for name, entry in tensors.items()
    }
    return Contents(tensors=held, num_elements=num_elements(held))
