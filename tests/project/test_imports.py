"""Who may import whom: imports go down an order of layers, in no circle, and are relative inside the package.

Every import counts, those inside functions too, and modules that `importlib.import_module` loads by a name that begins
with a literal.
"""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kimi_k3

ROOT = Path(kimi_k3.__file__).parent

# From the bottom up. Imports go to layers below, or within one layer as long as that makes no circle. Every file of the
# root and every folder is one unit.
LAYERS = (
    ("kernels",),
    ("*_kimi_k3",),
    ("kimi_k3",),  # the root's __init__
    ("cli",),
    ("parallel", "costs", "conversion", "eval", "training"),
    ("serving", "speculative"),
    ("__main__",),
)
FOLDERS = {"kernels", "cli", "parallel", "costs", "conversion", "eval", "training", "serving", "speculative"}
# What uses the package from outside, by its absolute name.
OUTSIDE = {"benchmarks", "checkpoints", "docs", "examples", "recipes", "tests"}
SCRIPTS = {"setup", "demo"}
# transformers enters continuous batching by a method of the model. What stands behind it is no part of remote code,
# whose files have no way to it but the installed package's name.
ENTRIES = {("generation_kimi_k3.py", ("kimi_k3", "serving", "manager"))}


def sources(root: Path) -> list[Path]:
    """Python files of the package. `eval/tasks` is no part of it: lm-eval loads its file by a path."""
    files = [file for file in root.glob("*.py") if file.stem not in SCRIPTS]
    for folder in FOLDERS:
        files += (root / folder).rglob("*.py")
    return sorted(file for file in files if "tasks" not in file.relative_to(root).parts)


def unit_of(module: tuple[str, ...]) -> str:
    """("eval", "suite") -> "eval"; () and ("__init__",) -> "kimi_k3"."""
    return module[0] if module and module != ("__init__",) else "kimi_k3"


def layer_of(unit: str) -> int | None:
    for layer, names in enumerate(LAYERS):
        if any(unit == name or (name[0] == "*" and unit.endswith(name[1:])) for name in names):
            return layer
    return None


