"""Decoding with an exit against transformers' own: the same tokens, the same distribution, and nothing left behind."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses import LayerLosses, attach_layer_losses, frequent_tokens
from cdt_fast.models.layer_losses.decoding.tuning import ExitSettings, keep_settings

transformers = pytest.importorskip("transformers")
if not hasattr(transformers.Cache, "activate_past_recording"):
    pytest.skip("decoding needs a newer transformers", allow_module_level=True)

VOCABULARY, LAYERS, END = 67, 5, 7
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 128}
_NEOX = {name: size for name, size in _SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
CONFIGURATIONS = {
    "Llama": _SIZES,
    "Qwen3": _SIZES,
    "Gemma3Text": {**_SIZES, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "GPT2": _GPT2,
    "GPTNeoX": _NEOX,
}


def model_of(name: str, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float64) -> Any:
    """A random model whose exits name the last layer's token often, but not always."""
    torch.manual_seed(0)
    sizes = {**CONFIGURATIONS[name], "vocab_size": vocabulary}
    special = {"bos_token_id": 1, "eos_token_id": min(END, vocabulary - 1), "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**sizes, **special)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    factors = {"lm_head": 20.0, "embed_out": 20.0, "embed": 10.0, "wte": 3.0, "": 4.0 if name == "GPT2" else 2.0}
    for part, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(next(factor for word, factor in factors.items() if word in part))
    return model


def prompts_of(batch: int, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens, the first rows padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch - 1):
        mask[row, : row % length] = 0
    return {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}


def generated(model: Any, decoder: Any = None, batch: int = 1, seed: int = 0, **options: Any) -> Any:
    options = {"max_new_tokens": 30, "do_sample": False, **options}
    return model.generate(**prompts_of(batch, seed=seed), custom_generate=decoder, **options)


@pytest.fixture
def attached() -> tuple[Any, LayerLosses]:
    model = model_of("Llama")
    return model, attach_layer_losses(model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "Llama" else pytest.mark.slow) for name in CONFIGURATIONS]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_are_those_of_the_model(name: str, batch: int) -> None:
    model = model_of(name)
    handle = attach_layer_losses(model)
    few = torch.arange(5, VOCABULARY - 10)
    processed = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    accepted = drafted = 0
    for exit, options in itertools.product((1, LAYERS - 1), ({}, processed)):
        expected = generated(model, batch=batch, **options)
        for decoder in (
            handle.decoder(exit, 1),
            handle.decoder(exit, 5),
            handle.decoder(exit, 5, confidence=0.2, draft_tokens=few),
        ):
            assert torch.equal(generated(model, decoder, batch, **options), expected)
            accepted, drafted = accepted + decoder.counts.accepted, drafted + decoder.counts.drafted
    assert 0 < accepted < drafted  # else the test shows nothing


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_greedy_tokens_of_five_hundred_prompts_are_those_of_the_model(name: str) -> None:
    model = model_of(name)
    decoder = attach_layer_losses(model).decoder(3, 4)
    for seed in range(500):
        batch = 1 + seed % 3
        expected = generated(model, batch=batch, seed=seed, max_new_tokens=16)
        assert torch.equal(generated(model, decoder, batch, seed, max_new_tokens=16), expected), seed


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_preallocated_cache_and_one_that_goes_on_give_the_same_tokens(name: str) -> None:
    model = model_of(name)
    decoder = attach_layer_losses(model).decoder(2, 4)
    expected = generated(model, batch=2, eos_token_id=None)
    assert torch.equal(generated(model, decoder, 2, cache_implementation="static", eos_token_id=None), expected)
    cache = transformers.DynamicCache(config=model.config)
    first = generated(model, decoder, 1, past_key_values=cache, eos_token_id=None)
    assert cache.get_seq_length() == first.shape[1] - 1
    assert {layer.get_seq_length() for layer in cache.layers} == {first.shape[1] - 1}
    more = {"attention_mask": torch.ones_like(first), "past_key_values": cache, "eos_token_id": None}
    again = model.generate(first, max_new_tokens=9, do_sample=False, custom_generate=decoder, **more)
    assert torch.equal(again, generated(model, max_new_tokens=39, eos_token_id=None))


def test_what_generate_returns_is_whole(attached: tuple[Any, LayerLosses]) -> None:
    model, handle = attached
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, own = generated(model, **options), generated(model, handle.decoder(3), **options)
    assert torch.equal(own.sequences, expected.sequences)
    for one, other in ((own.scores, expected.scores), (own.logits, expected.logits)):
        torch.testing.assert_close(torch.stack(one), torch.stack(other))


