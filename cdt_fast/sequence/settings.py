"""The sections of the settings of `train text` and `train lm`."""

from __future__ import annotations

from dataclasses import dataclass

from cdt_fast.constraints.presets import GAMMAS, KINDS, PRESETS
from cdt_fast.training.settings import ConstraintSettings, EvaluationSettings, SharedTrainingSettings, setting


@dataclass
class PerturbationSettings:
    """What happens to the word embeddings."""

    gamma: float = setting(0.0, "training noise as a multiple of the standard deviation of the embeddings", least=0)
    perturbation: str = setting("gaussian", "what is done to the words' embeddings", KINDS)
    perturbation_rate: float = setting(0.15, "share of the words that 'drop' and 'swap' choose at gamma 1", least=0)


@dataclass
class TextDataSettings(PerturbationSettings):
    """[data] of labeled texts."""

    gamma: float = setting(1.0, "training noise as a multiple of the standard deviation of the embeddings", least=0)
    source: str | None = setting(None, "a file, a folder with train, dev and test files, or the folder of IMDb or MNLI")
    text_column: str | None = setting(None, "column of the text (default: that of MNLI where it is there, else text)")
    second_column: str | None = setting(None, "column of the second text of pairs (default: as above, else none)")
    label_column: str | None = setting(None, "column of the class (default: as above, else label)")
    format: str | None = setting(None, "format of the files (default: by the suffix)", ("tsv", "csv", "json", "jsonl"))
    quoting: bool | None = setting(None, "double quotes enclose fields (default: except in MNLI's files)")
    header: bool = setting(True, "the first line names the columns; without, columns are numbers from 0")
    validation: float = setting(0.1, "share of the training texts for the choice of the model, if no file has it")
    test: float = setting(0.1, "share of the texts for the evaluation, if no file has it")
    max_tokens: int = setting(256, "longer texts are cut", least=3)


@dataclass
class TextModelSettings:
    """[model] of labeled texts."""

    model: str = setting("text-ut", "text-ut, or the folder or hub name of a transformers encoder to fine-tune")
    embedding: str | None = setting(
        None, "text-ut: folder or hub name of a pretrained model to take words and embeddings from (default: learned)"
    )
    download: bool = setting(False, "models that are not here may be fetched from the hub")
    taps: list[int] | None = setting(None, "encoder: depths that are read, 0 the input of layer 1 (default: all)")
    layers: int = setting(3, "text-ut: L", least=1)
    width: int | None = setting(None, "text-ut: d (default: 128, or that of the pretrained embeddings)", least=1)
    attention_width: int | None = setting(None, "text-ut: k (default: d)", least=1)
    residual: str = setting("layer", "text-ut: the residual of a layer", ("layer", "input", "bias"))
    tied: bool = setting(False, "text-ut: one set of weights for all layers")
    scale: float = setting(1.0, "text-ut: beta, factor of the attention scores")
    positions: bool = setting(False, "text-ut: learned positions")
    frozen_embedding: bool = setting(False, "text-ut: the embeddings do not train")
    least_count: int = setting(2, "text-ut: how often a word must occur to be in the vocabulary", least=1)
    vocabulary_size: int | None = setting(None, "text-ut: most words of the vocabulary (default: all)", least=4)


@dataclass
class TextConstraintSettings(ConstraintSettings):
    """[constraints] of labeled texts: the preset "text"."""

    rate: float | list[float] = setting(
        PRESETS["text"]["rate"], "alpha, one number or one a layer: the share of the loss a layer removes"
    )
    reference: float | str | None = setting(
        PRESETS["text"]["reference"], "epsilon_0, bound of the loss at depth 0: a number, 'auto' or 'none'"
    )
    reference_mode: str = setting(
        PRESETS["text"]["reference_mode"], "how the reference enters", ("constraint", "anchor")
    )


@dataclass
class TextTrainingSettings(SharedTrainingSettings):
    """[training] of labeled texts."""

    epochs: int = setting(3, "passes over the training texts", least=1)
    steps: int | None = setting(None, "optimizer steps, in place of epochs (default: those of the epochs)", least=1)
    batch: int = setting(16, "texts a micro-batch", least=1)
    lr: float | None = setting(
        None, "learning rate of Adam (default: 0.001 for text-ut, 5e-05 for a pretrained encoder)", least=0
    )


@dataclass
class TextEvaluationSettings(EvaluationSettings):
    """[evaluation] of labeled texts and of language models."""

    gammas: list[float] = setting(list(GAMMAS), "ascending noise levels of the evaluation", least=0)


@dataclass
class LanguageDataSettings(PerturbationSettings):
    """[data] of instructions with answers."""

    source: str | None = setting(None, "a JSON or JSONL file in Alpaca's form: instruction, input, output")
    validation: float = setting(0.05, "share of the instructions for the choice of the model")
    test: float = setting(0.05, "share of the instructions for the evaluation")
    max_tokens: int = setting(512, "longer sequences (prompt and answer) are cut", least=2)


@dataclass
class LanguageModelSettings:
    """[model] of instructions with answers."""

    model: str = setting(
        "llama-small", "llama-small (random weights), or folder or hub name of a causal language model"
    )
    download: bool = setting(False, "models that are not here may be fetched from the hub")
    taps: list[int] | None = setting(None, "depths that are read, 0 the input of layer 1 (default: all)")
    inner_fraction: float = setting(1.0, "share of the tokens that the inner depths are read at in training")
    lora_rank: int | None = setting(None, "train low-rank adapters of this rank alone (default: all weights)", least=1)
    vocabulary_size: int = setting(
        4096, "llama-small: most tokens, byte pairs learned from the training texts (258: bytes alone)", least=258
    )
    layers: int = setting(4, "llama-small: L", least=1)
    width: int = setting(256, "llama-small: d", least=2)
    heads: int = setting(4, "llama-small: attention heads", least=1)
    feedforward_width: int | None = setting(None, "llama-small: inner width of a block (default: 4 d)", least=1)


@dataclass
class LanguageConstraintSettings(ConstraintSettings):
    """[constraints] of language models: the preset "lm"."""

    rate: float | list[float] = setting(
        PRESETS["lm"]["rate"], "alpha, one number or one a layer: the share of the loss a layer removes"
    )
    reference_mode: str = setting(PRESETS["lm"]["reference_mode"], "how the reference enters", ("constraint", "anchor"))
    margin: float = setting(
        PRESETS["lm"]["margin"],
        "share by which bounds are lowered in training, so that held-out losses meet them",
        least=0,
    )


@dataclass
class LanguageTrainingSettings(SharedTrainingSettings):
    """[training] of language models."""

    epochs: int = setting(3, "passes over the training sequences", least=1)
    steps: int | None = setting(None, "optimizer steps, in place of epochs (default: those of the epochs)", least=1)
    batch: int = setting(8, "sequences a micro-batch", least=1)
    lr: float | None = setting(
        None, "learning rate of Adam (default: 0.001 for llama-small, 0.0002 with lora, else 2e-05)", least=0
    )
