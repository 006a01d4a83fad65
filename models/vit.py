"""A vision transformer as a denoiser of frames: every layer's output is read as an image (docs/constraints.md §4)."""

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.checks import InputError, check_choice, check_integer, check_positive, require
from cdt_fast.files import read_json
from cdt_fast.models.pretrained import PretrainedModel
from cdt_fast.models.transformers_weights import load_complete, named_errors
from cdt_fast.ops.common import LayerwiseLosses, Weights, check_shape, check_tensor, check_together

_PIXEL_MEAN = _PIXEL_STD = 0.5  # of the normalization of pixels that transformers' ViTs are trained with
ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
# Arguments, by the names that transformers' ViTConfig has for them.
_CONFIGURED = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}
_CONFIGURED |= {"feedforward_width": "intermediate_size", "activation": "hidden_act"}
_CONFIGURED |= {"bias": "qkv_bias", "epsilon": "layer_norm_eps"}


class DenoisingViT(PretrainedModel):
    """A denoiser of frames cut into patches: a transformers ViT, each of whose depths is read as an image.

        h_0 = [class token, X Eᵀ + e] + positions,   h_l = block_l(h_{l−1}),   x̂_l = LayerNorm(h_l) Wᵀ + b

    The layer norm is the ViT's final one and W `[n, d]` is one readout for all depths; the class token is not read.
    The blocks are those of `transformers.ViTModel`, without dropout.

    Args:
        patch_size: n, pixels of a patch, a square number.
        grid: rows and columns of patches of a frame; a sequence has T = rows · columns tokens, row by row, as
            `to_patches(frames, patch, "space")` cuts them.
        layers: L ≥ 1.
        width: d, a multiple of `heads`.
        heads: attention heads of a block.
        feedforward_width: inner width of a block's feed-forward part; None: 4 d.
        activation: of the feed-forward part: "gelu", "gelu_new", "relu" or "silu".
        bias: queries, keys and values have a bias.
        epsilon: of the layer norms.

    Attributes:
        vit: the `transformers.ViTModel`, of one channel and without a pooler. Its patch embedding is applied as a
            linear map of a patch.
        readout: `nn.Linear` from d to n.

    InputError: an argument out of its range. MissingExtra: transformers is not installed.
    """

    ARGUMENTS = ("patch_size", "grid", *_CONFIGURED)

    def __init__(
        self,
        patch_size: int = 256,
        grid: Sequence[int] = (10, 10),
        layers: int = 6,
        *,
        width: int = 192,
        heads: int = 3,
        feedforward_width: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        epsilon: float = 1e-12,
    ) -> None:
        super().__init__()
        transformers = require("transformers", "transformers", "DenoisingViT")
        self.patch_size, side = check_integer("patch_size", patch_size, 1), math.isqrt(patch_size)
        if side * side != patch_size:
            raise InputError(f"patch_size must be a square number (pixels of a patch), got {patch_size!r}")
        if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
            raise InputError(f"grid must be (rows, columns) of patches, got {grid!r}")
        self.grid = check_integer("grid[0], the rows,", grid[0], 1), check_integer("grid[1], the columns,", grid[1], 1)
        self.layers = check_integer("layers", layers, 1)
        self.width, self.heads = check_integer("width", width, 1), check_integer("heads", heads, 1)
        if self.width % self.heads:
            raise InputError(f"width must be a multiple of heads, got {width!r} and {heads!r}")
        inner = 4 * self.width if feedforward_width is None else feedforward_width
        self.feedforward_width = check_integer("feedforward_width", inner, 1)
        self.activation = check_choice("activation", activation, ACTIVATIONS)
        self.bias, self.epsilon = bool(bias), check_positive("epsilon", epsilon)
        own = {theirs: getattr(self, name) for name, theirs in _CONFIGURED.items()}
        frames = {"image_size": [side * count for count in self.grid], "patch_size": side, "num_channels": 1}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        configuration = transformers.ViTConfig(**own, **frames, **dropout)
        self.vit = transformers.ViTModel(configuration, add_pooling_layer=False)
        self.readout = nn.Linear(self.width, self.patch_size)
        nn.init.trunc_normal_(self.readout.weight, std=0.02)
        nn.init.zeros_(self.readout.bias)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, grid: Sequence[int] | None = None) -> Self:
        """Load a model that `save_pretrained` wrote, or take a transformers ViT's weights (safetensors), on the CPU.

        The embeddings, blocks and final layer norm of a transformers ViT are taken; the readout is new. Its patch
        embedding becomes one of gray patches with values in [0, 1]: a gray value stands for the same value in all
        channels, so the channels' weights are summed, and a ViT's usual normalization of pixels is folded in. Position
        embeddings are interpolated (bicubic) to the `grid`, rows and columns of patches of a frame, if it is given.

        InputError: the folder holds no ViT, a file is missing or cut short, or the grid is out of its range, or given
        for a folder of this package. MissingExtra: transformers is not installed.
        """
        own = Path(folder) / "config.json"
        if own.is_file() and "model" in (read_json(own) or {}):
            if grid is not None:
                raise InputError(f"{folder}: is a model of this package, whose grid is settled")
            return super().from_pretrained(folder)
        vit, side, trained_grid = _load_vit(str(folder))
        own = {name: getattr(vit.config, theirs) for name, theirs in _CONFIGURED.items()}
        model = cls(side * side, trained_grid if grid is None else grid, **own)
        weights = vit.state_dict()
        weights.pop("embeddings.mask_token", None)
        patches, positions = "embeddings.patch_embeddings.projection.", "embeddings.position_embeddings"
        kernel = weights[f"{patches}weight"].sum(1, keepdim=True) / _PIXEL_STD
        weights[f"{patches}weight"] = kernel
        weights[f"{patches}bias"] = weights[f"{patches}bias"] - _PIXEL_MEAN * kernel.sum((1, 2, 3))
        if model.grid != trained_grid:
            first, others = weights[positions].split((1, math.prod(trained_grid)), 1)
            others = others.unflatten(1, trained_grid).movedim(-1, 1)  # [1, d, rows, columns]
            others = nn.functional.interpolate(others, size=model.grid, mode="bicubic", align_corners=False)
            weights[positions] = torch.cat((first, others.flatten(2).mT), 1)
        try:
            model.vit.load_state_dict(weights)
        except RuntimeError as error:
            raise InputError(f"{folder}: does not hold a plain ViT ({error})") from error
        return model

    def forward(self, noisy: Tensor, depth: int | None = None) -> Tensor:
        """Return the image `[..., T, n]` of `noisy` `[..., T, n]` after `depth` blocks (None: all of them).

        Depth 0 reads the embeddings; later blocks cost nothing. InputError: a wrong shape, or no depth in 0..layers.
        """
        depth = self.layers if depth is None else check_integer("depth", depth, 0, self.layers)
        self._check(noisy)
        (states,) = deque(self._states(noisy, depth), maxlen=1)
        return self._read(states, noisy)

    def reconstructions(self, noisy: Tensor) -> list[Tensor]:
        """Return the images of all depths 0..L, L+1 tensors of the shape of `noisy` `[..., T, n]`."""
        self._check(noisy)
        return [self._read(states, noisy) for states in self._states(noisy, self.layers)]

    def layer_losses(self, noisy: Tensor, clean: Tensor, depth_weights: Weights = None) -> LayerwiseLosses:
        """Return the losses of all depths against `clean` `[..., T, n]`, means over the pixels, and their weighted sum.

        See `ops.layerwise_reconstruction_loss` for what is differentiable; its losses are sums over a patch, n times
        those here. Used as `total, per_depth = model.layer_losses(noisy, clean, constraints.weights())`. InputError: a
        wrong shape, dtype or device, or `depth_weights` are not one number a depth.
        """
        self._check(noisy)
        check_tensor("clean", clean, 2, "[..., T, n]", noisy.shape, "as noisy")
        sums = ops.layerwise_reconstruction_loss(self.reconstructions(noisy), clean, depth_weights=depth_weights)
        return LayerwiseLosses(*(losses / self.patch_size for losses in sums))

    def _check(self, noisy: Tensor) -> None:
        check_tensor("noisy", noisy, 2, "[..., T, n]")
        expected = (*noisy.shape[:-2], self.grid[0] * self.grid[1], self.patch_size)
        check_shape("noisy", noisy, expected, f"the {self.grid[0]} x {self.grid[1]} patches of a frame by patch_size")
        check_together(noisy=noisy, readout=self.readout.weight)

    def _states(self, noisy: Tensor, depth: int) -> Iterator[Tensor]:
        """Yield the states `[B, 1 + T, d]` of the depths 0..depth, not normed."""
        embeddings = self.vit.embeddings
        convolution = embeddings.patch_embeddings.projection
        # A convolution whose stride is its kernel is a linear map of each patch.
        patches = noisy.reshape(math.prod(noisy.shape[:-2]), *noisy.shape[-2:])
        tokens = nn.functional.linear(patches, convolution.weight.flatten(1), convolution.bias)
        first = embeddings.cls_token.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
        states = torch.cat((first, tokens), 1) + embeddings.position_embeddings
        yield states
        # Newer versions of transformers keep the blocks in `layers`, older ones in `encoder.layer`.
        blocks = self.vit.layers if hasattr(self.vit, "layers") else self.vit.encoder.layer
        for block in blocks[:depth]:
            states = block(states)
            yield states

    def _read(self, states: Tensor, noisy: Tensor) -> Tensor:
        return self.readout(self.vit.layernorm(states[:, 1:])).reshape(noisy.shape)


def _load_vit(folder: str) -> tuple[Any, int, tuple[int, int]]:
    """Return the `transformers.ViTModel` of `folder` in float32, the side of its patches, and its grid."""
    transformers = require("transformers", "transformers", "loading a ViT")
    with named_errors(folder, "; give a folder with the config.json and model.safetensors of a ViT"):
        configuration = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if configuration.model_type != "vit":
            raise InputError(f"{folder}: holds a model of type {configuration.model_type!r}, expected 'vit'")
        options = {"config": configuration, "add_pooling_layer": False, "local_files_only": True}
        model = load_complete(transformers.ViTModel, folder, **options)
    sizes = (configuration.image_size, configuration.patch_size)
    (height, width), (side, other) = ((size, size) if isinstance(size, int) else size for size in sizes)
    if side != other:
        raise InputError(f"{folder}: has patches of {side}x{other} pixels, expected square ones")
    return model.to(torch.float32), side, (height // side, width // side)
