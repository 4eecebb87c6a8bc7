"""Careless one-line changes, each of which the tests of its file (`which_tests.py`) should notice.

    python tests/mutants.py [-n 60] [--seed 0] [--jobs 1] [--quick] [FILE ...]

Changes are drawn from all that the operators below can do to the code, and made in a copy of the tree. What a change
cannot break is left out by rule: texts, logs and pictures, types, what a comment calls a matter of speed or memory,
buffers that grow, arguments that only guard, and what nothing but a GPU runs. Ends with 1 if fewer than nine of ten are
caught (`--quick`: three of four).
"""

import argparse
import ast
import copy
import functools
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from which_tests import TESTS

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as `conftest.py` does
import peft  # noqa: F401  # once for all changes
import transformers.models.auto.modeling_auto  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "kernels", "training", "serving", "costs", "speculative", "parallel", "conversion")
# Pictures; Gluon, which nothing but a GPU runs.
LEFT_OUT = re.compile(r"_gluon|gluon_tools|curves|__init__|__main__")
CPU_SECONDS = 900  # of a process; a change that makes a loop endless is caught by it

FLIPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult, ast.LShift, ast.RShift, ast.Pow)
OPPOSITE = {
    "min": "max", "minimum": "maximum", "amin": "amax", "clamp_min": "clamp_max", "any": "all", "floor": "ceil",
}  # fmt: skip
OPPOSITE |= {value: key for key, value in OPPOSITE.items()}
SYMMETRIC = {*OPPOSITE, "equal", "isinstance", "print", "zip", "transpose", "promote_types"}
SAID = {
    "print", "warn", "warning", "info", "debug", "exception", "_tell", "tqdm", "add_argument", "add_parser",
    "plot", "loglog", "semilogx", "legend", "savefig", "subplots", "set_title", "set_xlabel", "set_ylabel",
    "set_materialize_grads",
}  # fmt: skip
# Keyword arguments whose loss shows in a text, in speed, on a GPU, or where a guard would have spoken.
HARMLESS = {
    "help", "metavar", "description", "strict", "encoding", "daemon", "device", "num_warps", "num_stages",
    "non_blocking", "marker", "label", "input_precision", "thread_name_prefix",
    "decoder",  # of `get_text_config`: no model of the family has two texts
}  # fmt: skip
SPEED = re.compile(r"measured|at once|memory|faster|fills|registers|at a time|costs (less|more)|program|interpreter")


