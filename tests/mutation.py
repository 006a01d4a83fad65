"""Mutations: one operator or number of a source changed at a time; the tests have to notice.

`python -m tests.mutation --json build/mutation.json` tries every mutant of the constraints and of the ops' references
and prints those that no test has noticed. The tests run once without a mutant, which says how long each takes and
which lines it runs; a mutant then meets the fast tests that run its line until one fails: first those that have noticed
others, then by how long they take. It does so in a process forked from one that has collected all tests, where the code
of its functions is replaced; of what runs on import it is imported anew. It may take three times what its tests took.

With the file it goes on where it was stopped; with `--again` it tries what has survived once more, with the tests as
they are now.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import inspect
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import coverage
import hypothesis  # here, that a forked process need not
import pytest
import torch
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
OPS = sorted(path.parent.name for path in (ROOT / "cdt_fast/ops").glob("*/reference.py"))
CONSTRAINTS = sorted(path.name for path in (ROOT / "cdt_fast/constraints").glob("*.py"))
# Of what group each source is, and the tests of a group.
# `fused.py` hands a GPU's kernel its arguments: no test without Triton runs it.
OTHERS = ("__init__.py", "fused.py")
SOURCES = {f"cdt_fast/constraints/{name}": "constraints" for name in CONSTRAINTS if name not in OTHERS}
SOURCES |= {f"cdt_fast/ops/{op}/reference.py": "ops" for op in OPS}
TESTS = {
    "constraints": [
        "tests/constraints",
        "tests/training/test_depth_schedule.py::test_scales_are_those_of_torchtune_and_of_layerskips_paper",
        "tests/sequence/test_perturbation.py::test_the_area_of_perfect_accuracy_is_the_range_of_gamma",
    ],
    "ops": [
        "tests/fuzz/test_fuzz.py::test_some_cases",
        "tests/ops/test_formulas.py",
        "tests/ops/test_soft_threshold.py",
        "tests/ops/test_residual_linear.py::test_equals_the_formula_with_every_gradient",
        "tests/ops/test_residual_linear.py::test_on_the_threshold",
        "tests/ops/test_layerwise_cross_entropy.py::test_losses_and_gradients_are_the_formula",
    ],
}
# A mutant meets the tests that took no more seconds, and those that compare with a model or formula of their own.
FAST = 0.2
ALWAYS = ("tests/constraints/test_descent_machine.py", "tests/constraints/test_rules.py", "tests/fuzz/", "tests/ops/")
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


def mutants(source: str) -> Iterator[tuple[str, ast.Module, range]]:
    """Each mutant of a source: what was changed and where, itself, and the lines that run it.

    Annotations and what raises are left alone.
    """
    count = sum(1 for _ in _places(ast.parse(source)))
    for number in range(count):
        tree = ast.parse(source)
        node, field, value = list(_places(tree))[number]
        before = ast.unparse(node)
        starts = (one.lineno for one in ast.walk(tree) if isinstance(one, ast.stmt) and one.lineno <= node.lineno)
        lines = range(max(starts), node.end_lineno + 1)
        setattr(node, field, value)
        place = f"line {node.lineno}, column {node.col_offset + 1}"
        yield f"{place}: {before} → {ast.unparse(node)}", ast.fix_missing_locations(tree), lines


def _places(tree: ast.AST) -> Iterator[tuple[Any, str, Any]]:
    """Nodes, and which of their fields would become what."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Raise | ast.arg | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if child in (getattr(tree, "annotation", None), getattr(tree, "returns", None)):
            continue
        if isinstance(child, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(child.op) in SWAPPED:
            yield child, "op", SWAPPED[type(child.op)]()
        elif isinstance(child, ast.Compare) and type(child.ops[0]) in SWAPPED:
            yield child, "ops", [SWAPPED[type(child.ops[0])](), *child.ops[1:]]
        elif isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.USub):
            yield child, "op", ast.UAdd()
        elif isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.Not):
            yield child, "operand", ast.UnaryOp(ast.Not(), child.operand)
        elif isinstance(child, ast.Constant) and isinstance(child.value, bool):
            yield child, "value", not child.value
        elif isinstance(child, ast.Constant) and isinstance(child.value, int | float):
            yield child, "value", child.value + 1
        elif isinstance(child, ast.IfExp):
            yield child, "test", ast.UnaryOp(ast.Not(), child.test)
        yield from _places(child)


