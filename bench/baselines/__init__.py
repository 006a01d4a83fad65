"""Other ways to do the same work, a file each; a missing package or GPU is a reason to skip, not an error."""
