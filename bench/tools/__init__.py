"""Tools of the repository, left out of the wheel: the kernels without a GPU, and the first minutes of one."""
