"""Kimi K3 with a head for labels: of whole texts (rewards too) and of tokens.

transformers reads the text of this file to learn what a model supports: the routed experts are decorated with
`@use_experts_implementation` (in `layers_kimi_k3.py`).
"""

import copy
from typing import Any

from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from .cache_kimi_k3 import committing
from .configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from .modeling_kimi_k3 import KimiK3Model, KimiK3PreTrainedModel

# Tensors of other models that a backbone under a new head has no use for.
_NOT_FOR_LABELS = [r"^(language_model\.)?lm_head\.", r"^vision_tower\.", r"^mm_projector\."]


class _Classifier(KimiK3PreTrainedModel):
    """What the classes with a head for labels share: the backbone of a language model, and a `score` of its own.

    The configuration says how many labels there are (`num_labels`).
    """

    config: KimiK3TextConfig
    _new_tensors = ("score",)

    def __init__(self, config: KimiK3TextConfig | KimiK3Config, dequantize: bool = False, bias: bool = False):
        text: Any = config.get_text_config(decoder=True)
        if text is not config:  # of a multimodal checkpoint, for whose whole the labels are given
            text = copy.deepcopy(text)
            for name in ("id2label", "label2id", "problem_type", "_name_or_path"):
                setattr(text, name, getattr(config, name))
        super().__init__(text, dequantize=dequantize)
        config = self.config
        self.num_labels = config.num_labels
        self.model = KimiK3Model(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels or 0, bias=bias)
        # Last of all: quantizers leave the module alone to which the last parameter belongs, if that is its weight.
        self.score.register_parameter("weight", self.score._parameters.pop("weight"))


# transformers' own mixins bring the forward; their constructors would take the backbone from the Auto classes, which
# do not know that of a folder's remote code.
class KimiK3ForSequenceClassification(GenericForSequenceClassification, _Classifier):
    """Labels [B, num_labels] of whole texts, read at the last token; with one label a reward model."""

    forward = committing(GenericForSequenceClassification.forward)
    _keys_to_ignore_on_load_unexpected = _NOT_FOR_LABELS  # of its own: trl sets the mixin's

    def __init__(self, config: KimiK3TextConfig | KimiK3Config, dequantize: bool = False):
        _Classifier.__init__(self, config, dequantize=dequantize)
        self.post_init()


class KimiK3ForTokenClassification(GenericForTokenClassification, _Classifier):
    """Labels [B, T, num_labels] of tokens."""

    forward = committing(GenericForTokenClassification.forward)
    _keys_to_ignore_on_load_unexpected = _NOT_FOR_LABELS

    def __init__(self, config: KimiK3TextConfig | KimiK3Config, dequantize: bool = False):
        _Classifier.__init__(self, config, dequantize=dequantize, bias=True)
        given = getattr(self.config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if given is None else given)  # as transformers where none is named
        self.post_init()


# The Auto classes tell by the configuration that a class names whether it takes a folder's.
class KimiK3MultimodalForSequenceClassification(KimiK3ForSequenceClassification):
    """The same, from the text part of a multimodal checkpoint; it is saved as a text model."""

    config_class = KimiK3Config


class KimiK3MultimodalForTokenClassification(KimiK3ForTokenClassification):
    """The same, from the text part of a multimodal checkpoint; it is saved as a text model."""

    config_class = KimiK3Config


# Pipelines know by name what fits their task.
for _names, _classes in (
    (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        (KimiK3ForSequenceClassification, KimiK3MultimodalForSequenceClassification),
    ),
    (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        (KimiK3ForTokenClassification, KimiK3MultimodalForTokenClassification),
    ),
):
    _names.update({each.__name__: each.__name__ for each in _classes})


__all__ = [
    "KimiK3ForSequenceClassification",
    "KimiK3ForTokenClassification",
    "KimiK3MultimodalForSequenceClassification",
    "KimiK3MultimodalForTokenClassification",
]