def imported(root: Path, file: Path) -> list[tuple[int, bool, tuple[str, ...]]]:
    """(line, whether it is a module of the package named relatively, parts of its name) of every import of a file."""
    package = file.relative_to(root).parent.parts
    found = []

    def is_module(parts):
        place = root.joinpath(*parts)
        return place.with_suffix(".py").is_file() or place.is_dir()

    def relative(line, level, name):
        if level - 1 > len(package):
            raise ValueError(f"{file}:{line} imports from above the package")
        base = package[: len(package) - (level - 1)]
        found.append((line, True, base + tuple(part for part in name.split(".") if part)))

    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, False, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.lineno, False, tuple(node.module.split("."))))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                relative(node.lineno, node.level, node.module or "")
                if is_module((*found[-1][2], alias.name)):
                    found[-1] = (*found[-1][:2], (*found[-1][2], alias.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if not isinstance(first, ast.Constant):
                raise ValueError(f"{file}:{node.lineno} imports a module whose name only runs can tell")
            level = len(first.value) - len(first.value.lstrip("."))
            if level:
                relative(node.lineno, level, first.value.lstrip("."))
            else:
                found.append((node.lineno, False, tuple(first.value.split("."))))
    return found


def fault_of(unit: str, inside: bool, name: tuple[str, ...]) -> str | None:
    """Why `unit` may not import that; None if it may."""
    if not inside and name[0] == "kimi_k3":
        return "names the package: imports inside it are relative"
    if not inside and name[0] in OUTSIDE:
        return f"imports {name[0]}, which lies outside of the package"
    if not inside and name[0] == "triton" and unit != "kernels":
        return "imports Triton, which only kernels/ does"
    if inside and layer_of(unit_of(name)) is None:
        return f"imports {unit_of(name)}, which is in no layer"
    if inside and layer_of(unit_of(name)) > layer_of(unit):
        return f"imports {unit_of(name)}, which lies above {unit}"
    return None


def faults(root: Path) -> list[str]:
    """A sentence for every import that may not be."""
    found, graph = [], {}
    for file in sources(root):
        place = file.relative_to(root)
        unit = unit_of(place.with_suffix("").parts)
        if layer_of(unit) is None:
            found.append(f"{place} is in no layer")
            continue
        for line, inside, name in imported(root, file):
            fault = fault_of(unit, inside, name)
            if fault is not None and (str(place), name) not in ENTRIES:
                found.append(f"{place}:{line} {fault}")
            elif inside and unit_of(name) != unit:
                graph.setdefault(unit, set()).add(unit_of(name))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"a circle: {' <- '.join(error.args[1])}")
    return found


def test_imports_go_down_and_are_relative():
    assert not faults(ROOT)


def test_every_file_of_the_package_is_looked_at():
    """Each folder with Python files is of a layer or known to lie outside, and what a file imports is found."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    folders = {name for name in folders if not name.startswith(".")}  # environments, caches of tools
    assert folders - OUTSIDE - {"build"} == FOLDERS
    looked_at = {str(file.relative_to(ROOT)) for file in sources(ROOT)}
    assert {"__init__.py", "modeling_kimi_k3.py", "kernels/kda.py", "eval/suite.py", "__main__.py"} <= looked_at
    seen = {name for _, inside, name in imported(ROOT, ROOT / "serving" / "commands.py") if inside}
    assert {("cli", "common"), ("costs", "curves"), ("serving", "server")} <= seen  # two of them in functions


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        pytest.param("kernels/kda.py", "from ..cache_kimi_k3 import x", "lies above kernels", id="up"),
        pytest.param("eval/suite.py", "def f():\n    from ..serving import x", "lies above eval", id="in a function"),
        pytest.param("eval/suite.py", "from .. import serving", "lies above eval", id="up by the root"),
        pytest.param("eval/suite.py", "from ..costs import x", "a circle", id="circle of folders"),
        pytest.param("cache_kimi_k3.py", "from .layers_kimi_k3 import x", "a circle", id="circle of files"),
        pytest.param(
            "cache_kimi_k3.py", "import importlib\nimportlib.import_module(f'.layers_{1}', __package__)", "layers_",
            id="by importlib",
        ),
        pytest.param("cli/common.py", "from ..__main__ import x", "lies above cli", id="entry"),
        pytest.param("eval/suite.py", "from ..recipes.small import x", "recipes, which is in no layer", id="recipe"),
        pytest.param("eval/suite.py", "import tests.conftest", "outside of the package", id="tests"),
        pytest.param("eval/suite.py", "import kimi_k3.eval", "are relative", id="absolute"),
        pytest.param("eval/suite.py", "def f():\n    from kimi_k3 import x", "are relative", id="absolute inside"),
        pytest.param("eval/suite.py", "def f():\n    import triton", "only kernels/ does", id="Triton"),
    ],
)  # fmt: skip
def test_each_fault_is_found(file, line, fault, tmp_path):
    """A small tree without a fault, and the same with one."""
    tree = {
        "__init__.py": "from .layers_kimi_k3 import x",
        "cache_kimi_k3.py": "import torch",
        "layers_kimi_k3.py": "from .cache_kimi_k3 import x\nfrom .kernels.kda import x",
        "kernels/kda.py": "import triton",
        "cli/common.py": "from .. import x",
        "__main__.py": "from .eval.suite import x\nfrom .cli import common",
        "costs/formulas.py": "from ..eval.suite import x",
        "eval/suite.py": "from .words import x\nfrom ..cli.common import x",
        "eval/words.py": "",
        "serving/engine.py": "from ..costs import formulas",
        "recipes/small/train.py": "import kimi_k3.eval.suite",
    }
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert not faults(tmp_path)
    (tmp_path / file).write_text(f"{tree[file]}\n{line}\n")
    assert any(fault in found for found in faults(tmp_path))


@pytest.mark.one_release
def test_what_imports_load():
    """The package, and then the recall suite, in a fresh process."""
    script = "import sys, kimi_k3; print(*sys.modules); import kimi_k3.eval.suite; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True).stdout
    package, suite = (set(names.split()) for names in loaded.splitlines())
    assert "kimi_k3.kernels.kda" in package and "kimi_k3.eval.suite" in suite
    for names, wanted in ((package, {"kernels"}), (suite, {"kernels", "eval"})):
        parts = {name.split(".")[1] for name in names if name.startswith("kimi_k3.")}
        assert parts & FOLDERS == wanted


def test_the_wheel_holds_the_package_alone(tmp_path):
    """What `setup.py` installs: every file that is looked at here, the harness's tasks, and nothing else."""
    build = ["setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run([sys.executable, *build], cwd=ROOT, check=True, capture_output=True)
    installed = {str(path.relative_to(tmp_path / "kimi_k3")) for path in tmp_path.rglob("*") if path.is_file()}
    tasks = {str(path.relative_to(ROOT)) for path in (ROOT / "eval" / "tasks").iterdir() if path.is_file()}
    assert installed == {str(file.relative_to(ROOT)) for file in sources(ROOT)} | tasks
    assert not re.search("recipes|setup|demo", " ".join(installed))
