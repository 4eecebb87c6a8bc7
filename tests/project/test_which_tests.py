"""The table of source files and their tests is whole, and `make quick` is what the table says."""

from pathlib import Path

import kimi_k3
from which_tests import QUICK, TESTS

ROOT = Path(kimi_k3.__file__).parent
# Of the suite itself and of the text of its files.
OF_NO_FILE = {
    "project/test_which_tests.py",
    "project/test_tiny.py",
    "project/test_mutants.py",
    "project/test_pairwise.py",
    "project/test_faults_index.py",
}
NOT_THE_PACKAGE = ("tests", "benchmarks", "docs", "examples", "build", "setup.py", "demo.py")


def sources():
    """Every Python file of the package, relative to its root."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    return {str(path) for path in found if path.parts[0] not in NOT_THE_PACKAGE and path.parts[0][0] != "."}


def test_every_source_file_has_tests():
    assert sources() == set(TESTS)
    assert all(TESTS.values())


def test_every_test_file_belongs_to_a_source_file():
    named = {name for names in TESTS.values() for name in names}
    there = {str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {name for name in named if "/test_" in name} == there - OF_NO_FILE
    assert all((ROOT / "tests" / name).exists() for name in named)
    assert all(len(names) == len(set(names)) for names in TESTS.values())


def test_what_the_quick_tests_leave_out_is_there():
    """A test of another name would run in `make quick` from then on."""
    for name, left_out in QUICK.items():
        text = (ROOT / "tests" / name).read_text(encoding="utf-8")
        assert [part for part in left_out.split("|") if part.isidentifier() and part not in text] == [], name