class Sites(ast.NodeVisitor):
    """`found`: (node, what takes its place) of every change."""

    def __init__(self, source: str):
        self.lines, self.found = source.splitlines(), []
        self.rooms: set[int] = set()  # ids of the sizes of buffers
        self.visit(ast.parse(source))

    def put(self, node, new=None, **fields):
        if new is None:
            new = copy.copy(node)
            for name, value in fields.items():
                setattr(new, name, value)
        if node.lineno == node.end_lineno:
            self.found.append((node, ast.unparse(new) if isinstance(new, ast.AST) else new))

    def condition(self, node):
        self.put(node.test, ast.Constant(False))
        if not isinstance(node, ast.While):
            self.put(node.test, ast.Constant(True))

    def visit_If(self, node):
        test = ast.unparse(node.test)
        if test.endswith(".is_cuda"):
            for part in node.orelse:
                self.visit(part)
        elif "__name__" not in test:
            self.condition(node)
            self.generic_visit(node)

    def visit_While(self, node):
        self.condition(node)
        self.generic_visit(node)

    visit_IfExp = visit_While

    def visit_Compare(self, node):
        if type(node.ops[0]) in FLIPPED:
            self.put(node, ops=[FLIPPED[type(node.ops[0])](), *node.ops[1:]])
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.put(node, op=FLIPPED[type(node.op)]())
        for place in range(len(node.values)):
            rest = [value for i, value in enumerate(node.values) if i != place]
            self.put(node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not | ast.USub):
            self.put(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if type(node.op) in FLIPPED:
            self.put(node, op=FLIPPED[type(node.op)]())
        if isinstance(node.op, ORDERED):
            self.put(node, left=node.right, right=node.left)
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        if type(node.op) in FLIPPED:
            self.put(node, op=FLIPPED[type(node.op)]())
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.put(node, ast.Constant(not node.value))
        elif isinstance(node.value, int):
            if id(node) not in self.rooms:  # a buffer that is larger than need be takes memory alone
                self.put(node, str(node.value + 1))
            if node.value:
                self.put(node, str(node.value - 1))
        elif isinstance(node.value, float):
            self.put(node, repr(node.value * 2 or 1.0))

    def visit_Slice(self, node):
        for bound in filter(None, (node.lower, node.upper)):
            self.put(bound, "")
            self.put(bound, f"{ast.unparse(bound)} + 1")
        self.generic_visit(node)

    def visit_Call(self, node):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in SAID or re.search(r"logg|axes|\bbar\.", ast.unparse(node.func)):
            return
        # What a load reads beside its mask is a matter of a GPU's memory, where the value is not used.
        harmless = HARMLESS | ({"mask", "other"} if name == "load" else set())
        if name in OPPOSITE:
            new = copy.deepcopy(node.func)
            setattr(new, "id" if isinstance(new, ast.Name) else "attr", OPPOSITE[name])
            self.put(node.func, new)
        if len(node.args) > 1 and name not in SYMMETRIC and ast.dump(node.args[0]) != ast.dump(node.args[1]):
            self.put(node, args=[node.args[1], node.args[0], *node.args[2:]])
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in harmless:
                self.put(node, keywords=[other for other in node.keywords if other is not keyword])
        node = copy.copy(node)
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in HARMLESS]
        if name == "empty":
            self.rooms |= set(map(id, node.args))
        self.generic_visit(node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            before = len(self.found)
            self.visit(node.value)
            if len(self.found) > before or not node.value.args:  # else a text
                self.put(node, ast.Pass())

    def visit_Assign(self, node):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        comment, line = self.lines[node.end_lineno - 1].partition("#")[2], node.lineno - 2
        while line >= 0 and self.lines[line].lstrip().startswith("#"):
            comment, line = self.lines[line] + comment, line - 1
        if not (names and names[0].isupper() and node.col_offset == 0 and SPEED.search(comment)):
            self.visit(node.value)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node):  # neither types nor decorators
        if node.name not in ("extra_repr", "__repr__"):
            for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
                self.visit(part)

    def visit_ClassDef(self, node):
        for part in node.body:
            self.visit(part)

    def visit_Raise(self, node):
        """Whether it is raised is its condition's matter."""

    visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Raise


def changed(source: str, node: ast.AST, new: str) -> str:
    lines = source.splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    new = new if isinstance(node, ast.stmt) or not new else f"({new})" if " " in new else new
    lines[node.lineno - 1] = (line[: node.col_offset] + new.encode() + line[node.end_col_offset :]).decode()
    return "".join(lines)


def drawn(files, count: int, seed: int):
    """(file, number of the line, source with the change), and from how many they were drawn."""
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    sites = [(file, *site) for file, source in sources.items() for site in Sites(source).found]
    found = []
    for file, node, new in random.Random(seed).sample(sites, len(sites)):
        text = changed(sources[file], node, new)
        try:
            if ast.dump(ast.parse(text)) != ast.dump(ast.parse(sources[file])):
                found.append((file, node.lineno, text))
        except SyntaxError:
            continue
        if len(found) == count:
            break
    return found, len(sites)


class OneCaseFirst:
    """Of each file one case of every test before the others: where the first fails, the rest need not run."""

    @staticmethod
    def pytest_collection_modifyitems(items):
        files, tests, places = {}, set(), []
        for item in items:
            test = item.nodeid.partition("[")[0]
            places.append((files.setdefault(item.path, len(files)), test in tests))
            tests.add(test)
        items[:] = [items[i] for i in sorted(range(len(items)), key=places.__getitem__)]


