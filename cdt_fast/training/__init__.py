"""Training: the primal-dual loop, its step, and what one run of it needs of the machine."""
