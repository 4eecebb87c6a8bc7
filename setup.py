"""Packaging: the repository root is the package `kimi_k3`.

The flat root is what the remote-code loader of transformers expects, so the package is mapped onto it instead of
living in a folder of its own. Package names are listed by hand because discovery cannot see a package in ".".
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent

SCRIPTS = ("setup", "demo")

# `kernels` has no __init__.py on purpose (a namespace package): with one, a repository root on sys.path would shadow
# the unrelated distribution `kernels`, which transformers imports when it is installed.
FOLDERS = ("kernels", "cli", "parallel", "costs", "conversion", "eval", "training", "serving", "speculative")


class BuildPackage(build_py):
    """Leaves the scripts that lie beside the package's modules out of what is installed."""

    def find_package_modules(self, package, package_dir):
        return [found for found in super().find_package_modules(package, package_dir) if found[1] not in SCRIPTS]


setup(
    name="kimi-k3",
    version="0.1.0",
    description="Kimi K3 for transformers: load, generate, train and convert the hybrid KDA + MLA architecture",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    package_dir={"kimi_k3": "."},
    packages=["kimi_k3", *(f"kimi_k3.{folder}" for folder in FOLDERS if (ROOT / folder).is_dir())],
    # psutil and tqdm come with accelerate and transformers anyway; conversion imports them itself
    install_requires=["accelerate", "psutil", "safetensors", "torch>=2.9", "tqdm", "transformers>=5.17,<6"],
    package_data={"kimi_k3.eval": ["tasks/*"]},
    extras_require={
        # CUDA builds of torch bring triton along; this is for builds that do not.
        "triton": ["triton; platform_system == 'Linux'"],
        "train": ["datasets", "peft>=0.21", "tqdm", "trl>=1.16"],
        # `ruler` is what lm-eval's own RULER tasks need.
        "eval": ["lm-eval[hf,ruler]>=0.4.13", "matplotlib", "tqdm"],
        "plots": ["matplotlib"],
        # tests/conversion/test_gguf.py, which also needs llama.cpp's source and is skipped without it
        "gguf": ["gguf", "xllamacpp"],
        "serve": ["fastapi", "prometheus-client", "simpy", "tqdm", "uvicorn"],
        "structured": ["xgrammar>=0.2.9"],
        "images": ["pillow"],
        "test": [
            "datasets",
            "fastapi",
            "httpx",
            "hypothesis",
            "lm-eval>=0.4.13",
            "matplotlib",
            # of one release, as ruff below: a later one may find fault with code that has not changed
            "mypy>=2.4,<2.5",
            "openai",
            "parameterized",
            "peft>=0.21",
            "pillow",
            "prometheus-client",
            "pytest>=8",
            "pytest-xdist",
            "ruff>=0.17,<0.18",
            "simpy",
            "tenacity",  # of lm-eval's clients of servers
            "tqdm",
            "triton; platform_system == 'Linux'",
            "trl",
            "uvicorn",
            "xgrammar>=0.2.9",
        ],
    },
    cmdclass={"build_py": BuildPackage},
    entry_points={"console_scripts": ["kimi-k3 = kimi_k3.__main__:main"]},
)
