"""Fuzzed files: videos, arrays, pictures, tables, archives and settings that disks, people or strangers have damaged.

`python -m tests.fuzz.files --files 500` tries so many of each kind, in processes of their own with a bound on memory
and time. A file is read as it was or otherwise, or refused in one line; nothing else may come of it.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import av
import numpy as np
import tomli_w
from PIL import Image

from cdt_fast import cli
from cdt_fast.errors import InputError
from cdt_fast.fetch.unpack import unpack_archive
from cdt_fast.sequence.corpus import instructions_of
from cdt_fast.sequence.data.rows import read_rows
from cdt_fast.sequence.data.text import read_table
from cdt_fast.sequence.settings import LanguageSettings, TextSettings
from cdt_fast.video.settings import VideoSettings
from tests.tiny import TINY, scrolling_clip
from tests.tiny_text import TINY_LANGUAGE, TINY_TEXT, reviews

MEMORY = 3 << 30  # bytes of addresses beside those of the imports: none of the files has a megabyte
SECONDS = 60
BATCH = 25
ODD_WORDS = ["NaN", "-1", "1e400", "9" * 5000, '"', "[" * 200, "{}", "null", "true", "\ud800", "\0", "\x1b[2J", "é", ""]

ODD_VALUES = ["nan", "inf", "-1", "0", "1e308", "1_000", "true", "[]", "[1, 2]", "[1e999]", "[true]", "[[[[1]]]]", "{}"]
ODD_VALUES += ["{a = 1}", '{"1" = "1.01x"}', "1979-05-27", "07:32:00", "9" * 24, '""', '"x"', '"none"', '"auto"']
ODD_VALUES += ['"nan"', '"-1"', '"1=1.01x,2=0.9"', '"1,2,x"', f'"{"9" * 5000}"', r'"\u0000"', '["a"]', '"0.5x"']


def make_files(folder: Path) -> dict[str, list[Path]]:
    """Whole files of each kind."""
    frames = scrolling_clip(12)
    for name, codec, form in [
        *(("a.mp4", "mpeg4", "yuv420p"), ("b.mp4", "libx264", "yuv420p"), ("c.avi", "mjpeg", "yuvj420p")),
        *(("d.mkv", "ffv1", "yuv420p"), ("e.ts", "mpeg2video", "yuv420p"), ("f.webm", "libvpx", "yuv420p")),
    ]:
        with av.open(str(folder / name), "w") as container:
            stream = container.add_stream(codec, rate=25)
            stream.width, stream.height, stream.pix_fmt = 32, 32, form  # type: ignore[attr-defined]
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="gray")))  # type: ignore[attr-defined]
            container.mux(stream.encode())
    np.save(folder / "a.npy", frames)
    np.savez(folder / "b.npz", frames=frames)
    np.savez_compressed(folder / "c.npz", frames=frames / 255.0)
    for suffix in ("png", "jpg", "bmp", "tif"):
        Image.fromarray(frames[0]).save(folder / f"frame.{suffix}")
    rows = [{"text": text, "label": label} for text, label in reviews(30)]
    (folder / "a.tsv").write_text("text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows))
    (folder / "b.csv").write_text("text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\n' for row in rows))
    (folder / "c.json").write_text(json.dumps(rows))
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"instruction": row["text"], "input": "", "output": row["label"]} for row in rows]
    (folder / "e.json").write_text(json.dumps(asked))
    (folder / "video.toml").write_text(tomli_w.dumps({"task": "video", **TINY}))
    (folder / "text.toml").write_text(tomli_w.dumps({"task": "text", **TINY_TEXT}))
    (folder / "lm.toml").write_text(tomli_w.dumps({"task": "lm", **TINY_LANGUAGE}))
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(5):
            archive.writestr(f"Set/{number}.bin", bytes(number * 1000))
    for suffix in ("", ".gz", ".xz", ".bz2"):
        with tarfile.open(folder / f"b.tar{suffix}", f"w:{suffix[1:]}") as packed:  # type: ignore[call-overload]  # one of its words
            for number in range(5):
                member = tarfile.TarInfo(f"Set/{number}.bin")
                member.size = 1000 * number
                packed.addfile(member, io.BytesIO(bytes(member.size)))
    by_suffix = {
        "video": (".mp4", ".avi", ".mkv", ".ts", ".webm"),
        "array": (".npy", ".npz"),
        "picture": (".png", ".jpg", ".bmp", ".tif"),
        "table": (".tsv", ".csv", ".json", ".jsonl"),
        "settings": (".toml",),
        "archive": (".zip", ".tar", ".gz", ".xz", ".bz2"),
    }
    files = sorted(folder.iterdir())
    return {kind: [path for path in files if path.suffix in suffixes] for kind, suffixes in by_suffix.items()}


def damage(content: bytes, other: bytes, chance: random.Random, words: bool) -> tuple[bytes, str]:
    """Change a file in one to three places; says how."""
    data, done = bytearray(content), []
    for _ in range(chance.choice([1, 1, 2, 3])):
        place = chance.randrange(len(data)) if data else 0
        place = min(place, chance.choice([len(data), len(data), 200]))
        ways = ["bit", "byte", "zeros", "cut", "longer", "number", "twice", "splice", "lost"]
        way = chance.choice([*ways, *["word"] * 9] if words else ways)
        end = place + chance.choice([1, 4, 30, 500])
        if way == "bit" and data:
            data[min(place, len(data) - 1)] ^= 1 << chance.randrange(8)
        elif way == "byte":
            data[place : place + 1] = chance.randbytes(1)
        elif way == "zeros":
            data[place:end] = bytes(len(data[place:end]))
        elif way == "cut":
            del data[place:]
        elif way == "longer":
            data += chance.randbytes(100)
        elif way == "number":
            number = chance.choice([0, 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1])
            data[place : place + 4] = number.to_bytes(4, chance.choice(["little", "big"]))  # type: ignore[arg-type]
        elif way == "twice":
            data[place:place] = data[place:end]
        elif way == "splice":
            data[place:] = other[place:]
        elif way == "lost":
            del data[place:end]
        else:
            parted = chance.choice([" ", ",", "\n", '"', "= "])
            parts = data.decode("utf-8", "surrogateescape").split(parted)
            parts[chance.randrange(len(parts))] = chance.choice(ODD_WORDS)
            data = bytearray(parted.join(parts).encode("utf-8", "surrogatepass"))
        done.append(f"{way} at {place}")
    return bytes(data), ", ".join(done)


def _other_value(text: str, chance: random.Random) -> tuple[bytes, str]:
    """A setting with another value, which is TOML."""
    lines = text.splitlines()
    number = chance.choice([number for number, line in enumerate(lines) if " = " in line])
    lines[number] = f"{lines[number].partition(' = ')[0]} = {chance.choice(ODD_VALUES)}"
    return "\n".join(lines).encode(), lines[number][:80]


def _command(*words: str) -> None:
    """A command that ends with 0, with 1 for a report of problems, or with 2 and one line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = cli.main([*words])
    said = [line for line in err.getvalue().splitlines() if line.startswith("cdt-fast: ")]
    lines = [line for line in said if not line.startswith("cdt-fast: warning: ")]
    if status not in (0, 1, cli.BAD_INPUT) or (status == cli.BAD_INPUT) != (len(lines) == 1):
        raise AssertionError(f"ends with {status}: {err.getvalue()[-300:]}")
    if status:
        said = lines[0] if lines else next(line for line in out.getvalue().splitlines() if "PROBLEM" in line)
        raise InputError(said)


