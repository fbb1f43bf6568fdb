"""Out into the world: a network as a file of a runtime, proven after it was written."""
