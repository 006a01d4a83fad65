"""Small texts, instructions and models for runs of a few milliseconds a step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

TINY_TEXT: dict[str, dict[str, Any]] = {
    "data": {"gamma": 0.3, "max_tokens": 12},
    "model": {"layers": 2, "width": 12, "least_count": 1},
    "constraints": {"rate": 0.1, "reference": 0.9, "reference_mode": "anchor", "warmup_epochs": 1},
    "training": {"steps": 8, "batch": 8, "device": "cpu", "precision": "fp32", "lr": 0.01, "validate_every": 4},
    "evaluation": {"gammas": [0.0, 1.0, 2.0]},
}
TINY_LANGUAGE: dict[str, dict[str, Any]] = {
    **TINY_TEXT,
    "data": {"gamma": 0.0, "max_tokens": 200, "validation": 0.1, "test": 0.1},
    "model": {},
    "constraints": {"rate": 0.05, "reference": 12.0, "reference_mode": "anchor", "warmup_epochs": 0},
}

_GOOD, _BAD = ("good", "fine", "warm", "bright"), ("bad", "dull", "cold", "grim")
_PLAIN = ("the", "film", "was", "and", "plot", "of", "it", "a")


def reviews(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return texts of unequal lengths, whose class is in two of their words, and the class."""
    generator = random.Random(seed)
    found = []
    for number in range(count):
        words = generator.choices(_PLAIN, k=generator.randint(3, 8))
        words += generator.choices(_GOOD if number % 2 else _BAD, k=2)
        generator.shuffle(words)
        found.append((" ".join(words), "pos" if number % 2 else "neg"))
    return found


def write_table(path: Path, count: int = 80, names: tuple[str, str] = ("text", "label"), seed: int = 0) -> Path:
    """Write a TSV file of `reviews`."""
    rows = ["\t".join(names), *("\t".join(row) for row in reviews(count, seed))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_instructions(path: Path) -> Path:
    """Write a JSON file in Alpaca's form, whose answers repeat a word of the instruction."""
    generator = random.Random(0)
    entries = []
    for number in range(40):
        word = generator.choice(_GOOD + _BAD)
        entries.append({"instruction": f"{number:02d}: say {word}.", "input": "", "output": f"{word} {word}"})
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def write_language_model(folder: Path, layers: int = 2, *, tied: bool = False) -> str:
    """Save a Llama of random weights whose tokens are bytes, and return the folder; a tied one knows no padding."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = {"eos_token": "<|end|>", **({} if tied else {"pad_token": "<|padding|>"})}
    words = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer: Any = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    sizes: dict[str, Any] = {"vocab_size": len(words), "hidden_size": 16, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 2, "max_position_embeddings": 200}
    special_ids = {"pad_token_id": None if tied else 1, "bos_token_id": None, "eos_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **special_ids, tie_word_embeddings=tied)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
