"""A step on a GPU as one CUDA graph: recorded once, then launched as a whole, without the host between its kernels."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

# Calls of a kind that run eagerly before it is captured: they load and compile its kernels, allocate the workspaces of
# the libraries and the state of the optimizer, none of which may happen while a stream is being captured.
EAGER_CALLS = 3


class CudaGraphs:
    """CUDA graphs of one device. They share one pool of memory, as they are never replayed side by side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, work: Callable[[], Any]) -> Any:
        """Do the work now, on the stream of the captures, in order with what the current stream did and will do."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Record the work without doing it, and wait for that. What is returned does it again, on the same tensors."""
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another one, such as a loader's that pins memory, would end the capture.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
            result = work()

        def replay() -> Any:
            graph.replay()
            return result

        return replay


class CapturedStep:
    """A function of tensors, on the device alone, captured once for each kind of call and replayed from then on.

    A kind is the shapes and dtypes of the tensors given together with the choices; its first `EAGER_CALLS` calls run
    eagerly. As no Python runs at a replay, the function must not look at a number of the device, nor count or decide
    anything on the host that is not in the choices; what it keeps from step to step it changes in place, in tensors
    that were there at the first call; and it sets gradients to None before its backward, so that they come from the
    memory of the graph.
    """

    def __init__(self, function: Callable[..., Any], graphs: CudaGraphs) -> None:
        self._function = function
        self._graphs = graphs
        self._buffers: dict[Hashable, tuple[Tensor, ...]] = {}
        self._eager_calls: Counter[Hashable] = Counter()
        self._replays: dict[Hashable, Callable[[], Any]] = {}

    def __call__(self, *inputs: Tensor, **choices: Hashable) -> Any:
        """Return the function's result, which holds until the next call, of whatever kind; `inputs` are copied."""
        layout = tuple((given.shape, given.dtype) for given in inputs)
        if layout not in self._buffers:  # made here and not inside a capture, whose memory other captures use again
            self._buffers[layout] = tuple(torch.empty_like(given) for given in inputs)
        buffers = self._buffers[layout]
        for buffer, given in zip(buffers, inputs, strict=True):
            buffer.copy_(given)
        kind = (layout, tuple(sorted(choices.items(), key=lambda choice: choice[0])))
        if kind not in self._replays:
            work = functools.partial(self._function, *buffers, **choices)
            if self._eager_calls[kind] < EAGER_CALLS:
                self._eager_calls[kind] += 1
                return self._graphs.run(work)
            self._replays[kind] = self._graphs.capture(work)
        return self._replays[kind]()
