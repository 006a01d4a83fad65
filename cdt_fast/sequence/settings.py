"""The settings of `train text` and `train lm`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cdt_fast.constraints.presets import PRESETS
from cdt_fast.training import settings as shared
from cdt_fast.training.settings import NonNegative, Positive, Section, setting

UNROLLED = "text-ut"  # the network of this package; any other name is a pretrained model's
_GAMMA = "training noise as a multiple of the standard deviation of the embeddings"
_DOWNLOAD = "a model that is not here may be fetched from the hub"

Depths = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class TextDataSettings(Section):
    """[data] of labeled texts."""

    source: str | None = setting(None, "a file, a folder with train, dev and test files, or the folder of IMDb or MNLI")
    gamma: NonNegative = setting(1.0, _GAMMA)
    text_column: str | None = setting(None, "column of the text (default: that of MNLI where it is there, else text)")
    second_column: str | None = setting(None, "column of the second text of pairs (default: as above, else none)")
    label_column: str | None = setting(None, "column of the class (default: as above, else label)")
    validation: float = setting(0.1, "share of the training texts for the choice of the model, if no file has it")
    test: float = setting(0.1, "share of the texts for the evaluation, if no file has it")
    max_tokens: Annotated[Positive, Field(ge=3)] = setting(256, "longer texts are cut")


class TextModelSettings(Section):
    """[model] of labeled texts."""

    model: str = setting(UNROLLED, "text-ut, or the folder or hub name of a transformers encoder to fine-tune")
    embedding: str | None = setting(
        None, "text-ut: folder or hub name of a model to take words and embeddings from (default: learned)"
    )
    download: bool = setting(False, _DOWNLOAD)
    inner_pooling: Literal["own", "mean"] = setting(
        "mean", "encoders: what the depths before the last are read by, the encoder's own token or the mean of all"
    )
    layers: Positive = setting(3, "text-ut: L")
    width: Positive | None = setting(None, "text-ut: d (default: 128, or that of the pretrained embeddings)")
    least_count: Positive = setting(2, "text-ut: how often a word must occur to be in the vocabulary")


class TextTrainingSettings(shared.TrainingSettings):
    """[training] of labeled texts."""

    epochs: Positive = setting(3, "passes over the training samples")
    steps: Positive | None = setting(None, "optimizer steps, in place of epochs (default: those of the epochs)")
    batch: Positive = setting(16, "texts per micro-batch")
    lr: NonNegative | None = setting(
        None, "learning rate of Adam (default: 0.001 for text-ut, 5e-05 for a pretrained encoder)"
    )


class LanguageDataSettings(Section):
    """[data] of instructions with answers."""

    source: str | None = setting(None, "a JSON or JSONL file of rows in Alpaca's form: instruction, input, output")
    gamma: NonNegative = setting(0.0, _GAMMA)
    validation: float = setting(0.05, "share of the instructions for the choice of the model")
    test: float = setting(0.05, "share of the instructions for the evaluation")
    max_tokens: Annotated[Positive, Field(ge=2)] = setting(512, "longer sequences (prompt and answer) are cut")


class LanguageModelSettings(Section):
    """[model] of instructions with answers."""

    model: str | None = setting(None, "folder or hub name of a causal language model")
    download: bool = setting(False, _DOWNLOAD)
    taps: Depths | None = setting(None, "depths that are read, 0 the input of layer 1 (default: all)")


class LanguageTrainingSettings(TextTrainingSettings):
    """[training] of language models."""

    batch: Positive = setting(8, "sequences per micro-batch")
    lr: NonNegative | None = setting(None, "learning rate of Adam (default: 2e-05)")


class SequenceSettings(shared.RunSettings):
    """The settings that both tasks share."""

    def needs(self) -> list[tuple[bool, str, str]]:
        return [*super().needs(), (self.training.steps is None, "steps is none", "epochs")]


class TextSettings(SequenceSettings):
    """All settings of a run on labeled texts."""

    task: ClassVar[str] = "text"
    networks: ClassVar[tuple[str, ...]] = (UNROLLED,)
    data: TextDataSettings = TextDataSettings()
    model: TextModelSettings = TextModelSettings()
    constraints: shared.ConstraintSettings = shared.ConstraintSettings(**PRESETS["text"])
    training: TextTrainingSettings = TextTrainingSettings()

    def needs(self) -> list[tuple[bool, str, str]]:
        own = self.model.model == UNROLLED
        return [
            *super().needs(),
            (not own, f"model is other than {UNROLLED}", "inner_pooling"),
            (self.model.embedding is None, "embedding is none", "least_count"),
            (own, f"model is {UNROLLED}", "embedding layers width least_count"),
        ]


class LanguageSettings(SequenceSettings):
    """All settings of a run on instructions with answers."""

    task: ClassVar[str] = "lm"
    networks: ClassVar[tuple[str, ...]] = ()
    data: LanguageDataSettings = LanguageDataSettings()
    model: LanguageModelSettings = LanguageModelSettings()
    constraints: shared.ConstraintSettings = shared.ConstraintSettings(**PRESETS["lm"])
    training: LanguageTrainingSettings = LanguageTrainingSettings()
