"""kimi-k3: Kimi K3 for transformers.

Importing the package registers its classes with the Auto classes, so that a checkpoint folder without code files loads:

>>> import kimi_k3
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained("path/to/checkpoint")
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import configuration_kimi_k3  # noqa: F401  # first, because it refuses unsupported releases in one sentence
from .cache_kimi_k3 import HybridCache
from .classification_kimi_k3 import (
    KimiK3ForSequenceClassification,
    KimiK3ForTokenClassification,
    KimiK3MultimodalForSequenceClassification,
    KimiK3MultimodalForTokenClassification,
)
from .configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig, KimiK3VisionConfig
from .image_processing_kimi_k3 import KimiK3ImageProcessor
from .modeling_kimi_k3 import CACHE_ARGUMENT, KimiK3ForCausalLM, KimiK3ForConditionalGeneration, KimiK3Model

# isort: split
# Behind the check of the release, because transformers loads itself anew for it. From its module, because there is a
# stand-in in its place where Pillow (5.17: torchvision too) is not installed.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

AutoConfig.register("kimi_k3", KimiK3Config, exist_ok=True)
AutoConfig.register("kimi_k3_text", KimiK3TextConfig, exist_ok=True)
# Released text configs call themselves `kimi_linear`, which transformers gives to a class that ignores K3's fields.
# `AutoConfig.register` insists on the class's own name, so this alias goes to the mapping behind it.
CONFIG_MAPPING.register("kimi_linear", KimiK3TextConfig, exist_ok=True)
AutoModel.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
AutoModel.register(KimiK3TextConfig, KimiK3Model, exist_ok=True)
AutoModelForCausalLM.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(KimiK3TextConfig, KimiK3ForCausalLM, exist_ok=True)
AutoModelForImageTextToText.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
AutoModelForMultimodalLM.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
# One class, whichever backend transformers would choose.
AutoImageProcessor.register(
    KimiK3Config, image_processor_classes=dict.fromkeys(("pil", "torchvision"), KimiK3ImageProcessor), exist_ok=True
)
AutoModelForSequenceClassification.register(KimiK3TextConfig, KimiK3ForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(KimiK3TextConfig, KimiK3ForTokenClassification, exist_ok=True)
AutoModelForSequenceClassification.register(KimiK3Config, KimiK3MultimodalForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(KimiK3Config, KimiK3MultimodalForTokenClassification, exist_ok=True)

__version__ = "0.1.0"
__all__ = [
    "CACHE_ARGUMENT",
    "HybridCache",
    "KimiK3Config",
    "KimiK3ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiK3ForSequenceClassification",
    "KimiK3ForTokenClassification",
    "KimiK3ImageProcessor",
    "KimiK3Model",
    "KimiK3MultimodalForSequenceClassification",
    "KimiK3MultimodalForTokenClassification",
    "KimiK3TextConfig",
    "KimiK3VisionConfig",
]
