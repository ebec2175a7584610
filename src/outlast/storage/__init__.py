"""Places that hold files: one protocol, a directory behind it."""
