"""Every class of the installed transformers that `attach_layer_losses` might take: right at all depths, or refused.

Each class is built from a small configuration with random weights. The truth for depth l is the loss that a copy
whose layers behind l are cut off returns itself; where the copy cannot run, the model whose layers behind l hand their
input on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.models.layer_losses import attach_layer_losses

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
ENDINGS = (*LANGUAGE_MODELS, "ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
RIGHT, REFUSED, WRONG, NOT_BUILT = "right", "refused", "wrong", "not built"
LAYERS, CLASSES, VOCABULARY, WIDTH, HEADS = 4, 4, 120, 32, 4
# Of float32 losses of a few nats, and of logits beside the largest, whose sums are taken in another order.
TOLERANCE = 2e-5

_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks"),
    *("num_encoder_layers", "num_decoder_layers", "n_encoder_layers"),
)
# Sizes, under all the names that configurations have for them.
_SIZES = {
    1: "n_group topk_group num_expert_group n_groups num_nextn_predict_layers mamba_ngroups mamba_n_groups",
    2: "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k num_experts_per_topk top_k_experts "
    "index_n_heads index_topk num_shared_experts n_shared_experts num_kv_heads kv_n_heads swa_num_key_value_heads",
    HEADS: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads linear_num_key_heads linear_num_value_heads "
    "linear_num_heads swa_num_attention_heads mamba_num_heads mamba_n_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts block_size chunk_size mamba_chunk_size rotary_dim",
    8: "head_dim qk_rope_head_dim v_head_dim qk_nope_head_dim kv_lora_rank q_lora_rank d_kv d_head dim_head "
    "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim swa_head_dim global_head_dim state_size "
    "mamba_d_state ssm_state_size time_step_rank hidden_size_per_layer_input sliding_window local_attention",
    16: "mamba_d_head mamba_head_dim moe_intermediate_size shared_expert_intermediate_size embedding_size "
    "input_embedding_size word_embed_proj_dim num_conv_pos_embeddings",
    WIDTH: "hidden_size d_model n_embd emb_dim dim pooler_hidden_size projection_dim classifier_proj_size "
    "output_embedding_size encoder_hidden_size",
    48: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff d_inner dff n_inner hidden_dim dim_ff "
    "ffn_hidden_size shared_intermediate_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions "
    "model_max_length original_max_position_embeddings",
    VOCABULARY: "vocab_size vocab_size_per_layer_input n_words",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_TOKENS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1, "decoder_start_token_id": 2}

# What single families ask for besides, by the beginning of their classes' names.
_OWN: dict[str, dict[str, Any]] = {
    "Bit": {"embedding_size": 32},
    "DeepseekV2": {"num_experts_per_tok": 2},
    "DonutSwin": {"embed_dim": 24},
    "Dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "FalconH1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "Esm": {"vocab_size": VOCABULARY},
    "GPTNeoFor": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "Gemma3n": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "LayoutLM": {"coordinate_size": 6, "shape_size": 4},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"] * 2},
    "Lilt": {"hidden_size": 48},
    "Longformer": {"attention_window": 8},
    "Luke": {"entity_vocab_size": 20, "entity_emb_size": 8},
    "Mamba2": {"head_dim": 16, "num_heads": 4},
    "Nemotron": {"num_key_value_heads": 2},
    "Reformer": {"axial_pos_embds": False},
    "RoCBert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "SqueezeBert": {"embedding_size": WIDTH},
    "Swin": {"embed_dim": 24},
    "Xmod": {"default_language": "en_XX"},
    "Zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 64, "attention_head_dim": 16},
    "ZambaFor": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 64, "attention_head_dim": 16},
}


@dataclass(frozen=True)
class Verdict:
    """What became of a class: RIGHT, REFUSED, WRONG or NOT_BUILT; why, in a line; and the largest relative error."""

    name: str
    kind: str
    reason: str = ""
    error: float = 0.0


def class_names() -> list[str]:
    """List all classes whose names say that they have a loss that depths can be read with."""
    return sorted(
        name for name in dir(transformers) if name.endswith(ENDINGS) and not name.startswith(("Auto", "DataCollator"))
    )


def small_settings(config: Any, others: tuple[str, ...], layers: int = LAYERS) -> dict[str, Any]:
    """Return arguments that make a configuration of this class small; parts named `others` have fewer layers."""
    settings: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        part = vars(config).get(name)
        if isinstance(part, transformers.PretrainedConfig):
            settings[name] = small_settings(part, others, 2 if name.startswith(others) else LAYERS)
        elif name in _TOKENS:
            settings[name] = _TOKENS[name]
        elif name == "head_dim" and value is None:
            settings[name] = WIDTH // HEADS
        elif name in _DEPTHS and isinstance(value, int):
            settings[name] = layers
        elif name in _SMALL and isinstance(value, int) and value > 0:
            settings[name] = min(value, _SMALL[name])
    if isinstance(vars(config).get("num_key_value_heads"), int):
        grouped = config.to_dict()["num_key_value_heads"] != config.to_dict().get("num_attention_heads")
        settings["num_key_value_heads"] = HEADS // 2 if grouped else HEADS
    return settings


def build(name: str) -> Any:
    """Return a model of the class with random weights, norms and biases too."""
    kind = getattr(transformers, name)
    settings = small_settings(kind.config_class(), ("text" if name.endswith(ENDINGS[-1]) else "vision", "audio"))
    settings |= next((own for start, own in _OWN.items() if name.startswith(start)), {})
    if not name.endswith(LANGUAGE_MODELS):
        settings["num_labels"] = CLASSES
    torch.manual_seed(0)
    model = kind(kind.config_class(**settings)).eval()
    model.config.use_cache = False
    if not next(model.parameters()).is_meta:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape).to(parameter.dtype)
    return model


def inputs_of(name: str, model: Any) -> dict[str, Tensor]:
    """Return a batch of two, with labels; one of a language model's does not count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (2, 12), generator=generator)
    if name.endswith(LANGUAGE_MODELS):
        labels = ids.clone()
        labels[0, 3] = -100
        return {"input_ids": ids, "labels": labels}
    shapes: dict[str, tuple[int, ...]] = {"input_values": (2, 4000), "input_features": (2, 40, 160)}
    main = "input_ids" if name.startswith("ImageGPT") else model.main_input_name
    inputs = {"labels": torch.tensor([1, 3])}
    if "ForToken" in name:
        inputs["labels"] = (ids % CLASSES).where(ids % 5 > 0, -100)
    if main == "pixel_values":
        vision = getattr(model.config, "vision_config", model.config)
        size = getattr(vision, "image_size", None) or 64
        size = (size, size) if isinstance(size, int) else tuple(size)
        shapes[main] = (2, getattr(vision, "num_channels", 3), *size)
    inputs[main] = torch.randn(shapes[main], generator=generator) if main in shapes else ids
    return inputs


