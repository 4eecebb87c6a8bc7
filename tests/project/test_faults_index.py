"""Which public fault reports have a case in this suite, and why the others have none.

A test claims a report by its number in its docstring, as in "Fault 17: ..." or "Faults 68, 70, 74: ...". The sections
below list the reports that the suite must answer for; each is claimed by a test or has a reason here, never both.
"""

import ast
import re
from pathlib import Path

SECTIONS = {
    "Loading, versions, dependencies, saving": [1, 3, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 27, 28],
    "Padding and batches": [30, 31, 32, 34],
    "Rollback and beams": [35, 36, 37, 38, 40, 41, 42, 44, 45],
    "State reuse": [46, 47, 48, 49, 50, 51],
    "Packing": [53, 54, 55, 56, 58, 60],
    "KDA numerics": [26, 62, 63, 64, 66, 68, 69, 70, 71, 73, 74, 75, 76, 77],
    "Hardware reach": [78, 79, 81, 82, 83, 84],
    "LoRA and expert access": [13, 86, 88, 89, 90, 91, 92, 93, 95],
    "Training, checkpointing, distribution": [96, 97, 98, 100, 101, 102, 104, 105, 107, 108],
    "MXFP4 and conversion": [12, 109, 111, 112, 114, 115, 117, 118, 119, 120],
    "Evaluation": [127, 128],
}

NO_CASE = {
    21: "the package has no tokenizer code yet, so nothing is imported from another model's tokenizer",
    22: "the same: AutoTokenizer reads the tokenizer.json of a folder, there is no tokenizer class of ours to lose",
    23: "a scheduled job against the main branch of transformers needs a network; the suite runs on both ends of the "
    "supported range, and the loader's signature is checked when checkpoint_kimi_k3 is imported",
}


def claimed():
    """Report -> the tests that name it."""
    tests = {}
    for path in sorted(Path(__file__).parents[1].glob("*/test_*.py")):
        if path.name == Path(__file__).name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            text = " ".join([node.name, ast.get_docstring(node) or ""])
            for numbers in re.findall(r"[Ff]aults?[ _]((?:\d+(?:, | and )?)+)", text):
                for number in re.findall(r"\d+", numbers):
                    tests.setdefault(int(number), []).append(f"{path.name}::{node.name}")
    return tests


def test_every_report_has_a_case_or_a_reason():
    tests = claimed()
    listed = [number for numbers in SECTIONS.values() for number in numbers]
    assert len(listed) == len(set(listed)) == 92
    assert set(NO_CASE) <= set(listed)
    missing = [number for number in listed if number not in tests and number not in NO_CASE]
    assert not missing, f"no test names the reports {missing}, and no reason says why"
    stale = {number: tests[number] for number in NO_CASE if number in tests}
    assert not stale, f"the reasons of these reports are out of date: {stale}"
