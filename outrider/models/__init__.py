"""Models by name: which ones there are, where they lie on disk, how they get there."""