def failures(tree: Path, tests, *options: str) -> list[str]:
    """Those of `tests`, as pytest names them in the folder of tests, that fail with the tree as it is.

    In a fork of this process, which has imported what takes seconds; the package itself it imports from the tree.
    """
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.nice(max(0, 5 - os.nice(0)))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 10))  # ends it by SIGXCPU
            os.environ["PYTHONPATH"] = str(tree.parent)
            sys.path.insert(0, str(tree.parent))
            os.chdir(tree / "tests")
            quiet = "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"
            os._exit(pytest.main([*quiet, *options, *tests], plugins=[OneCaseFirst()]))
        _, status = os.waitpid(child, 0)
        output.seek(0)
        found = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", output.read(), re.M)
    if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
        raise SystemExit("the tests were killed from outside, which says nothing of the change")
    code = os.waitstatus_to_exitcode(status)
    return found or ([] if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else [f"ended with {code}"])


def make_tree(folder: str):
    """A copy of the repository for this process alone, in a folder named like the package."""
    global TREE
    TREE = Path(tempfile.mkdtemp(dir=folder)) / "kimi_k3"
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, TREE / name)


def tried(change, quick: bool):
    """(area, what is told of the change, the test that noticed it or None)."""
    file, number, text = change
    source, started = (TREE / file).read_text(encoding="utf-8"), time.monotonic()
    (TREE / file).write_text(text, encoding="utf-8")
    tests = filter(re.compile("/test_").search, TESTS[file])
    failure = next(iter(failures(TREE, tests, "-x", *(("-m", "quick") if quick else ()))), None)
    (TREE / file).write_text(source, encoding="utf-8")
    before, after = (lines.splitlines()[number - 1].strip() for lines in (source, text))
    told = f"{file}:{number}\n    - {before}\n    + {after}"
    print(f"{'SURVIVED' if failure is None else 'caught'} {time.monotonic() - started:4.0f} s {told}", flush=True)
    print(f"    {failure}" if failure else "", flush=True)
    return file.rpartition("/")[0] or "root", told, failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="draw from these alone")
    parser.add_argument("-n", type=int, default=60, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, each with a copy of the tree")
    parser.add_argument("--quick", action="store_true", help="of the tests of a file those of `make quick` alone")
    arguments = parser.parse_args()
    names = [file for file in TESTS if file.rpartition("/")[0] in FOLDERS and not LEFT_OUT.search(file)]
    changes, number = drawn(arguments.files or names, arguments.n, arguments.seed)
    print(f"{len(changes)} of {number} changes, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")  # what this process has imported serves all
        with ProcessPoolExecutor(arguments.jobs, fork, make_tree, (folder,)) as pool:
            results = list(pool.map(functools.partial(tried, quick=arguments.quick), changes))
            named = sorted({failure for *_, failure in results if failure is not None and "::" in failure})
            broken = pool.submit(broken_anyway, named).result()
    made, caught = Counter(area for area, *_ in results), Counter(area for area, _, failure in results if failure)
    for area in sorted(made):
        print(f"{area:12s} {caught[area]:3d} of {made[area]:3d}")
    print(f"{'all':12s} {caught.total():3d} of {made.total():3d}")
    print("\n".join(["", *(told for _, told, failure in results if failure is None)]))
    if broken:
        print("these tests fail without any change, so that what they caught does not count:", *broken, sep="\n    ")
    share = 0.75 if arguments.quick else 0.9
    return 0 if caught.total() >= share * made.total() and not broken else 1


def broken_anyway(tests: list[str]) -> list[str]:
    return failures(TREE, tests) if tests else []


if __name__ == "__main__":
    sys.exit(main())
