"""What a saved folder needs to load without this package: the code, and the `auto_map` that names its classes.

The remote-code loader copies what the text of a file imports, this text included. No other file imports these, and a
model that was loaded without them could not be saved with all of its code:

from .classification_kimi_k3 import
from .image_processing_kimi_k3 import
"""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

from .configuration_kimi_k3 import KimiK3TextConfig

# Saved beside the weights, with the files of `kernels/`.
CODE_FILES = tuple(
    f"{part}_kimi_k3.py"
    for part in (
        "adapters",
        "cache",
        "cache_layers",
        "checkpoint",
        "classification",
        "configuration",
        "distributed",
        "files",
        "fingerprint",
        "generation",
        "graph",
        "image_processing",
        "images",
        "kernels",
        "layers",
        "lora",
        "modeling",
        "packing",
        "remote_code",
        "rollback",
        "routing",
        "vision",
        "warmup",
    )
)


def auto_map(model: PreTrainedModel) -> dict[str, str]:
    """Which of our classes the Auto classes find in a saved folder."""
    config = type(model.config).__name__
    # By name: a folder's config class and the one imported here can be two copies of one class.
    is_text = model.config.model_type == KimiK3TextConfig.model_type
    base = "KimiK3Model" if is_text else "KimiK3ForConditionalGeneration"
    causal = "KimiK3ForCausalLM" if is_text else "KimiK3ForConditionalGeneration"
    labels = "KimiK3" if is_text else "KimiK3Multimodal"
    images = {} if is_text else {"AutoModelForImageTextToText": f"modeling_kimi_k3.{causal}"}
    return {
        "AutoConfig": f"configuration_kimi_k3.{config}",
        "AutoModel": f"modeling_kimi_k3.{base}",
        "AutoModelForCausalLM": f"modeling_kimi_k3.{causal}",
        **images,
        "AutoModelForSequenceClassification": f"classification_kimi_k3.{labels}ForSequenceClassification",
        "AutoModelForTokenClassification": f"classification_kimi_k3.{labels}ForTokenClassification",
    }


def copy_code(folder: Path) -> None:
    """Write our files into a checkpoint folder, so that it needs nothing else; `kernels/` keeps its place."""
    source = Path(__file__).parent
    kernels = source / "kernels"
    if folder.resolve() == source.resolve():
        return
    (folder / "kernels").mkdir(exist_ok=True)
    for name in CODE_FILES:
        shutil.copyfile(source / name, folder / name)
    for file in sorted(kernels.glob("*.py")):
        if file.name != "__init__.py":  # the remote-code cache makes one; it would shadow the package `kernels`
            shutil.copyfile(file, folder / "kernels" / file.name)
            flattened = folder / file.name  # transformers' copy; a file of the user's with that name stays
            if flattened.is_file() and flattened.read_bytes() == file.read_bytes():
                flattened.unlink()
