"""transformers' own common model and configuration tests on our text model.

`run.py` copies this file into transformers' test package, where the relative imports resolve.
"""

import unittest
from unittest import mock

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from kimi_k3 import KimiK3ForCausalLM, KimiK3Model, KimiK3TextConfig
from kimi_k3.checkpoint_kimi_k3 import Wishes

from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor

# How the mixin learns which class takes labels and which is a bare backbone.
MODEL_MAPPING_NAMES["kimi_k3_text"] = "KimiK3Model"
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["kimi_k3_text"] = "KimiK3ForCausalLM"

SETTINGS = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1],
        "head_dim": 16,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "attn_res_block_size": 1,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 16,
    "num_shared_experts": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class ModelTester:
    """What the mixin asks of a model's tester."""

    batch_size, seq_length, is_training = 2, 7, True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 2, 99

    def get_config(self):
        return KimiK3TextConfig(**SETTINGS)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class KimiK3CommonTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (KimiK3Model, KimiK3ForCausalLM)
    # Of the first layer's mix over depth nothing is read, and an expert that no token chose has no gradient.
    test_all_params_have_gradient = False

    def setUp(self):
        self.model_tester = ModelTester()
        self.config_tester = ConfigTester(self, config_class=KimiK3TextConfig, **SETTINGS)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_correct_missing_keys(self):
        """A tensor that is missing is refused unless the caller announces it; the mixin asks what is reported then."""
        with self.any_tensor_announced():
            super().test_correct_missing_keys()

    def test_model_weights_reload_no_missing_tied_weights(self):
        """As above: it loads a file that holds nothing of the model."""
        with self.any_tensor_announced():
            super().test_model_weights_reload_no_missing_tied_weights()

    def test_base_model_prefix_loads_base_weights(self):
        """As above: it loads the class with a head from the file of a backbone."""
        test = getattr(super(), "test_base_model_prefix_loads_base_weights", None)
        if test is None:
            self.skipTest("this release has no such test")
        with self.any_tensor_announced():
            test()

    def any_tensor_announced(self):
        """Loading as with `new_tensors=True`."""
        return mock.patch("kimi_k3.modeling_kimi_k3.Wishes", lambda new_tensors, packed: Wishes(True, packed))

    def test_attention_outputs(self):
        """The mixin counts every layer; only the MLA layers have attention weights."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            model = model_class._from_config(config, attn_implementation="eager").eval()
            weights = model(**inputs, output_attentions=True).attentions
            self.assertEqual(len(weights), config.layer_types.count("full_attention"))
            self.assertEqual(weights[0].shape, (2, config.num_attention_heads, 7, 7))

    def test_generation_tester_mixin_inheritance(self):
        self.skipTest("transformers' generation tests are not in its source distribution")
