"""Mutations: one operator or number of a source changed at a time; the tests have to notice.

`python -m tests.mutation --share 0.2 --json build/mutation.json` tries a fifth of the mutants of the constraints and of
the ops' references, drawn by `--seed`, each in a process forked from one that has imported torch already, and prints
those that no test has noticed. With the file it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # here, that a forked process need not
import pytest
import torch

ROOT = Path(__file__).parent.parent
SECONDS = 300
CONSTRAINTS = [
    "test_rules.py",
    "test_descent_machine.py::test_many_trainings",
    "test_formulations.py",
    "test_descent.py",
]
NAMES = ("bounds", "coupling", "duals", "feasibility", "measurement", "objective", "rules", "saved_state")
OPS = ("layerwise_cross_entropy", "layerwise_reconstruction_loss", "lista_step", "residual_linear", "soft_threshold")
TESTS = {f"cdt_fast/constraints/{name}.py": [f"tests/constraints/{test}" for test in CONSTRAINTS] for name in NAMES}
TESTS |= {
    f"cdt_fast/ops/{op}/reference.py": [f"tests/fuzz/test_fuzz.py::test_some_cases[{op}]", f"tests/ops/test_{op}.py"]
    for op in (*OPS, "symmetric_attention", "unrolled_layer")
}
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def mutants(source: str) -> Iterator[tuple[str, ast.Module]]:
    """Each mutant of a source, with what was changed and where; annotations and what raises are left alone."""
    count = sum(1 for _ in _places(ast.parse(source)))
    for number in range(count):
        tree = ast.parse(source)
        node, field, value = list(_places(tree))[number]
        before = ast.unparse(node)
        setattr(node, field, value)
        yield f"line {node.lineno}: {before} → {ast.unparse(node)}", ast.fix_missing_locations(tree)


def _places(tree: ast.AST) -> Iterator[tuple[Any, str, Any]]:
    """Nodes, and which of their fields would become what."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Raise | ast.arg | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if isinstance(child, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(child.op) in SWAPPED:
            yield child, "op", SWAPPED[type(child.op)]()
        elif isinstance(child, ast.Compare) and type(child.ops[0]) in SWAPPED:
            yield child, "ops", [SWAPPED[type(child.ops[0])](), *child.ops[1:]]
        elif isinstance(child, ast.UnaryOp) and not isinstance(child.op, ast.UAdd):
            yield child, "op", ast.UAdd() if isinstance(child.op, ast.USub) else ast.USub()
        elif isinstance(child, ast.Constant) and isinstance(child.value, bool):
            yield child, "value", not child.value
        elif isinstance(child, ast.Constant) and isinstance(child.value, int | float):
            yield child, "value", child.value + 1
        elif isinstance(child, ast.IfExp):
            yield child, "test", ast.UnaryOp(ast.Not(), child.test)
        if not (isinstance(child, ast.AnnAssign) and child.value is None):
            yield from _places(child)


def survives(path: str, tree: ast.Module) -> bool:
    """Whether the tests of a file pass with its mutant."""
    child = os.fork()
    if child:
        _, code = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(code) == 0
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    signal.alarm(SECONDS)
    whole = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        if Path(loader.path) == ROOT / path:
            return compile(tree, loader.path, "exec")
        return whole(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    os._exit(int(pytest.main(["-x", "-q", "-m", "not slow", *TESTS[path]])))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", default=",".join(TESTS))
    parser.add_argument("--json", type=Path, help="goes on where this file ends")
    options = parser.parse_args()
    assert "cdt_fast" not in sys.modules, "its mutants are imported in their own processes"
    torch.set_num_threads(1)
    _ = hypothesis
    done: dict[str, dict[str, bool]] = {}
    if options.json is not None and options.json.exists():
        done = json.loads(options.json.read_text())
    for path in options.files.split(","):
        chance, found = random.Random(f"{options.seed} {path}"), done.setdefault(path, {})
        for what, tree in mutants((ROOT / path).read_text(encoding="utf-8")):
            if chance.random() >= options.share or what in found:
                continue
            found[what] = survives(path, tree)
            if found[what]:
                print(f"{path}, {what}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(done, indent=1))
    print("| source | mutants | survive |\n|---|---:|---:|")
    for path, found in done.items():
        print(f"| {path} | {len(found)} | {sum(found.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
