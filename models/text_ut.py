"""UT for text: the unrolled transformer of Yang, Huang and Wipf as a classifier of texts (docs/ops.md §3)."""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.checks import InputError, check_integer
from cdt_fast.models.pretrained import PretrainedModel
from cdt_fast.ops import common


class TextUT(PretrainedModel):
    """A classifier of texts whose every layer refines the tokens, and whose every depth is read by one linear layer.

        Z = Y Wᵀ,   A = softmax_rows(β Z Zᵀ),   Y⁺ = A Y,   Y_next = ReLU(Y⁺ W_f + Y),   W_f = −½(V + Vᵀ)

    The readout of a depth is `mean over the tokens of Y_l`, through the head that all depths share. Padding takes part
    neither in the attention nor in the mean. There are no positions: the order of the tokens does not matter.

    Args:
        embedding: `(vocabulary, width)` of new word embeddings, which start as N(0, 1/width); or a tensor
            `[vocabulary, width]` of pretrained ones, which is copied.
        classes: number of classes, ≥ 1.
        layers: L ≥ 1.
        width: d, the width of the tokens; where it is not that of the embeddings a linear map (without a bias) brings
            them to it. None: the width of the embeddings.
        tied: one W and V for all layers, else one a layer.
        scale: β of the attention.

    Attributes:
        embedding: `nn.Embedding`, `[vocabulary, width of the embeddings]`; `get_input_embeddings()` is the same.
        projection: `nn.Linear` to d, or None.
        attention_weight: W, parameter `[d, d]` if tied, else `[layers, d, d]`; Xavier initialization.
        feedforward_weight: V, parameter `[d, d]` if tied, else `[layers, d, d]`; Xavier initialization.
        head: `nn.Linear` from d to the classes; Xavier initialization, no bias at the start.

    InputError: an argument is out of its range, or the embeddings are of an unknown kind.
    """

    ARGUMENTS = ("classes", "layers", "width", "tied", "scale")

    def __init__(
        self,
        embedding: Sequence[int] | Tensor,
        classes: int,
        layers: int,
        *,
        width: int | None = None,
        tied: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.classes = check_integer("classes", classes, 1)
        self.layers = check_integer("layers", layers, 1)
        self.embedding = _embedding(embedding)
        self.tied = bool(tied)
        self.width = self.embedding.embedding_dim if width is None else check_integer("width", width, 1)
        self.scale = common.check_factor("scale", scale)
        # Everything that is new has the dtype of the embeddings, so that bfloat16 ones of a pretrained model fit.
        dtype = self.embedding.weight.dtype
        source = self.embedding.embedding_dim
        self.projection = None if self.width == source else nn.Linear(source, self.width, bias=False, dtype=dtype)
        shape = (self.width, self.width) if tied else (self.layers, self.width, self.width)
        self.attention_weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.feedforward_weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.head = nn.Linear(self.width, self.classes, dtype=dtype)
        matrices = [self.head.weight, *([] if self.projection is None else [self.projection.weight])]
        for weight in (self.attention_weight, self.feedforward_weight):
            # One matrix at a time: the fans of a stack would count the layers in.
            matrices += [weight] if tied else weight.unbind()
        with torch.no_grad():
            for matrix in matrices:
                nn.init.xavier_uniform_(matrix)
            self.head.bias.zero_()

    @property
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the size of the embeddings, whose values are among the weights."""
        return {"embedding": [self.embedding.num_embeddings, self.embedding.embedding_dim], **super().config}

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the word embeddings, under the name that transformers' models have for them."""
        return self.embedding

    def forward(self, tokens: Tensor, depth: int | None = None, *, lengths: Tensor | None = None) -> Tensor:
        """Return the logits `[..., classes]` after `depth` layers (None: all of them); later layers cost nothing.

        Args:
            tokens: token ids `[..., T]`, int32 or int64.
            depth: 0..L; 0 reads the tokens as they go into layer 1.
            lengths: `[...]` integers, the tokens of each text, the rest being padding on its right.

        InputError: a wrong shape, dtype or device; `depth` not in 0..layers; on the CPU an id outside the vocabulary,
        or a text without tokens (which is read as zeros on a GPU, without a host sync).
        """
        depth = self.layers if depth is None else check_integer("depth", depth, 0, self.layers)
        (states,) = deque(self._depths(tokens, depth, lengths), maxlen=1)
        return self.head(states())

    def depth_logits(self, tokens: Tensor, *, lengths: Tensor | None = None) -> list[Tensor]:
        """Return the logits of all depths 0..L, L+1 tensors `[..., classes]`; arguments and errors as `forward`."""
        return [self.head(states()) for states in self._depths(tokens, self.layers, lengths)]

    def layer_losses(
        self, tokens: Tensor, labels: Tensor, depth_weights: common.Weights = None, *, lengths: Tensor | None = None
    ) -> common.LayerwiseLosses:
        """Return the cross-entropies of all depths in nats, and their weighted sum.

        See `ops.layerwise_cross_entropy` for what is differentiable, `forward` for the tokens. Labels are `[...]` int64
        in [0, classes), or −100 for a text that does not count. Used as
        `total, per_depth = model.layer_losses(ids, labels, constraints.weights(), lengths=lengths)`.

        InputError: as `forward`; `labels` or `depth_weights` have a wrong shape or dtype; on the CPU a label outside
        the classes; the head has an adapter, or a forward of its own.
        """
        # These bring torch's compiler, seconds that denoising a video need not wait for.
        from cdt_fast.models.layer_losses.layout import in_use, weight_and_bias
        from cdt_fast.models.layer_losses.wrapping import replaced_forward

        states = [states() for states in self._depths(tokens, self.layers, lengths)]
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
            raise InputError(f"labels must be an int64 tensor with one class a text, got {common.describe(labels)}")
        common.check_shape("labels", labels, tuple(states[0].shape[:-1]), "one class a text")
        head: Any = in_use(self.head)

        def losses(states: list[Tensor]) -> common.LayerwiseLosses:
            weight, bias = weight_and_bias(head)
            return ops.layerwise_cross_entropy(states, weight, labels, bias, depth_weights=depth_weights)

        if not head._forward_pre_hooks:
            return losses(states)
        with replaced_forward(head, losses):  # pruning and weight_norm make the weight anew at a call
            return head(states)

    def _depths(self, tokens: Tensor, depth: int, lengths: Tensor | None) -> Iterator[Callable[[], Tensor]]:
        """Yield the states of every depth, pooled only when called."""
        states = self._embed(tokens, lengths)
        pooling = _pooling(states, lengths)
        attention, feedforward = (
            [parameter] * self.layers if self.tied else parameter.unbind()
            for parameter in (self.attention_weight, self.feedforward_weight)
        )
        yield functools.partial(_pooled, states, pooling)
        for w, v in zip(attention[:depth], feedforward[:depth], strict=True):
            mixed = ops.symmetric_attention(states @ w.mT, states, scale=self.scale, lengths=lengths)
            # Under autocast the attention's output has its dtype, and so has all that follows.
            states = ops.residual_linear(mixed, -0.5 * (v + v.mT), states, nonlinearity="relu")
            yield functools.partial(_pooled, states, pooling)

    def _embed(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the input of layer 1 `[..., T, d]`; the word embeddings are zero at padding."""
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64) or tokens.dim() < 1:
            raise InputError(f"tokens must be ids [..., T] (int32 or int64), got {common.describe(tokens)}")
        longest, words = tokens.shape[-1], self.embedding.num_embeddings
        if longest == 0:
            raise InputError(f"tokens must hold at least one token a text, got shape {tuple(tokens.shape)}")
        if tokens.device != self.embedding.weight.device:
            raise InputError(f"tokens is on {tokens.device} but the model is on {self.embedding.weight.device}")
        _check_range(tokens, 0, words - 1, f"tokens holds the id {{number}}, outside the vocabulary of {words}")
        states = self.embedding(tokens)
        common.check_lengths(lengths, states)
        if lengths is not None:
            _check_range(lengths, 1, longest, "lengths must be from 1 to the {most} tokens of a text, got {number}")
        # Before the projections: what stands at padding (NaN too) would reach their weights' gradients.
        states = common.without_padding(states, common.padding_mask(lengths, states))
        return states if self.projection is None else self.projection(states)


def _check_range(numbers: Tensor, least: int, most: int, message: str) -> None:
    """Require integers within a range on the CPU (a GPU would be waited for, and a traced graph cannot look);
    `message` has places for a wrong number and for `most`, which as text would be a constant of the compiler's."""
    if numbers.device.type == "cpu" and common.is_plain_eager(numbers) and numbers.numel():
        for number in (int(numbers.min()), int(numbers.max())):
            if not least <= number <= most:
                raise InputError(message.format(number=number, most=most))


def _pooled(states: Tensor, pooling: Tensor | None) -> Tensor:
    """Return the mean of states `[..., T, d]` over the tokens that count, `[..., d]`."""
    if pooling is None:
        return states.mean(-2)
    # A product and no masked copy: the states are finite at padding too.
    return (pooling.to(states.dtype) @ states).squeeze(-2)


def _pooling(states: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Return `[..., 1, T]`: 1/length at the tokens that count, 0 at padding."""
    padding = common.padding_mask(lengths, states)
    if padding is None or lengths is None:
        return None
    counts = lengths.clamp(min=1).to(torch.float64 if states.dtype == torch.float64 else torch.float32)
    return ((~padding) / counts.unsqueeze(-1)).unsqueeze(-2)


def _embedding(given: Any) -> nn.Embedding:
    """Make new word embeddings, or a copy of those that are given."""
    if isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 2 and given.numel():
        return nn.Embedding.from_pretrained(given.detach().clone().contiguous(), freeze=False)
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        expected = "(vocabulary, width) or a floating-point tensor [vocabulary, width]"
        raise InputError(f"embedding must be {expected}, got {common.describe(given)}")
    vocabulary = check_integer("embedding[0], the vocabulary,", given[0], 1)
    width = check_integer("embedding[1], the width,", given[1], 1)
    embedding = nn.Embedding(vocabulary, width)
    # Tokens of norm one: from torch's N(0, 1) the attention would be the identity from the start.
    nn.init.normal_(embedding.weight, std=width**-0.5)
    return embedding
