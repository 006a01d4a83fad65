"""A transformers model with all of its weights from a folder: what a file lacks never becomes random numbers."""

import contextlib
import textwrap
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from cdt_fast.checks import InputError


def load_complete(kind: Any, name: Any, *, new_head: bool = False, **options: Any) -> Any:
    """Return `kind.from_pretrained(name, **options)` with every weight from the files, finite; no code of theirs runs.
    A weight that is missing, or of another shape, is an InputError (transformers itself takes random numbers), but with
    `new_head` outside of the base model and in its pooler: these are trained anew, those of another shape only if the
    options have `ignore_mismatched_sizes`. Pickle files are not read."""
    other_shapes = new_head and options.get("ignore_mismatched_sizes", False)
    # Otherwise transformers points to a report of the shapes that is switched off.
    options = {"use_safetensors": True, "trust_remote_code": False, **options, "ignore_mismatched_sizes": True}
    model, loading = kind.from_pretrained(name, output_loading_info=True, **options)
    # A mismatched key comes with its two shapes.
    mismatched = {key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"]}
    missing = set(loading["missing_keys"])
    problems = ("lacks {} weights", missing, new_head), ("has {} weights of other shapes", mismatched, other_shapes)
    for what, keys, allowed in problems:
        wrong = sorted(key for key in keys if not (allowed and _is_new(model, key)))
        if wrong:
            raise InputError(f"{name}: {what.format(len(wrong))} of a {type(model).__name__}, the first is {wrong[0]}")
    check_finite(model, f"{name}")
    return model


@contextlib.contextmanager
def named_errors(name: Any, remedy: str) -> Iterator[None]:
    """Turn what transformers raises in this block, where files cannot be read, into one InputError of a line."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        # The beginning of the reason: transformers likes to list all the models it has.
        reason = textwrap.shorten(str(error), 240, placeholder=" …") or type(error).__name__
        raise InputError(f"{name}: cannot be loaded as a transformers model ({reason}){remedy}") from error


def check_finite(model: nn.Module, where: str) -> None:
    """Require weights without NaN and infinity; the InputError begins with `where`."""
    numbers = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    wrong = [name for name, value in numbers.items() if value.is_floating_point() and not value.isfinite().all()]
    if wrong:
        raise InputError(f"{where}: {len(wrong)} of its tensors hold NaN or infinity, the first is {wrong[0]}")


def _is_new(model: Any, key: str) -> bool:
    """Return whether a weight lies outside of the base model, or in its pooler."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    return not key.startswith(prefix) or key.removeprefix(prefix).startswith("pooler.")
