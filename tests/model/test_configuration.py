"""Configurations: defaults, official keys in and out, flat and nested files, refusals that name the field."""

import copy
import inspect
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kimi_k3 import (
    KimiK3Config,
    KimiK3ForCausalLM,
    KimiK3ForConditionalGeneration,
    KimiK3TextConfig,
    KimiK3VisionConfig,
)

FILES = [
    "config_kimi_k3.json",
    "config_kimi_linear_48b.json",
    "k3_tiny_mxfp4/config.json",
    "k3_dense_flat/config.json",
    "kimi_linear_flat/config.json",
    "k3_vision/small_signal/config.json",
]

# Keys of the released file that mean nothing for this model: generation settings and old transformers defaults, which
# transformers 5 itself drops when it reads a file, and the attention kernel, which is chosen when a model is loaded.
NOT_KEPT = {
    *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
    *("length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
    *("num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty"),
    *("return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
    *("output_attentions", "transformers_version", "_attn_implementation"),
}


def read(path):
    return json.loads(path.read_text())


def strict_json(text):
    """JSON as other engines read it: NaN and Infinity are errors."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def k3_text(data_dir):
    """The text config of the tiny K3 file, as a dict."""
    return read(data_dir / "k3_tiny_mxfp4" / "config.json")["text_config"]


# --- defaults


@pytest.mark.parametrize("part", ["text_config", "vision_config", "top"])
def test_defaults_are_the_released_values_key_for_key(part, data_dir):
    """Every field of our classes that the released file names has its value, and no field is missing there."""
    released = read(data_dir / "config_kimi_k3.json")
    released, ours = {
        "text_config": (released["text_config"], KimiK3TextConfig),
        "vision_config": (released["vision_config"], KimiK3VisionConfig),
        "top": (released, KimiK3Config),
    }[part]
    default = ours()
    fields = set(inspect.get_annotations(ours)) - {"model_type", "attribute_map", "keys_to_ignore_at_inference"}
    fields -= {"base_config_key", "sub_configs", "text_config", "vision_config", "output_router_logits"}
    assert fields <= set(released), "a field of ours that the released file does not have"
    for name in fields:
        assert getattr(default, name) == released[name], name


def test_default_config_is_the_released_model_with_vision(data_dir):
    default, released = KimiK3Config(), KimiK3Config.from_pretrained(data_dir / "config_kimi_k3.json")
    assert default.text_config.layer_types == released.text_config.layer_types
    assert default.text_config.mlp_layer_types == released.text_config.mlp_layer_types
    assert default.vision_config is not None
    # What is built from scratch has plain experts; only a file says that they are packed.
    assert default.text_config.expert_quantization is None
    assert released.text_config.expert_quantization["format"] == "mxfp4-pack-quantized"


def test_defaults_are_not_shared_between_configs():
    KimiK3TextConfig().linear_attn_config["kda_layers"].clear()
    assert len(KimiK3TextConfig().linear_attn_config["kda_layers"]) == 69


# --- read and write


@pytest.mark.parametrize("file", FILES)
def test_written_back_with_official_keys_and_values(file, data_dir, tmp_path):
    """Fault 118: what other engines look at is as it was: names, values, model_type, place of quantization_config."""
    official = read(data_dir / file)
    AutoConfig.from_pretrained(data_dir / file).save_pretrained(tmp_path)
    written = strict_json((tmp_path / "config.json").read_text())

    def compare(official, written, place=""):
        for key, value in official.items():
            if key in NOT_KEPT:
                continue
            assert key in written, place + key
            if isinstance(value, dict):
                compare(value, written[key], f"{place}{key}.")
            else:
                assert written[key] == value, place + key

    compare(official, written)
    text = written.get("text_config", written)
    assert text["model_type"] == "kimi_linear"
    assert written["model_type"] == ("kimi_k3" if "text_config" in official else "kimi_linear")
    assert ("quantization_config" in text) == ("quantization_config" in official.get("text_config", official))
    if "text_config" in official:
        assert "quantization_config" not in written, "transformers would act on a section at the top"
        assert ("vision_config" in written) == ("vision_config" in official)


def test_written_file_does_not_tell_where_it_was_read(data_dir, tmp_path):
    whole, flat = (AutoConfig.from_pretrained(data_dir / folder) for folder in ("k3_tiny_mxfp4", "k3_dense_flat"))
    joined = KimiK3Config(text_config=KimiK3TextConfig.from_pretrained(data_dir / "k3_tiny_mxfp4"))
    for config in (whole, flat, joined):
        config.save_pretrained(tmp_path)
        assert str(data_dir) not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("file", FILES)
def test_round_trips(file, data_dir, tmp_path):
    config = AutoConfig.from_pretrained(data_dir / file)
    expected = config.to_dict()
    assert type(config).from_dict(expected).to_dict() == expected
    copied = copy.deepcopy(config)
    assert copied.to_dict() == expected and copied is not config
    config.save_pretrained(tmp_path)
    reloaded = AutoConfig.from_pretrained(tmp_path)
    assert type(reloaded) is type(config)
    assert reloaded.to_diff_dict() == config.to_diff_dict()
    assert strict_json(json.dumps(expected)) == strict_json(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("file", FILES)
def test_a_copy_does_not_follow_its_original(file, data_dir):
    config = AutoConfig.from_pretrained(data_dir / file)
    copied = copy.deepcopy(config)
    config.get_text_config().linear_attn_config["num_heads"] = 1
    assert copied.get_text_config().linear_attn_config["num_heads"] > 1


def test_quantization_section_is_hidden_from_transformers_but_not_lost(data_dir):
    """transformers gives a model whose config shows `quantization_config` to a quantizer that unpacks the experts."""
    config = KimiK3Config.from_pretrained(data_dir / "config_kimi_k3.json")
    for part in (config, config.text_config, config.get_text_config(decoder=True)):
        assert not hasattr(part, "quantization_config")
    official = read(data_dir / "config_kimi_k3.json")["text_config"]["quantization_config"]
    assert config.to_dict()["text_config"]["quantization_config"] == official


@pytest.mark.parametrize("config_class", [KimiK3Config, KimiK3TextConfig])
def test_quantization_section_copied_to_the_top_is_read_and_returned_to_its_place(config_class, data_dir, tmp_path):
    file = read(data_dir / "k3_tiny_mxfp4" / "config.json")
    section = file["text_config"].pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps({**file, "quantization_config": section}))
    config = config_class.from_pretrained(tmp_path)
    assert config.get_text_config().expert_quantization == section
    written = config.to_dict()
    assert written.get("text_config", written)["quantization_config"] == section


# --- flat files: a key that is absent is a feature that is absent

FLAT = {
    "config_kimi_linear_48b.json": {
        "attn_res_block_size": None,
        "routed_expert_hidden_size": None,
        "latent_moe_use_norm": False,
        "mla_use_output_gate": False,
        "q_lora_rank": None,
        "gate_lower_bound": None,
        "hidden_act": "silu",
        "num_experts": 256,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "max_position_embeddings": 1048576,
        "expert_quantization": None,
    },
    "kimi_linear_flat/config.json": {
        "attn_res_block_size": None,
        "routed_expert_hidden_size": None,
        "mla_use_output_gate": False,
        "gate_lower_bound": None,
        "num_experts": 8,
        "max_position_embeddings": 4096,
    },
    "k3_dense_flat/config.json": {
        "attn_res_block_size": 4,
        "mla_use_output_gate": True,
        "gate_lower_bound": -5.0,
        "hidden_act": "situ",
        "num_experts": None,
        "expert_quantization": None,
        "mlp_layer_types": ["dense"] * 6,
    },
}


@pytest.mark.parametrize("file", FLAT)
def test_flat_file(file, data_dir):
    """Fault 118: the flat text config loads like the nested one."""
    config = AutoConfig.from_pretrained(data_dir / file)
    assert type(config) is KimiK3TextConfig
    for name, value in FLAT[file].items():
        assert getattr(config, name) == value, name
    assert not config.linear_attn_config["use_full_rank_gate"] or file.startswith("k3")


def test_smallest_flat_file_is_a_dense_model(k3_text):
    """Fault 1: without any key of experts, AttnRes, gates, vision or MTP there is a model, and it generates."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    linear = dict(k3_text["linear_attn_config"])
    del linear["gate_lower_bound"], linear["use_full_rank_gate"]
    config = KimiK3TextConfig.from_dict({**{k: k3_text[k] for k in keys}, "linear_attn_config": linear})
    assert config.mlp_layer_types == ["dense"] * 7 and config.hidden_act == "silu"
    assert config.eos_token_id is config.pad_token_id is None
    model = AutoModelForCausalLM.from_config(config)
    assert type(model) is KimiK3ForCausalLM
    parts = {part for name, _ in model.named_parameters() for part in name.split(".")}
    assert not parts & {"mlp_res_proj", "block_sparse_moe", "g_proj", "q_a_proj"} and "g_a_proj" in parts
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


ABSENT = {
    "attn_res_block_size": None,
    "first_k_dense_replace": 0,
    "latent_moe_use_norm": False,
    "mla_use_output_gate": False,
    "num_shared_experts": None,
    "q_lora_rank": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.mark.parametrize("key", ABSENT)
def test_a_key_that_a_file_leaves_out(key, k3_text):
    """The others stay what they are; without the number of dense layers there is none."""
    before = KimiK3TextConfig.from_dict(k3_text).to_dict()
    assert k3_text.pop(key) not in (ABSENT[key], None)
    after = KimiK3TextConfig.from_dict(k3_text)
    assert getattr(after, key) == ABSENT[key] and type(getattr(after, key)) is type(ABSENT[key])
    assert after.to_dict() == before | {key: ABSENT[key]}
    assert after.mlp_layer_types == ["sparse" if key == "first_k_dense_replace" else "dense"] + ["sparse"] * 6


def test_constructor_starts_from_the_released_model_and_files_do_not(k3_text):
    del k3_text["attn_res_block_size"]
    assert KimiK3TextConfig(**k3_text).attn_res_block_size == 12
    assert KimiK3TextConfig.from_dict(k3_text).attn_res_block_size is None


def test_config_of_transformers_own_class_is_read(data_dir, tmp_path):
    """Its files repeat what follows from the layer lists (`layer_types`, `mlp_layer_types`, `head_dim`)."""
    from transformers.models.kimi_linear import KimiLinearConfig

    KimiLinearConfig.from_pretrained(data_dir / "kimi_linear_flat").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is KimiK3TextConfig
    expected = AutoConfig.from_pretrained(data_dir / "kimi_linear_flat")
    assert config.layer_types == expected.layer_types and config.mlp_layer_types == expected.mlp_layer_types
    file = read(tmp_path / "config.json")
    assert file["layer_types"] == expected.layer_types, "transformers writes the list, so the test says something"
    for key in ("layer_types", "mlp_layer_types"):
        with pytest.raises(ValueError, match=f"^{key} contradicts"):
            KimiK3TextConfig.from_dict({**file, key: file[key][::-1]})
        assert KimiK3TextConfig.from_dict({**file, key: None}).layer_types == expected.layer_types


# --- aliases


def test_aliases_of_expert_counts_and_a_sane_head_dim(data_dir):
    """Fault 119: tools find the counts under the names that they know, nested or not."""
    text = KimiK3Config.from_pretrained(data_dir / "config_kimi_k3.json").get_text_config()
    assert text.num_experts_per_tok == text.num_experts_per_token == 16
    assert text.num_local_experts == text.n_routed_experts == text.num_experts == 896
    assert text.n_shared_experts == 2
    assert text.head_dim == 192
    kimi_linear = AutoConfig.from_pretrained(data_dir / "config_kimi_linear_48b.json")
    assert kimi_linear.head_dim == 192, "not the 72 of the file, which no computation uses"
    assert kimi_linear.to_dict()["head_dim"] == 72, "but the file keeps its value"


def test_aliases_are_read_from_files_and_written_under_the_official_name(k3_text):
    """Fault 119, the other way round."""
    k3_text["num_experts_per_tok"] = k3_text.pop("num_experts_per_token") - 1
    config = KimiK3TextConfig.from_dict(k3_text)
    assert config.num_experts_per_token == 2
    written = config.to_dict()
    assert written["num_experts_per_token"] == 2 and "num_experts_per_tok" not in written


# --- our classes are never bypassed


@pytest.mark.parametrize("trust", [None, False, True], ids=["unset", "no-trust", "trust"])
@pytest.mark.parametrize("folder", ["k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat"])
def test_auto_classes_never_take_transformers_own_kimi_linear(folder, trust, data_dir):
    """Faults 3, 118: nested or flat, `kimi_linear` is our class; transformers' own ignores every K3 field."""
    config = AutoConfig.from_pretrained(data_dir / folder, trust_remote_code=trust)
    nested = folder == "k3_tiny_mxfp4"
    assert type(config) is (KimiK3Config if nested else KimiK3TextConfig)
    assert type(config.get_text_config()) is KimiK3TextConfig
    model = AutoModelForCausalLM.from_pretrained(data_dir / folder, trust_remote_code=trust)
    assert type(model) is (KimiK3ForConditionalGeneration if nested else KimiK3ForCausalLM)


def test_text_config_alone_is_our_class(k3_text):
    """Fault 3: also where a tool hands on nothing but the nested dict."""
    assert type(AutoConfig.for_model(**k3_text)) is KimiK3TextConfig
    assert type(KimiK3Config(text_config=k3_text).text_config) is KimiK3TextConfig


# Each change of the tiny K3 model, weights with the same name and shape kept; `linear.` is a key of linear_attn_config.
TOGGLES = {
    "no-attention-residuals": {"attn_res_block_size": None},
    "other-block-size": {"attn_res_block_size": 2},
    "no-mla-output-gate": {"mla_use_output_gate": False},
    "swiglu": {"hidden_act": "silu"},
    "other-situ-beta": {"activation_situ_beta": 1.0},
    "other-situ-linear-beta": {"activation_situ_linear_beta": 1.0},
    "full-width-experts": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "no-latent-norm": {"latent_moe_use_norm": False},
    "full-query": {"q_lora_rank": None},
    "no-shared-experts": {"num_shared_experts": 0},
    "one-shared-expert": {"num_shared_experts": 1},
    "dense-layers": {"first_k_dense_replace": 3},
    "every-second-layer-sparse": {"moe_layer_freq": 2},
    "no-experts": {"num_experts": None},
    "fewer-experts-a-token": {"num_experts_per_token": 2},
    "softmax-router": {"moe_router_activation_func": "softmax"},
    "limited-groups": {"num_expert_group": 4, "topk_group": 2},
    "softplus-gate": {"linear.gate_lower_bound": None},
    "other-gate-bound": {"linear.gate_lower_bound": -1.0},
    "low-rank-output-gate": {"linear.use_full_rank_gate": False},
    "wider-convolution": {"linear.short_conv_kernel_size": 3},
    "other-layer-kinds": {"linear.kda_layers": [1, 2, 3, 4, 5, 6], "linear.full_attn_layers": [7]},
    "other-norm-eps": {"rms_norm_eps": 1e-1},
}


@pytest.fixture(scope="module")
def tiny_k3(data_dir):
    """The tiny K3 checkpoint in float32 with plain experts: its weights are large enough for every field to show."""
    return KimiK3ForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32, dequantize=True)


def toggled(base, changes):
    """A model of the changed config, with every weight of `base` that fits."""
    config = copy.deepcopy(base.config)
    values = config.to_dict()
    for key, value in changes.items():
        section = values["linear_attn_config"] if key.startswith("linear.") else values
        section[key.removeprefix("linear.")] = value
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(KimiK3TextConfig.from_dict(values)).eval()
    own = model.state_dict()
    weights = {n: t for n, t in base.state_dict().items() if n in own and own[n].shape == t.shape}
    model.load_state_dict(weights, strict=False)
    return model


@pytest.mark.parametrize("toggle", ["nothing", *TOGGLES])
@torch.no_grad()
def test_every_k3_field_reaches_the_logits(toggle, tiny_k3):
    """Fault 3: no field is parsed and then ignored. Fault 69: the two decay gates are different formulas."""
    ids = torch.arange(10, 34)[None]
    expected = tiny_k3(ids).logits
    difference = (toggled(tiny_k3, TOGGLES.get(toggle, {}))(ids).logits - expected).abs().max()
    if toggle == "nothing":
        assert difference == 0, "the comparison itself"
    else:
        assert difference > 1e-2


# Fields that only say something beside others: the latent norm takes every common factor of the experts away again,
# and without groups there is nothing to limit.
TOGGLES_BESIDE = {
    "weights-not-renormalized": ({"latent_moe_use_norm": False}, {"moe_renormalize": False}),
    "other-routed-scaling": ({"latent_moe_use_norm": False}, {"routed_scaling_factor": 2.0}),
    "groups-not-limited": ({"num_expert_group": 4, "topk_group": 2}, {"use_grouped_topk": False}),
    "other-number-of-groups": ({"num_expert_group": 4, "topk_group": 2}, {"topk_group": 3}),
}


@pytest.mark.parametrize("toggle", TOGGLES_BESIDE)
@torch.no_grad()
def test_k3_fields_that_need_another_reach_the_logits(toggle, tiny_k3):
    """Fault 3, for the fields that show only beside another one."""
    beside, change = TOGGLES_BESIDE[toggle]
    ids = torch.arange(10, 34)[None]
    difference = toggled(tiny_k3, beside)(ids).logits - toggled(tiny_k3, {**beside, **change})(ids).logits
    assert difference.abs().max() > 1e-2


@torch.no_grad()
def test_tied_embeddings_reach_the_logits(tiny_k3):
    """Faults 3, 17: the head is the embedding exactly when the config says so."""
    tied = toggled(tiny_k3, {"tie_word_embeddings": True})
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert tiny_k3.lm_head.weight is not tiny_k3.model.embed_tokens.weight


# --- refusals

DELETE = object()

REFUSALS = {
    "layer-in-both-lists": ({"linear.kda_layers": [1, 2, 3, 4, 5, 6]}, "layers [4] in kda_layers and"),
    "layer-left-out": ({"linear.kda_layers": [1, 2, 3, 5]}, "left out [6]"),
    "layer-twice": ({"linear.kda_layers": [1, 2, 3, 5, 6, 6]}, "kda_layers and full_attn_layers of linear_attn_config"),
    "layers-counted-from-0": (
        {"linear.kda_layers": [0, 1, 2, 4, 5], "linear.full_attn_layers": [3, 6]},
        "counted from 1: left out [7], out of range [0]",
    ),
    "layer-lists-of-another-depth": ({"num_hidden_layers": 6}, "out of range [7]"),
    "no-linear-attention": ({"linear_attn_config": DELETE}, "linear_attn_config is missing"),
    "linear-attention-is-no-dict": ({"linear_attn_config": None}, "linear_attn_config is missing"),
    **{
        f"no-{key}": ({f"linear.{key}": DELETE}, f"linear_attn_config lacks {key}")
        for key in ("kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size")
    },
    "unequal-kda-heads": ({"linear.num_v_heads": 8}, "does not implement: num_v_heads"),
    "no-kda-heads": ({"linear.num_heads": 0}, "linear_attn_config.num_heads must be"),
    "no-latent-width": ({"routed_expert_hidden_size": None}, "routed_expert_hidden_size (the latent width)"),
    "latent-width-left-out": ({"routed_expert_hidden_size": DELETE}, "routed_expert_hidden_size (the latent width)"),
    "no-situ-beta": ({"activation_situ_beta": None}, "needs activation_situ_beta"),
    "situ-beta-left-out": ({"activation_situ_beta": DELETE}, "needs activation_situ_beta"),
    "situ-linear-beta-left-out": ({"activation_situ_linear_beta": DELETE}, "needs activation_situ_linear_beta"),
    "negative-situ-beta": ({"activation_situ_beta": -4.0}, "activation_situ_beta, a positive number"),
    "zero-situ-linear-beta": ({"activation_situ_linear_beta": 0.0}, "activation_situ_linear_beta must be"),
    "grouped-mla-heads": ({"num_key_value_heads": 2}, "num_key_value_heads (2) must equal num_attention_heads (4)"),
    "experts-do-not-divide": ({"num_expert_group": 3}, "num_experts (8) does not divide into num_expert_group (3)"),
    "more-groups-chosen-than-exist": ({"num_expert_group": 2, "topk_group": 3}, "topk_group (3) exceeds"),
    "groups-of-one-expert": ({"num_expert_group": 8, "topk_group": 8}, "num_expert_group leaves groups of one"),
    "too-many-experts-a-token": ({"num_experts_per_token": 9}, "num_experts_per_token (9) exceeds"),
    "too-many-for-the-chosen-groups": ({"num_expert_group": 4}, "num_experts_per_token (3) exceeds the 2 experts"),
    "no-experts-a-token": ({"num_experts_per_token": None}, "num_experts_per_token must be"),
    "no-expert-width": ({"moe_intermediate_size": None}, "moe_intermediate_size must be"),
    "unknown-activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not known"),
    "unknown-router": ({"moe_router_activation_func": "tanh"}, "'tanh' is not known; use one of sigmoid, softmax"),
    "unknown-selection": ({"topk_method": "greedy"}, "topk_method 'greedy'"),
    **{
        f"gate-mode-{bound}": ({"linear.gate_lower_bound": bound}, "linear_attn_config.gate_lower_bound must be")
        for bound in (0.0, 5.0, "sigmoid", True, float("nan"), float("-inf"))
    },
    "unknown-output-gate": ({"linear.use_full_rank_gate": "low"}, "linear_attn_config.use_full_rank_gate"),
    "rotary": ({"mla_use_nope": False}, "mla_use_nope must be true"),
    "bias": ({"attention_bias": True}, "attention_bias must be false"),
    "two-lengths": ({"model_max_length": 8192}, "max_position_embeddings (4096) and model_max_length (8192) differ"),
    "unknown-packing": ({"quantization_config": {"format": "nvfp4"}}, "quantization_config.format 'nvfp4'"),
    **{
        f"{name}-of-dense-layers": (
            {"num_experts": None, "quantization_config": {"quant_method": "compressed-tensors", "format": name}},
            f"quantization_config.format '{name}' is not implemented",
        )
        for name in ("pack-quantized", "float-quantized")
    },
    "packed-width-not-of-groups": (
        {"moe_intermediate_size": 48},
        "moe_intermediate_size (48) must be a multiple of 32",
    ),
    "packed-experts-that-do-not-exist": ({"num_experts": None}, "quantization_config packs routed experts"),
    **{
        f"{name}-is-{value}": ({name: value}, f"{name} must be a positive integer")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for value in (0, "many")
    },
    **{
        f"{name}-is-{value}": ({name: value}, f"{name} must be")
        for name, value in (
            ("q_lora_rank", 0),
            ("kv_lora_rank", None),
            ("qk_nope_head_dim", 0),
            ("qk_rope_head_dim", -1),
            ("v_head_dim", 0),
            ("attn_res_block_size", 0),
            ("first_k_dense_replace", -1),
            ("moe_layer_freq", 0),
            ("num_experts", 1.5),
            ("num_shared_experts", -1),
            ("rms_norm_eps", 0.0),
        )
    },
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_names_the_field(case, k3_text):
    """One sentence, from the dict of a file, before any weight is made. Fault 62: unequal KDA heads are refused."""
    changes, sentence = REFUSALS[case]
    for key, value in changes.items():
        section = k3_text["linear_attn_config"] if key.startswith("linear.") else k3_text
        if value is DELETE:
            del section[key.removeprefix("linear.")]
        else:
            section[key.removeprefix("linear.")] = value
    with pytest.raises(ValueError) as caught:
        KimiK3Config(text_config=k3_text)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("inner", [True, False], ids=["beside-packed-experts", "alone"])
def test_another_packing_at_the_top_is_refused(inner, k3_text, tmp_path):
    """As tools write it that quantise a multimodal folder: read by either class, it is not about the experts."""
    if not inner:
        del k3_text["quantization_config"]
    section = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    folder = {"model_type": "kimi_k3", "text_config": k3_text, "quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(folder))
    for config_class in (KimiK3Config, KimiK3TextConfig):
        with pytest.raises(ValueError, match=r"quantization_config\.format 'float-quantized' is not implemented"):
            config_class.from_pretrained(tmp_path)


# The smallest value of every size, and whether null stands for a feature that is absent.
SMALLEST = {
    "vocab_size": (1, False),
    "hidden_size": (1, False),
    "intermediate_size": (1, False),
    "num_hidden_layers": (1, False),
    "num_attention_heads": (1, False),
    "q_lora_rank": (1, True),
    "kv_lora_rank": (1, False),
    "qk_nope_head_dim": (1, False),
    "qk_rope_head_dim": (0, False),
    "v_head_dim": (1, False),
    "attn_res_block_size": (1, True),
    "first_k_dense_replace": (0, False),
    "moe_layer_freq": (1, False),
    "num_experts": (0, True),
    "num_shared_experts": (0, True),
    "routed_expert_hidden_size": (1, True),
    "num_expert_group": (0, True),
    "topk_group": (0, True),
    "linear.num_heads": (1, False),
    "linear.head_dim": (1, False),
    "linear.short_conv_kernel_size": (1, False),
}


@pytest.mark.parametrize("key", SMALLEST)
def test_the_smallest_value_is_taken_and_none_below_it(key, k3_text):
    smallest, optional = SMALLEST[key]
    k3_text |= {"num_experts": None, "num_key_value_heads": None, "latent_moe_use_norm": False}
    del k3_text["quantization_config"]
    name = key.removeprefix("linear.")
    section = k3_text if name == key else k3_text["linear_attn_config"]
    if key == "num_hidden_layers":
        k3_text["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": []}

    def read(value):
        section[name] = value
        return KimiK3TextConfig.from_dict(copy.deepcopy(k3_text))

    config = read(smallest)
    assert (getattr(config, name) if name == key else config.linear_attn_config[name]) == smallest
    if optional:
        assert getattr(read(None), name) is None
    for value in (smallest - 1, *([] if optional else [None])):
        with pytest.raises(ValueError, match=f"{name} must be"):
            read(value)


def test_refusals_between_the_parts(k3_text, data_dir):
    text = KimiK3TextConfig.from_dict(k3_text)
    with pytest.raises(ValueError, match=r"vision_config.text_hidden_size \(7168\) must equal text_config.hidden_size"):
        KimiK3Config(text_config=text, vision_config={})
    with pytest.raises(ValueError, match="tie_word_embeddings is True at the top and False in text_config"):
        KimiK3Config(text_config=text, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"qkv_hidden_size \(1536\) does not divide into vt_num_attention_heads \(7\)"):
        KimiK3VisionConfig(vt_num_attention_heads=7)
    with pytest.raises(ValueError, match="flat text config: use KimiK3TextConfig and KimiK3ForCausalLM"):
        KimiK3Config.from_pretrained(data_dir / "kimi_linear_flat")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vt_num_attention_heads": 256}, r"\(1536\) / vt_num_attention_heads \(256\) must be a multiple of 4"),
        ({"mm_hidden_size": 512}, r"mm_hidden_size \(512\).* must equal vt_hidden_size \(1024\)"),
        ({"merge_kernel_size": 2}, "merge_kernel_size must be two positive numbers, got 2"),
        ({"merge_kernel_size": [2, 0]}, "merge_kernel_size must be two positive numbers"),
        *(
            ({name: "other"}, f"vision_config.{name} 'other' is not implemented; only '.*' is")
            for name in (
                "activation_func", "merge_type", "mlp_type", "mm_projector_type", "norm_type",
                "pos_emb_interpolation_mode", "pos_emb_type", "projector_hidden_act",
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_vision_tower_is_not_is_refused(changes, sentence):
    """Forms that other towers have, and sizes that cannot be; `text_config` alone is read without it."""
    with pytest.raises(ValueError, match=sentence):
        KimiK3VisionConfig(**changes)


def test_fields_of_features_that_are_off_are_not_judged(k3_text):
    """A dense file may carry values of the features that it does not use."""
    k3_text.update(num_experts=None, num_experts_per_token=None, routed_expert_hidden_size=None)
    assert k3_text["latent_moe_use_norm"]
    del k3_text["quantization_config"]
    assert KimiK3TextConfig.from_dict(k3_text).mlp_layer_types == ["dense"] * 7