@torch.no_grad()
def true_losses(model: Any, inputs: dict[str, Tensor]) -> list[float]:
    """Return the loss of the model with its first 0, 1, … layers, as it computes it itself."""
    losses = []
    for depth in range(LAYERS + 1):
        try:
            short = copy.deepcopy(model)
            del _layers(short)[depth:]
            losses.append(short(**inputs).loss.item())
        except Exception:
            with _handed_on(_layers(model)[depth:]):
                losses.append(model(**inputs).loss.item())
    return losses


def _layers(module: nn.Module) -> Any:
    """Return the one list of layers, those inside of layers not counting."""
    (layers,) = (layers for layers in _lists(module) if len(layers) == LAYERS)
    return layers


def _lists(module: nn.Module) -> Iterator[Any]:
    for child in module.children():
        yield from (child,) if isinstance(child, nn.ModuleList) else _lists(child)


@contextlib.contextmanager
def _handed_on(layers: Any) -> Iterator[None]:
    def input_as_output(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        state = args[0] if args else kwargs["hidden_states"]
        return state if isinstance(output, Tensor) else type(output)((state, *output[1:]))

    hooks = [layer.register_forward_hook(input_as_output, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def judge(name: str) -> Verdict:
    """Attach layer losses to a model of the class, and compare those of all depths with the truth."""
    failed = NOT_BUILT
    try:
        with torch.device("meta"):
            model = build(name)
        if sum(parameter.numel() for parameter in model.parameters()) > 5e8:
            return Verdict(name, NOT_BUILT, "its parts stay too large")
        attach_layer_losses(model)  # reads no weights
        model = build(name)
        inputs = inputs_of(name, model)
        with torch.no_grad():
            own = model(**inputs).loss.item()
            handle, failed = attach_layer_losses(model), WRONG
            losses = model(**inputs).layer_losses.tolist()
    except InputError as error:
        return Verdict(name, REFUSED, _line(error))
    except Exception as error:
        return Verdict(name, failed, _line(error))
    handle.remove()
    truth = true_losses(model, inputs)
    error = max(abs(loss / true - 1) for loss, true in zip([*losses, losses[-1]], [*truth, own], strict=True))
    if error <= TOLERANCE:
        return Verdict(name, RIGHT, error=error)
    return Verdict(name, WRONG, f"losses {losses}, truth {truth}, its own {own}", error)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text[:160]}"
