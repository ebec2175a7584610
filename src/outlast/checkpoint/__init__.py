"""State tree, shard files, manifest, commit, verify, restore."""
