"""What `make mutants` changes and what it leaves alone."""

import pytest

pytestmark = pytest.mark.one_release

mutants = pytest.importorskip("mutants")


def of(source):
    """The line of `source` that is changed, as each change leaves it."""
    return {
        mutants.changed(source, node, new).splitlines()[node.lineno - 1].strip()
        for node, new in mutants.Sites(source).found
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", {"x = (a <= b)"}),
        ("x = a - b", {"x = (a + b)", "x = (b - a)"}),
        ("x = a + b", {"x = (a - b)"}),
        ("x += a", {"x -= a"}),
        ("x = 3", {"x = 4", "x = 2"}),
        ("x = 0.5", {"x = 1.0"}),
        ("x = True", {"x = False"}),
        ("x = not a", {"x = a"}),
        ("x = a and b", {"x = (a or b)", "x = a", "x = b"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = f(a, b, c=d)", {"x = (f(b, a, c=d))", "x = (f(a, b))"}),
        ("x = a[b:]", {"x = a[:]", "x = a[(b + 1):]"}),
        ("f(x, k=0)", {"pass", "f(x)", "f(x, k=1)"}),
        ("x = a if b else c", {"x = a if True else c", "x = a if False else c"}),
    ],
)
def test_careless_edits(line, expected):
    assert of(line) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A text."""',
        "from a import b",
        "def f(x: int | None) -> Literal[1]:\n    return x",
        "@decorated(1)\ndef f():\n    return x",
        'raise ValueError(f"{a - b} is too much")',
        'logger.warning("%s", a - b)',
        'print("a", flush=True)',
        "x = f(a, device=b, strict=True)",
        "# Pairs at once, measured.\nMOST = 2",
        "MOST = 2  # bounds the memory",
        "x = torch.empty(0)",
        "if x.is_cuda:\n    y = x + 1",
        'x = tl.dot(a, a, input_precision="ieee")',
    ],
)
def test_what_no_test_could_notice(source):
    assert not of(source)