class Recorder:
    """A pytest plugin: how many seconds of a processor each test takes, and which lines it runs."""

    def __init__(self, data: str) -> None:
        self.seconds: dict[str, float] = {}
        self._coverage = coverage.Coverage(data_file=data, include=[str(ROOT / path) for path in SOURCES])
        self._coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        started = time.process_time()
        yield
        self.seconds[item.nodeid] = time.process_time() - started
        self._coverage.switch_context("")

    def save(self) -> None:
        self._coverage.stop()
        self._coverage.save()


@dataclass(frozen=True)
class Mutant:
    """Of a source: what was changed, its code, the tests that run it, in order, and how long they may take."""

    path: str
    what: str
    code: CodeType
    tests: list[str]
    seconds: int


class Functions:
    """The functions of the sources that are in memory, whose code can be replaced."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, int], list[FunctionType]] = {}
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                code = one.__code__
                self._found.setdefault((code.co_filename, code.co_name, code.co_firstlineno), []).append(one)

    def put(self, mutant: Mutant) -> None:
        for code in changed_functions(mutant):
            for function in self._found[code.co_filename, code.co_name, code.co_firstlineno]:
                function.__code__ = code


def changed_functions(mutant: Mutant) -> list[CodeType]:
    """The outermost functions of a mutant that are not as they were; empty where something else is not."""
    name = str(ROOT / mutant.path)
    before = compile((ROOT / mutant.path).read_text(encoding="utf-8"), name, "exec")
    if _outside(before) != _outside(mutant.code):
        return []
    return [new for old, new in zip(_functions(before), _functions(mutant.code), strict=True) if old != new]


def _is_function(constant: Any) -> bool:
    named = isinstance(constant, CodeType) and constant.co_name.isidentifier()
    return named and bool(constant.co_flags & inspect.CO_OPTIMIZED)


def _outside(code: CodeType) -> CodeType:
    """What runs on import."""
    rest = (
        None if _is_function(one) else _outside(one) if isinstance(one, CodeType) else one for one in code.co_consts
    )
    return code.replace(co_consts=tuple(rest))


def _functions(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if _is_function(one):
            yield one
        elif isinstance(one, CodeType):
            yield from _functions(one)


class Session:
    """A pytest plugin that runs no test itself: it tries mutants, each in a process with its tests.

    Args:
        mutants: whose functions can be replaced.
        tried: is told of each, and whether it survives.
        seconds: of all tests.
        checked: a file that is there once the tests of all mutants have passed in the order of their durations.
    """

    def __init__(
        self,
        mutants: Sequence[Mutant],
        tried: Callable[[Mutant, bool], None],
        seconds: dict[str, float],
        checked: Path,
    ) -> None:
        self._mutants, self._tried, self._seconds, self._checked = mutants, tried, seconds, checked

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = Functions()
        gc.freeze()

        def work(tests: Sequence[str], mutant: Mutant | None) -> int:
            if mutant is not None:
                functions.put(mutant)
            wanted = [items[test] for test in tests]
            for item, following in zip(wanted, [*wanted[1:], None], strict=True):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    self._checked.with_suffix(".noticed").write_text(item.nodeid)
                    return 1
            return 0

        noticed: Counter[str] = Counter()

        if not self._checked.exists():
            every = sorted(
                {test for mutant in self._mutants for test in mutant.tests}, key=lambda name: self._seconds[name]
            )
            if forked(partial(work, every, None), 3600):
                raise SystemExit("without a mutant the tests fail, in the order of their durations")
            self._checked.touch()
        for mutant in self._mutants:
            ordered = sorted(mutant.tests, key=lambda test: -noticed[test] / (0.05 + self._seconds[test]))
            survives = forked(partial(work, ordered, mutant), mutant.seconds) == 0
            if not survives:
                noticed[self._checked.with_suffix(".noticed").read_text()] += 1
            self._tried(mutant, survives)
        return True


class Chosen:
    """A pytest plugin: some tests, in this order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._place = {name: place for place, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid]
        )


