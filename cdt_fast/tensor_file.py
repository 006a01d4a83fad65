"""Tensors in a safetensors file with a checksum of each and of its metadata, so that no damage passes unnoticed."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.files import file_state, parsed_json

# One entry of the file's metadata for all that is ours: safetensors writes several in an order that differs each time.
_OURS = "cdt_fast"


def serialized(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a safetensors file: tensors by name, words by name, and a checksum (CRC-32) of each.

    Writing is left to the caller, to whom the system reports a full disk; safetensors' own writer would reword it.
    Tensors that share memory come back apart.
    """
    from safetensors.torch import save

    stored: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        # A copy where memory is shared: safetensors refuses it.
        stored[name] = plain.clone() if plain.untyped_storage().data_ptr() in storages else plain
        storages.add(stored[name].untyped_storage().data_ptr())
    words = dict(metadata or {})
    return save(stored, {_OURS: json.dumps({"metadata": words, "checksums": _checksums(stored, words)})})


def load_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Read a safetensors file to the CPU, and check it where its content is from `serialized`.

    Returns:
        Tensors by name, and the metadata as words by name; None: it is of another tool, and has no checksums.

    Raises:
        InputError: the file is missing, cut short, no safetensors file, or damaged: it does not have its checksums.
    """
    ours, tensors = _read(path)
    if ours is None:
        return tensors, None
    metadata, expected = ours.get("metadata", {}), ours.get("checksums", {})
    checksums = _checksums(tensors, metadata)
    wrong = sorted(name for name in {*expected, *checksums} if expected.get(name) != checksums.get(name))
    if wrong:
        which = ", ".join(name or "the metadata" for name in wrong[:3])
        raise InputError(f"{path}: is damaged: {len(wrong)} checksum(s) are wrong, of {which}")
    return tensors, metadata


def recorded(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata that `serialized` was given, unchecked; the tensors are not read.

    Raises:
        InputError: the file is missing, no safetensors file, or holds no such metadata.
    """
    return (_read(path, with_tensors=False)[0] or {}).get("metadata", {})


def _read(path: str | os.PathLike[str], with_tensors: bool = True) -> tuple[Any, dict[str, Tensor]]:
    """Return our entry of a file's metadata and its tensors, all of one state of the file.

    safetensors opens a file twice, by its name: where another process replaces it in between, it is read again.
    """
    from safetensors import SafetensorError, safe_open

    while True:
        state, failure, ours, tensors = file_state(path), None, None, {}
        try:
            with safe_open(path, framework="pt") as file:
                ours = (file.metadata() or {}).get(_OURS)
                # Copies: in the file they start on any 8 bytes, and where they start decides how products round.
                tensors = {name: file.get_tensor(name).clone() for name in (file.keys() if with_tensors else ())}
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch cannot map the file
            failure = error
        if file_state(path) == state:
            break
    if failure is not None:
        raise InputError(f"{path}: cannot be read, or is cut short ({failure})") from failure
    where = f"{path}: is damaged: its metadata"
    return None if ours is None else parsed_json(ours, where, dict[str, dict[str, str]]), tensors


def _checksums(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the CRC-32 of each tensor with its dtype and shape, and under "" of the metadata."""
    checksums = {"": zlib.crc32(json.dumps(sorted(metadata.items())).encode())}
    for name, tensor in tensors.items():
        form = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
        checksums[name] = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, form)
    return {name: f"{checksum:08x}" for name, checksum in checksums.items()}