def test_stopping_criteria_and_streamers_see_every_token(attached: tuple[Any, LayerLosses]) -> None:
    model, handle = attached
    whole = generated(model)[0]
    last = int(whole[20])

    class Stop(transformers.StoppingCriteria):
        def __call__(self, ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            return ids[:, -1] == last

    class Streamer:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    stopped = generated(model, handle.decoder(3, 6, streamer=streamer), stopping_criteria=[Stop()])[0]
    assert torch.equal(stopped, generated(model, stopping_criteria=[Stop()])[0])
    assert int(stopped[-1]) == last
    assert streamer.ended
    assert streamer.seen == stopped.tolist()


@pytest.mark.parametrize("draft_tokens", [pytest.param(None, marks=pytest.mark.slow), torch.tensor([0, 2, 3])])
def test_sampled_tokens_have_the_distribution_of_the_model(draft_tokens: Tensor | None) -> None:
    vocabulary, new = 5, 4
    model = model_of("Llama", vocabulary)
    model.lm_head.weight.data.mul_(0.3)  # else nearly all falls on one token
    decoder = attach_layer_losses(model).decoder(2, 3, draft_tokens=draft_tokens)
    prompt = torch.tensor([[1, 2, 3]])
    options = {"do_sample": True, "temperature": 1.3, "top_k": 4, "max_new_tokens": new, "eos_token_id": None}
    torch.manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    for batch, times in ((1000, 2), (5, 200)):  # in a batch all rows wait for the slowest
        for _ in range(times):
            ids = prompt.expand(batch, -1)
            mask = torch.ones_like(ids)
            texts = model.generate(ids, attention_mask=mask, custom_generate=decoder, pad_token_id=0, **options)
            counts.update(map(tuple, texts[:, 3:].tolist()))
    every = torch.tensor(list(itertools.product(range(vocabulary), repeat=new)))
    ids = torch.cat([prompt.expand(len(every), -1), every], 1)
    logits = model(input_ids=ids).logits[:, 2:-1] / 1.3
    logits = logits.masked_fill(logits < logits.topk(4).values[..., -1:], -torch.inf)
    p = logits.log_softmax(-1).gather(2, every[..., None]).sum((1, 2)).exp()
    expected, seen = p * sum(counts.values()), torch.tensor([counts[tuple(row)] for row in every.tolist()])
    assert int(seen[p == 0].sum()) == 0
    often = expected >= 5
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    seen = torch.cat([seen[often], seen[~often].sum()[None]])
    statistic, freedom = float(((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum()), len(expected) - 1
    assert freedom > 30
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations of chi-square
    assert 0 < decoder.counts.accepted < decoder.counts.drafted


def test_an_error_inside_of_a_draft_leaves_the_model_as_it_was(attached: tuple[Any, LayerLosses]) -> None:
    model, handle = attached
    expected, decoder = generated(model), handle.decoder(3)
    forwards = [layer.forward for layer in model.model.layers]
    calls = 0

    def fail(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of memory")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        generated(model, decoder)
    hook.remove()
    assert [layer.forward for layer in model.model.layers] == forwards
    assert model.config.num_hidden_layers == LAYERS
    assert torch.equal(generated(model, decoder), expected)
    handle.remove()
    assert torch.equal(generated(model), expected)


def test_a_confident_exit_is_the_whole_model_or_the_model_cut_there(attached: tuple[Any, LayerLosses]) -> None:
    model, handle = attached
    never = handle.confident_decoder(2, 1.0)
    assert torch.equal(generated(model, never, 2), generated(model, batch=2))
    always = handle.confident_decoder(2, 0.0)
    always.longest = 100
    own = generated(model, always, eos_token_id=None)[0]
    cut = model_of("Llama")
    cut.model.layers = cut.model.layers[:2]
    cut.config.num_hidden_layers = 2
    cut.generation_config.eos_token_id = None
    expected = cut.generate(own[None, :10], attention_mask=torch.ones(1, 10), max_new_tokens=29, do_sample=False)[0]
    assert torch.equal(own, expected)
    assert always.counts.acceptance == 1
    between = handle.confident_decoder(LAYERS - 1, 0.5)
    generated(model, between, eos_token_id=None)
    assert 0 < between.counts.accepted < between.counts.drafted


@pytest.mark.slow
def test_the_agreement_that_was_asked_for_is_met_by_the_least_threshold(attached: tuple[Any, LayerLosses]) -> None:
    handle = attached[1]
    prompts = list(prompts_of(40, seed=3)["input_ids"].clamp(min=8))
    strict, loose = (handle.calibrate_exit(prompts, LAYERS - 1, share, new_tokens=20) for share in (0.97, 0.5))
    assert strict.least_agreement >= 0.97
    assert strict.agreement > strict.least_agreement
    assert loose.threshold < strict.threshold
    assert loose.exit_share > strict.exit_share
    assert handle.calibrate_exit(prompts[:1], 1, 0.99, new_tokens=4).threshold == 1  # too few to know


def test_tuning_counts_what_the_decoder_then_does_and_is_saved(
    attached: tuple[Any, LayerLosses], tmp_path: Any
) -> None:
    model, handle = attached
    model.generation_config.eos_token_id = None
    prompts = [prompts_of(1, seed=seed)["input_ids"][0] for seed in range(4)]
    few = frequent_tokens([range(5, VOCABULARY), [6, -100]], VOCABULARY - 10)
    tuning = handle.tune_decoder(prompts, new_tokens=20, draft_tokens=few, progress=False)
    assert {row.exit for row in tuning.rows} == set(range(1, LAYERS))
    for row in tuning.rows:
        if row.confidence:
            continue
        decoder = handle.decoder(row.exit, row.drafts, draft_tokens=few)
        for prompt in prompts:
            mask = torch.ones_like(prompt)[None]
            model.generate(prompt[None], attention_mask=mask, max_new_tokens=20, custom_generate=decoder)
        assert decoder.counts.acceptance == pytest.approx(row.acceptance)
    measured = [row.measured for row in tuning.rows if row.measured is not None]
    assert len(measured) == 3
    assert (tuning.best is not None) == (max(measured) > 1.05)
    if tuning.best is None:  # tiny models gain nothing by it
        with pytest.raises(InputError, match="tune_decoder"):
            handle.decoder()
    keep_settings(model, ExitSettings(exit=3, drafts=2, confidence=0.1, draft_tokens=few.tolist()))
    handle.remove()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    decoder = attach_layer_losses(again).decoder()
    assert (decoder.exit, decoder.drafts, decoder.confidence) == (3, 2, 0.1)
    assert torch.equal(generated(again, decoder), generated(again))
    # transformers' own decoder reads the same exit.
    assert torch.equal(generated(again, assistant_early_exit=3), generated(again))


def test_what_cannot_be_decoded_with_an_exit_is_refused(attached: tuple[Any, LayerLosses]) -> None:
    model, handle = attached
    for exit in (0, LAYERS, -1, 2.5):
        with pytest.raises(InputError, match="exit must be"):
            handle.decoder(exit)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="drafts must be"):
        handle.decoder(2, 0)
    with pytest.raises(InputError, match="of another tokenizer"):
        handle.decoder(2, draft_tokens=torch.tensor([0, VOCABULARY]))
    with pytest.raises(InputError, match="tune_decoder"):
        handle.decoder()
    with pytest.raises(InputError, match="exits must hold"):
        handle.tune_decoder([[1, 2]], exits=[])
    with pytest.raises(InputError, match="prompts must hold"):
        handle.tune_decoder([], exits=[1])
    with pytest.raises(InputError, match=r"a prompt must be a list of token numbers, got 'hi' \(str\)"):
        handle.tune_decoder(["hi"], exits=[1])
    decoder = handle.decoder(2)
    for options, message in (
        ({"num_beams": 2}, "num_beams must be 1"),
        ({"use_cache": False}, "use_cache must be True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states must be False"),
    ):
        with pytest.raises(InputError, match=message):
            generated(model, decoder, **options)
    with pytest.raises(InputError, match="another model"):
        generated(model_of("Qwen3"), decoder)
    windows = model_of("Gemma3Text")
    with pytest.raises(InputError, match="StaticSlidingWindowLayer"):
        generated(windows, attach_layer_losses(windows).decoder(2), cache_implementation="static")
    # Half of its layers are linear attention, whose states its own cache keeps beside those of the others.
    recurrent = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**_SIZES, block_size=4))
    with pytest.raises(InputError, match="cannot be removed from its cache, a MiniMaxCache"):
        generated(recurrent, attach_layer_losses(recurrent).decoder(2))
    config = transformers.LlamaConfig(**_SIZES, num_labels=3, pad_token_id=0)
    classifier = transformers.LlamaForSequenceClassification(config)
    with pytest.raises(InputError, match="classifier"):
        attach_layer_losses(classifier).decoder(2)