def _read_picture(path: Path) -> None:
    folder = path.with_suffix("")
    folder.mkdir()
    path.rename(folder / path.name)
    shutil.copy(folder / path.name, folder / f"again{path.suffix}")
    _command("data", "check", str(folder))


def _read_table(path: Path) -> None:
    if path.stem.startswith("e"):
        instructions_of(path, read_rows(path))
    else:
        read_table(path)


def _read_settings(path: Path) -> None:
    kinds = {"video": VideoSettings, "text": TextSettings, "lm": LanguageSettings}
    kinds[path.stem.partition("-")[0]].load(path)


READ: dict[str, Callable[[Path], object]] = {
    "video": lambda path: _command("data", "check", str(path)),
    "array": lambda path: _command("data", "check", str(path)),
    "picture": _read_picture,
    "table": _read_table,
    "settings": _read_settings,
    "archive": lambda path: unpack_archive(path, path.with_name("unpacked")),
}


def try_file(kind: str, files: list[Path], seed: int, place: Path) -> str:
    """Damage one of the files and read it: "read" or "refused".

    Raises:
        Exception: whatever is no InputError of one line, a finding.
    """
    chance = random.Random(f"{kind} {seed}")
    chosen = chance.choice(files)
    if kind == "settings" and chance.random() < 0.5:
        content, how = _other_value(chosen.read_text(), chance)
    else:
        others = chance.choice(files).read_bytes()
        content, how = damage(chosen.read_bytes(), others, chance, kind in ("table", "settings"))
    folder = place / str(seed)
    folder.mkdir()
    path = folder / f"{chosen.stem}-{seed}{chosen.suffix}"
    path.write_bytes(content)
    try:
        READ[kind](path)
    except InputError as error:
        if "\n" in str(error) or not str(error).strip():
            raise AssertionError(f"says more than a line ({how})") from error
        return "refused"
    except Exception as error:
        raise AssertionError(f"{chosen.name}, {how}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "read"


def _batch(kind: str, files: list[Path], seeds: range, place: Path, log: Path) -> None:
    """In a process of its own: each seed, and what came of it, on a line of the log."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, pages + MEMORY))
    with log.open("w") as file:
        for seed in seeds:
            file.write(f"{seed}\t")
            file.flush()
            signal.alarm(SECONDS)
            try:
                found = try_file(kind, files, seed, place)
            except Exception as error:
                where = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
                found = f"PROBLEM {error} ({Path(where.filename).name}:{where.lineno})"
            file.write(" ".join(found.split())[:400] + "\n")
            file.flush()


def check_whole(files: dict[str, list[Path]], place: Path) -> None:
    """Files that nothing has damaged are read."""
    for kind, paths in files.items():
        for path in paths:
            folder = place / f"{path.name}-whole"
            folder.mkdir()
            READ[kind](Path(shutil.copy(path, folder)))


def campaign(kind: str, files: list[Path], seeds: range, place: Path) -> tuple[dict[str, int], list[str]]:
    """How many were read and refused, and what was found."""
    counts, problems = {"read": 0, "refused": 0}, []
    log = place / "log"
    first = seeds.start
    while first < seeds.stop:
        some = range(first, min(first + BATCH, seeds.stop))
        gc.collect()  # a child that frees a decoder of its parent's waits for threads that it does not have
        child = os.fork()
        if not child:
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, 2)
            _batch(kind, files, some, place, log)
            os._exit(0)
        _, code = os.waitpid(child, 0)
        lines = [line.partition("\t") for line in log.read_text().splitlines()]
        for seed, _, found in lines:
            if found in counts:
                counts[found] += 1
            else:
                ended = os.waitstatus_to_exitcode(code)
                problems.append(f"{kind}, seed {seed}: {found.removeprefix('PROBLEM ') or f'ends with {ended}'}")
        first += max(1, len(lines))
    return counts, problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.files", description=__doc__)
    parser.add_argument("--files", type=int, default=200, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--kinds", default=",".join(READ))
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
    (place / "whole").mkdir()
    failed = False
    try:
        files = make_files(place / "whole")
        check_whole({kind: files[kind] for kind in options.kinds.split(",")}, place)
        print("| kind | files | read | refused | problems |\n|---|---:|---:|---:|---:|")
        for kind in options.kinds.split(","):
            seeds = range(options.seed, options.seed + options.files)
            counts, problems = campaign(kind, files[kind], seeds, place)
            print(f"| {kind} | {len(seeds)} | {counts['read']} | {counts['refused']} | {len(problems)} |", flush=True)
            print("\n".join(problems), file=sys.stderr, flush=True)
            failed = failed or bool(problems)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
