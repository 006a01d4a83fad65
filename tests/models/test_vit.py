"""DenoisingViT against transformers' own forward on whole pictures, in float64, and the readout written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import models
from cdt_fast.checks import InputError
from cdt_fast.video.data import to_patches

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"patch_size": 16, "grid": (2, 3), "layers": 2, "width": 12, "heads": 3}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def disturbed(module: torch.nn.Module, seed: int = 3) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter += 0.3 * normal(seed + number, *parameter.shape).to(parameter.dtype)


def made(**options: Any) -> models.DenoisingViT:
    torch.manual_seed(0)
    model = models.DenoisingViT(**{**SMALL, **options}).double().eval()
    disturbed(model)
    return model


def frames(rows: int = 8, columns: int = 12, count: int = 5) -> Tensor:
    return torch.rand(count, 1, rows, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def states_of(vit: Any, pictures: Tensor, **options: Any) -> list[Tensor]:
    """Return the states of all depths as transformers computes them from pictures, not normed, embeddings first."""
    recorded: list[Tensor] = []
    blocks = vit.layers if hasattr(vit, "layers") else vit.encoder.layer

    def record(_: Any, arguments: tuple[Any, ...], output: Any) -> None:
        recorded.extend([arguments[0]] if not recorded else [])
        recorded.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(record) for block in blocks]
    vit(pictures, **options)
    for handle in handles:
        handle.remove()
    return recorded


def read_by_hand(model: models.DenoisingViT, states: Tensor) -> Tensor:
    norm = model.vit.layernorm
    centered = states - states.mean(-1, keepdim=True)
    normed = centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias
    return torch.einsum("btd,nd->btn", normed[:, 1:], model.readout.weight) + model.readout.bias


@pytest.mark.parametrize("options", [{}, {"feedforward_width": 7, "activation": "relu", "bias": False, "layers": 3}])
def test_every_depth_is_the_readout_of_what_transformers_computes_from_pictures(options: dict[str, Any]) -> None:
    model, pictures = made(**options), frames()
    patches = to_patches(pictures, 4, "space")
    expected = [read_by_hand(model, states) for states in states_of(model.vit, pictures)]
    found = model.reconstructions(patches)
    assert len(found) == len(expected) == model.layers + 1
    for depth, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
        assert torch.equal(model(patches, depth), one)
    assert torch.equal(model(patches), found[-1])
    folded = patches.reshape(5, 1, 6, 16)
    torch.testing.assert_close(model(folded), found[-1].reshape(folded.shape), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(model(patches[0]), found[-1][0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("weights", [None, [0.5, -1.0, 2.0], [0.0, 0.0, 1.0]])
def test_a_loss_is_the_mean_over_the_pixels(weights: list[float] | None) -> None:
    model, pictures = made(), frames()
    clean = to_patches(pictures, 4, "space")
    noisy = clean + 0.1 * normal(8, *clean.shape)
    expected = torch.stack([((image - clean) ** 2).mean() for image in model.reconstructions(noisy)])
    factors = torch.tensor([1.0, 1.0, 1.0] if weights is None else weights, dtype=torch.float64)
    used = [parameter for name, parameter in model.named_parameters() if "mask_token" not in name]
    wanted = torch.autograd.grad((factors * expected).sum(), used)
    total, per_depth = model.layer_losses(noisy, clean, weights)
    torch.testing.assert_close(per_depth, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(total, (factors * expected).sum(), rtol=1e-12, atol=1e-13)
    assert per_depth.requires_grad == (weights is None)
    for found, want in zip(torch.autograd.grad(total, used), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


def saved_vit(folder: Path, channels: int) -> Any:
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    pictures = {"image_size": 12, "patch_size": 4, "num_channels": channels}
    vit = transformers.ViTModel(transformers.ViTConfig(**sizes, **pictures, layer_norm_eps=1e-6))
    disturbed(vit)
    vit.save_pretrained(folder)
    return vit.double().eval()


@pytest.mark.parametrize(("channels", "grid"), [(1, None), (3, None), (3, (2, 5))])
def test_a_pretrained_vit_sees_gray_patches_as_it_saw_gray_pictures(tmp_path: Path, channels: int, grid: Any) -> None:
    """Position embeddings are interpolated to another grid as transformers does it."""
    vit = saved_vit(tmp_path, channels)
    model = models.DenoisingViT.from_pretrained(tmp_path, grid=grid).double().eval()
    assert (model.patch_size, model.grid, model.layers, model.feedforward_width) == (16, grid or (3, 3), 2, 20)
    pictures = frames(*(4 * count for count in model.grid))
    given = ((pictures - 0.5) / 0.5).expand(-1, channels, -1, -1)
    states = states_of(vit, given, interpolate_pos_encoding=grid is not None)
    for found, want in zip(model.reconstructions(to_patches(pictures, 4, "space")), states, strict=True):
        torch.testing.assert_close(found, read_by_hand(model, want), rtol=1e-5, atol=1e-5)  # stored in float32


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"patch_size": 15}, "square"),
        ({"grid": (2,)}, "grid"),
        ({"grid": (2, 0)}, "columns"),
        ({"layers": 0}, "layers"),
        ({"heads": 5}, "multiple of heads"),
        ({"feedforward_width": 0}, "feedforward_width"),
        ({"activation": "none"}, "activation"),
        ({"epsilon": 0.0}, "epsilon"),
    ],
)
def test_a_bad_argument_is_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        models.DenoisingViT(**{**SMALL, **options})


def test_a_bad_input_is_named() -> None:
    model = made()
    for noisy in (torch.rand(1, 6, 15).double(), torch.rand(1, 5, 16).double(), torch.rand(6, 16)):
        with pytest.raises(InputError, match=r"noisy|readout"):
            model(noisy)
    noisy = torch.rand(1, 6, 16).double()
    with pytest.raises(InputError, match="from 0 to 2"):
        model(noisy, 3)
    with pytest.raises(InputError, match="clean"):
        model.layer_losses(noisy, noisy[:, :5])
    with pytest.raises(InputError, match="depth_weights"):
        model.layer_losses(noisy, noisy, [1.0])


def test_what_cannot_be_loaded_says_how_to_pass_a_folder(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "gone")):
        with pytest.raises(InputError, match=r"give a folder with the config\.json and model\.safetensors"):
            models.DenoisingViT.from_pretrained(name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(InputError, match="of type 'bert', expected 'vit'"):
        models.DenoisingViT.from_pretrained(tmp_path)
    made().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="of this package"):
        models.DenoisingViT.from_pretrained(tmp_path, grid=(3, 3))
    with pytest.raises(InputError, match="expected a DUST"):
        models.DUST.from_pretrained(tmp_path)