def forked(work: Callable[[], int], seconds: int, log: Path | None = None) -> int:
    """The status of a function in a process of its own, which is ended, with its own ones, after so many seconds of a
    processor."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        _, code = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(code)
    status = 1
    try:
        os.setpgid(0, 0)
        target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(20 * seconds)  # of one that waits for another process
        status = work()
    finally:
        os._exit(status)


def run_tests(arguments: Sequence[str], plugin: object) -> int:
    hypothesis.settings.register_profile("mutation", derandomize=True, database=None)
    hypothesis.settings.load_profile("mutation")
    options = ["-x", "-q", "-s", "--noconftest", "-m", "not slow", "-k", "not TestDescentMachine"]
    return int(pytest.main([*options, *arguments], plugins=[plugin]))


def record(group: str, data: Path) -> dict[str, float]:
    """The seconds of each test of a group; their lines are in `data`."""
    seconds = data.with_suffix(".json")

    def work() -> int:
        recorder = Recorder(str(data))
        status = run_tests(TESTS[group], recorder)
        recorder.save()
        seconds.write_text(json.dumps(recorder.seconds))
        return status

    log = data.with_suffix(".log")
    if not seconds.exists() and forked(work, 3600, log):
        seconds.unlink(missing_ok=True)
        raise SystemExit(f"without a mutant the tests fail: {log}")
    return json.loads(seconds.read_text())


def survives_on_import(mutant: Mutant) -> bool:
    """Whether its tests pass with a mutant that is imported in place of its source."""
    whole = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        return mutant.code if Path(loader.path) == ROOT / mutant.path else whole(loader, name)

    def work() -> int:
        SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
        files = Counter(test.partition("::")[0] for test in mutant.tests)
        return any(run_tests([file], Chosen(mutant.tests)) for file in sorted(files, key=lambda file: files[file]))

    return forked(work, mutant.seconds) == 0


def mutants_of(path: str, seconds: dict[str, float], data: coverage.CoverageData) -> Iterator[Mutant]:
    by_line = data.contexts_by_lineno(str(ROOT / path))
    for what, tree, lines in mutants((ROOT / path).read_text(encoding="utf-8")):
        tests = {test for line in lines for test in by_line.get(line, [])}
        if "" in tests:  # runs on import: others read it without running a line
            tests = set(seconds)
        tests = {test for test in tests if seconds[test] <= FAST or test.startswith(ALWAYS)} or tests
        ordered = sorted(tests, key=lambda test: seconds[test])
        limit = 60 + int(3 * sum(seconds[test] for test in tests))
        yield Mutant(path, what, compile(tree, str(ROOT / path), "exec"), ordered, limit)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--files", default=",".join(SOURCES))
    parser.add_argument("--json", type=Path, required=True, help="goes on where this file ends")
    parser.add_argument("--again", action="store_true", help="tries what has survived, with new tests")
    options = parser.parse_args()
    assert "cdt_fast" not in sys.modules, "its mutants are imported in their own processes"
    torch.set_num_threads(1)
    done: dict[str, dict[str, bool]] = json.loads(options.json.read_text()) if options.json.exists() else {}
    files = [path for path in SOURCES if path in options.files.split(",")]
    by_group: dict[str, list[Mutant]] = {}
    recorded: dict[str, dict[str, float]] = {}
    for group in dict.fromkeys(SOURCES[path] for path in files):
        covered = options.json.with_suffix(f".{group}.coverage")
        if options.again:
            for suffix in (".coverage", ".json", ".checked"):
                covered.with_suffix(suffix).unlink(missing_ok=True)
        seconds = recorded[group] = record(group, covered)
        data = coverage.CoverageData(str(covered))
        data.read()
        wanted = True if options.again else None
        of_group = [one for path in files if SOURCES[path] == group for one in mutants_of(path, seconds, data)]
        by_group[group] = [one for one in of_group if done.get(one.path, {}).get(one.what) is wanted]
    progress = tqdm(total=sum(map(len, by_group.values())), file=sys.stderr, mininterval=30)

    def tried(mutant: Mutant, survives: bool) -> None:
        progress.update()
        done.setdefault(mutant.path, {})[mutant.what] = survives
        if survives:
            progress.write(f"{mutant.path}, {mutant.what}{'' if mutant.tests else ' (no test runs it)'}")
        options.json.write_text(json.dumps(done, indent=1))

    in_place = {group: [one for one in some if changed_functions(one)] for group, some in by_group.items()}
    for group, some in in_place.items():
        checked = options.json.with_suffix(f".{group}.checked")
        child = os.fork() if some else 0  # here nothing is imported of what is imported anew below
        if some and not child:
            run_tests(TESTS[group], Session(some, tried, recorded[group], checked))
            os._exit(0)
        if child:
            os.waitpid(child, 0)
            done = json.loads(options.json.read_text())
            progress.update(len(some))
    for mutant in (one for group, some in by_group.items() for one in some if one not in in_place[group]):
        tried(mutant, not mutant.tests or survives_on_import(mutant))
    print("| source | mutants | survive |\n|---|---:|---:|")
    for path, found in done.items():
        print(f"| {path} | {len(found)} | {sum(found.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
