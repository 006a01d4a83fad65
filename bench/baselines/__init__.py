"""Other implementations of the same work; a missing package or GPU is a reason to skip one, not an error."""
