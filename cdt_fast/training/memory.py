"""What to say when the memory does not suffice."""

from __future__ import annotations

from cdt_fast.training.settings import RunSettings

# How torch's allocator of the CPU, which has no error of its own, and some libraries of CUDA put it.
_WORDS = ("can't allocate memory", "out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the host or of the device did not suffice."""
    import torch  # here, as the command line asks for the hint and must not wait for torch before its help is shown

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def memory_hint(settings: RunSettings) -> str:
    """The end of a message: the setting that halves what a step needs, with its value."""
    batch, accumulate = settings.training.batch, settings.training.accumulate
    if batch > 1:
        return f"; train with --batch {batch // 2} --accumulate {2 * accumulate}, which needs half as much" + (
            "" if batch % 2 else " for the same steps"
        )
    name, value, least = settings.sample_length
    option = f"--{name.replace('_', '-')} {max(least, value // 2)}"
    return f"; train with {option}, which needs half as much (--batch is 1)"
