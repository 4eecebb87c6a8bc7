"""Runs transformers' common model tests on our classes, from the source distribution of the installed release.

    python tests/common_suite/run.py [pytest arguments]

The distribution is downloaded once into `.cache/`; nothing of it is copied into the repository. Three modules that it
lacks are replaced by empty ones.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

HERE = Path(__file__).parent
CACHE = HERE.parent.parent / ".cache"
# Imported by the common tests, but not part of the distribution.
STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}


def source_distribution() -> Path:
    version = transformers.__version__
    archive = CACHE / f"transformers-{version}.tar.gz"
    if not archive.exists():
        CACHE.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", str(CACHE), f"transformers=={version}"], check=True)
    return archive


def build(folder: Path) -> None:
    """Lay out the test package: transformers' top-level test modules, the stubs, and our case."""
    package = folder / "tests"
    package.mkdir()
    with tarfile.open(source_distribution()) as archive:
        for member in archive:
            parts = Path(member.name).parts
            if len(parts) == 3 and parts[1] == "tests" and parts[2].endswith(".py"):
                (package / parts[2]).write_bytes(archive.extractfile(member).read())
    for name, text in STUBS.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)
    for place in (package, *(package / name for name in ("exporters", "generation", "utils"))):
        (place / "__init__.py").touch()
    (package / "test_kimi_k3_common.py").write_text((HERE / "kimi_k3_case.py").read_text())


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        command += ["tests/test_kimi_k3_common.py", *sys.argv[1:]]
        return subprocess.run(command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
