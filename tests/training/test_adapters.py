"""Every way in which peft and transformers add, load, combine and take away adapters: it works, or changes nothing."""

import copy
import subprocess
import sys
import warnings

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from peft import (
    AdaLoraConfig,
    CartridgeConfig,
    CPTConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from peft.tuners.lora import LoraLayer
from peft.utils import hotswap
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import tiny
from kimi_k3 import CACHE_ARGUMENT, KimiK3Config, KimiK3ForCausalLM, KimiK3ForConditionalGeneration
from kimi_k3.training import lora_targets

IDS = torch.arange(3, 23)[None]
CLOSE = {"atol": 1e-8, "rtol": 0}  # float64; to undo IA3, peft divides by the factor plus 1e-8
LAYERS = ["q_proj", "o_proj", "up_proj"]


def lora(**options):
    return lambda model: LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": LAYERS, **options})


# Name -> the configuration for a model, and the verbs that are refused; what each does else is told in the test below.
TUNERS = {
    "lora": (lora(), set()),
    "experts": (lambda model: LoraConfig(r=4, **lora_targets(model, router=True)), {"weighted", "hotswap"}),
    "target-parameters": (
        lora(target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
        {"weighted"},
    ),
    "all-linear": (lora(target_modules="all-linear"), set()),
    "dora": (lora(use_dora=True), {"hotswap"}),
    "modules-to-save": (lora(modules_to_save=["lm_head", "gate"]), {"weighted", "hotswap"}),
    "embeddings": (lora(target_modules=["q_proj", "embed_tokens", "lm_head"]), {"hotswap"}),
    "tokens": (lora(trainable_token_indices=[3, 4]), {"hotswap"}),
    "loha": (lambda model: LoHaConfig(r=4, target_modules=LAYERS), {"weighted", "hotswap"}),
    "lokr": (lambda model: LoKrConfig(r=4, target_modules=LAYERS), {"weighted", "hotswap"}),
    "ia3": (
        lambda model: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        {"weighted", "hotswap"},
    ),
    "vera": (lambda model: VeraConfig(r=4, target_modules=["q_proj"]), {"load_adapter", "weighted", "hotswap"}),
    "norms": (lambda model: LNTuningConfig(target_modules=["input_layernorm"]), {"weighted", "hotswap"}),
    "trainable-tokens": (lambda model: TrainableTokensConfig(token_indices=[3, 4]), {"weighted", "hotswap"}),
    "adalora": (
        lambda model: AdaLoraConfig(init_r=4, total_step=9, target_modules=LAYERS, task_type="CAUSAL_LM"),
        {"second", "weighted", "hotswap", "delete"},
    ),
    "prompt": (
        lambda model: PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        {"load_adapter", "merge", "weighted", "hotswap"},
    ),
}  # fmt: skip


PROMPTS = {
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "p-tuning": lambda: PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, task_type="CAUSAL_LM"),
    "cpt": lambda: CPTConfig(
        cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3], task_type="CAUSAL_LM"
    ),
}

# Name -> the configuration, and whether the tuner merges where layers have no bias.
OTHERS = {
    "beft": (lambda: peft.BeftConfig(target_modules=LAYERS), False),
    "boft": (lambda: peft.BOFTConfig(boft_block_size=2, target_modules=["q_proj"]), True),
    "c3a": (lambda: peft.C3AConfig(block_size=2, target_modules=["q_proj"]), True),
    "deft": (lambda: peft.DeftConfig(r=4, target_modules=LAYERS), True),
    "delora": (lambda: peft.DeloraConfig(r=4, target_modules=LAYERS), True),
    "fourierft": (lambda: peft.FourierFTConfig(n_frequency=10, target_modules=LAYERS), True),
    "glora": (lambda: peft.GloraConfig(r=4, target_modules=LAYERS), True),
    "gralora": (lambda: peft.GraloraConfig(r=4, gralora_k=2, target_modules=["q_proj"]), True),
    "hira": (lambda: peft.HiraConfig(r=4, target_modules=LAYERS), True),
    "hra": (lambda: peft.HRAConfig(r=4, target_modules=LAYERS), True),
    "miss": (lambda: peft.MissConfig(r=2, target_modules=LAYERS), True),
    "oft": (lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj", "up_proj"]), True),
    "osf": (lambda: peft.OSFConfig(effective_rank=2, target_modules=LAYERS), True),
    "peanut": (lambda: peft.PeanutConfig(r=4, target_modules=LAYERS), True),
    "pvera": (lambda: peft.PveraConfig(r=4, target_modules=["q_proj"]), True),
    "randlora": (lambda: peft.RandLoraConfig(r=4, target_modules=["q_proj"]), True),
    "road": (lambda: peft.RoadConfig(variant="road_1", group_size=2, target_modules=LAYERS), True),
    "shira": (lambda: peft.ShiraConfig(r=2, target_modules=LAYERS), True),
    "supertuning": (lambda: peft.SupertuningConfig(target_modules=LAYERS, sparsity=0.5), True),
    "tinylora": (lambda: peft.TinyLoraConfig(r=2, u=4, target_modules=LAYERS), True),
    "unilora": (lambda: peft.UniLoraConfig(r=4, theta_d_length=16, target_modules=LAYERS), True),
    "vblora": (lambda: peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=2, target_modules=["q_proj"]), True),
    "waveft": (lambda: peft.WaveFTConfig(n_frequency=10, target_modules=LAYERS), True),
}


def base(**changes):
    return tiny.model("kmk", **changes).double()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def adapted(model, config, seed=0):
    """An adapter that acts: all it trains is moved away from where it begins."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return adapter.double()


def greedy(model, ids, new_tokens):
    """What `generate` should give, with a forward of the whole text for every token."""
    for _ in range(new_tokens):
        with torch.no_grad():
            ids = torch.cat([ids, model.eval()(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def tree(model):
    """What a refusal must not change: modules, parameters with their flags and values."""
    modules = [(name, type(module), module.training) for name, module in model.named_modules()]
    return modules, [(name, p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()]


def same_tree(one, other):
    same = one[0] == other[0] and len(one[1]) == len(other[1])
    return same and all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.filterwarnings("ignore")
def test_every_verb_works_or_changes_nothing(tuner, tmp_path):
    configure, refused = TUNERS[tuner]
    model = base()
    plain = logits(model)
    adapter = adapted(model, configure(model))
    acting = logits(adapter)
    assert (acting[:, -20:] - plain).abs().max() > 1e-3

    def verb(name, act):
        """Whether it worked; a refusal leaves the adapter's tree and what it computes."""
        before = tree(adapter)
        if name in refused:
            with pytest.raises((ValueError, TypeError, AttributeError)):
                act()
        else:
            act()
        assert same_tree(tree(adapter), before) or name not in refused
        torch.testing.assert_close(logits(adapter), acting, **CLOSE)

    def generate():
        tokens = adapter.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(tokens, greedy(adapter, IDS, 3))

    def disable():
        with adapter.disable_adapter():
            assert torch.equal(logits(adapter), plain)

    def merge():
        adapter.merge_adapter()
        torch.testing.assert_close(logits(adapter), acting, **CLOSE)
        adapter.unmerge_adapter()

    def second():
        adapter.add_adapter("second", configure(adapter))
        adapter.double().set_adapter("second")
        assert not torch.allclose(logits(adapter), acting, atol=1e-4)
        adapter.set_adapter("default")

    def weighted():
        adapter.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mixed", combination_type="cat")
        adapter.delete_adapter("mixed")

    def load_adapter():
        again = base()
        before = tree(again)
        try:
            again.load_adapter(tmp_path)
        except ValueError:
            assert same_tree(tree(again), before) and not again._hf_peft_config_loaded
            raise
        torch.testing.assert_close(logits(again.double()), acting, **CLOSE)

    verb("generate", generate)
    verb("disable", disable)
    adapter.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(), tmp_path).double()
    torch.testing.assert_close(logits(again), acting, atol=1e-6, rtol=0)  # some tuners make their factors in float32
    verb("load_adapter", load_adapter)
    verb("merge", merge)
    verb("second", second)
    verb("weighted", weighted)
    verb("hotswap", lambda: hotswap_adapter(adapter, str(tmp_path), "default"))
    verb("delete", lambda: adapter.delete_adapter("second"))
    if "merge" not in refused:
        torch.testing.assert_close(logits(adapter.merge_and_unload()), acting, **CLOSE)


@pytest.mark.filterwarnings("ignore")
def test_adalora_takes_ranks_away_and_the_rest_is_read_again(tmp_path):
    """peft would train the number by which it divides the update, and not save it (weights of bfloat16)."""
    model = base().bfloat16()
    config = AdaLoraConfig(init_r=4, target_r=2, total_step=6, tinit=1, tfinal=1, target_modules=LAYERS)
    torch.manual_seed(0)
    adapter = get_peft_model(model, config)
    optimizer = torch.optim.SGD([p for p in adapter.parameters() if p.requires_grad], lr=0.1)
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter) * 0.5)
    for step in range(6):
        adapter.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        adapter.base_model.update_and_allocate(step)
        optimizer.zero_grad()
    ranks = [sum(kept) for kept in config.rank_pattern.values()]
    assert min(ranks) < max(ranks) and sum(ranks) < 4 * len(ranks)
    acting = logits(adapter.double())
    assert (acting - logits(base().bfloat16().double())).abs().max() > 1e-3
    adapter.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base().bfloat16(), tmp_path).double()
    torch.testing.assert_close(logits(again), acting, **CLOSE)
    torch.testing.assert_close(logits(adapter.merge_and_unload()), acting, **CLOSE)
    model = base()
    before = tree(model)
    with pytest.raises(ValueError, match=r"AdaLoRA .*: load it with PeftModel\.from_pretrained"):
        model.load_adapter(tmp_path)
    assert same_tree(tree(model), before)


@pytest.mark.parametrize("kind", ["text", "multimodal"])
@pytest.mark.parametrize("prompts", PROMPTS)
@torch.no_grad()
def test_learned_prompts_stand_before_the_text_once(prompts, kind):
    """In a batch with padding too. peft takes a cache whose name it does not know for none, and would put them before
    every token."""
    model = base(initializer_range=0.1)
    if kind == "multimodal":
        text, model = model, KimiK3ForConditionalGeneration(KimiK3Config(text_config=model.config, **tiny.SPECIAL))
        model.language_model.load_state_dict(text.state_dict())
        model.double().eval()
    adapter = adapted(model, PROMPTS[prompts]()).eval()
    for parameter in filter(lambda parameter: parameter.requires_grad, adapter.parameters()):
        parameter.add_(torch.randn_like(parameter))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = greedy(adapter, IDS, 4)
    assert not torch.allclose(logits(adapter)[:, -20:], logits(model), atol=1e-3)
    assert torch.equal(adapter.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), **options), expected)
    batch = torch.cat([IDS, IDS.roll(3)])
    mask = torch.ones_like(batch)
    mask[1, :3] = 0
    both = adapter.generate(input_ids=batch, attention_mask=mask, **options)
    assert torch.equal(both[:1], expected) and torch.equal(both[1:, 3:], greedy(adapter, IDS[:, :-3], 4))


@pytest.mark.one_release
@pytest.mark.parametrize("tuner", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_other_tuners_of_peft(tuner, tmp_path):
    """Forward, cached steps, saving and loading; a merge, or its refusal with nothing changed."""
    configure, merges = OTHERS[tuner]
    adapter = adapted(base(), configure()).eval()
    acting = logits(adapter)
    assert (acting - logits(base())).abs().max() > 1e-3
    with torch.no_grad():
        begun = adapter(input_ids=IDS[:, :-2], use_cache=True)
        steps = [adapter(input_ids=IDS[:, i : i + 1], **{CACHE_ARGUMENT: begun.cache}).logits for i in (18, 19)]
    close = {"atol": 1e-6, "rtol": 0}  # some tuners compute in float32
    torch.testing.assert_close(torch.cat([begun.logits, *steps], dim=1), acting, **close)
    adapter.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base(), tmp_path).double()), acting, **close)
    if merges:
        torch.testing.assert_close(logits(adapter.merge_and_unload()), acting, **close)
        return
    before = tree(adapter)
    with pytest.raises((ValueError, NotImplementedError)):
        adapter.merge_and_unload()
    assert same_tree(tree(adapter), before)


MERGES_REFUSED = {
    "safe merge of a layer": (lora(), "o_proj.lora_B", True, "NaNs detected"),
    "safe merge of experts": (lora(target_modules=["q_proj", "experts"]), "lora_down_B", True, "is not finite"),
    "packed experts": (lora(target_modules=["q_proj", "experts"]), "lora_down_B", False, "is not finite"),
    "a bias": (lora(lora_bias=True), None, False, "base layer has no bias"),
}


@pytest.mark.parametrize("verb", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("case", MERGES_REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_merge_that_a_layer_refuses_merges_none(case, verb):
    """peft merges one layer behind the other, and stops where it fails."""
    configure, broken, safe, sentence = MERGES_REFUSED[case]
    model = base(**(tiny.PACKED if "packed" in case else {}))
    adapter = adapted(model, configure(model))
    last = [parameter for name, parameter in adapter.named_parameters() if broken and broken in name][-1:]
    for parameter in last:
        parameter.data.view(-1)[0] = float("inf")
    before = tree(adapter)
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        getattr(adapter, verb)(safe_merge=safe)
    assert same_tree(tree(adapter), before) and not adapter.get_model_status().merged_adapters


@pytest.mark.filterwarnings("ignore")
def test_an_activated_lora_is_not_loaded_where_it_would_never_act(tmp_path):
    """It acts behind its tokens, which transformers does not look for."""
    adapter = adapted(base(), lora(alora_invocation_tokens=[9, 10])(None))
    assert not torch.allclose(logits(adapter), logits(base()), atol=1e-4)
    adapter.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base(), tmp_path)), logits(adapter), **CLOSE)
    model = base()
    before = tree(model)
    with pytest.raises(ValueError, match=r"activated LoRA, so it would never act: load it with PeftModel\."):
        model.load_adapter(tmp_path)
    assert same_tree(tree(model), before)


def test_experts_are_not_prepared_for_swapping():
    adapter = adapted(base(), lora(target_modules=["q_proj", "experts"])(None))
    before = tree(adapter)
    with pytest.raises(ValueError, match="adapters of routed experts cannot be swapped in place: load the other under"):
        hotswap.prepare_model_for_compiled_hotswap(adapter, target_rank=8)
    assert same_tree(tree(adapter), before)
    scales = [module.scaling["default"] for module in adapter.modules() if isinstance(module, LoraLayer)]
    assert len(scales) == 4 and set(map(type, scales)) == {float}


REFUSED = {
    "prefix tuning": (
        lambda model: PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM", num_layers=3, token_dim=56),
        "prefix tuning trains keys .* most layers here have a recurrent state",
    ),
    "a cartridge": (
        lambda model: CartridgeConfig(num_virtual_tokens=4, task_type="CAUSAL_LM", num_layers=3, token_dim=56),
        "a cartridge trains keys .* most layers here have a recurrent state",
    ),
    "layers twice": (
        lora(target_modules=["q_proj"], layer_replication=[[0, 2], [1, 3]]),
        "layer_replication would make layers",
    ),
    "DoRA on experts": (lora(target_modules=["q_proj", "experts"], use_dora=True), "use_dora"),
    "LoHa on experts": (lambda model: LoHaConfig(r=4, target_modules=["q_proj", "experts"]), "KimiK3Experts"),
    "a norm": (lora(target_modules=["q_proj", "input_layernorm"]), "KimiK3RMSNorm"),
    "packed experts whole": (lora(modules_to_save=["experts"]), "experts holds packed bytes"),
    "packed bytes": (lora(target_parameters=["experts.down_proj_packed"]), "holds packed bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_added_leaves_the_model(case, second, tmp_path):
    """Also beside an adapter that is there; a part of the new one had been added before it failed."""
    configure, sentence = REFUSED[case]
    model = base(**(tiny.PACKED if "packed" in case else {}))
    holder = adapted(model, lora(target_modules=["q_proj", "experts"])(model)) if second else model
    computed, before = logits(holder), tree(holder)
    sentence = (
        f"{sentence}|Cannot combine adapters with different peft types|is not a valid target" if second else sentence
    )
    with pytest.raises((ValueError, TypeError), match=sentence):
        if second:
            holder.add_adapter("other", configure(model))
        else:
            get_peft_model(model, configure(model))
    assert same_tree(tree(holder), before) and torch.equal(logits(holder), computed)
    if second:
        assert list(holder.peft_config) == ["default"]


@pytest.mark.parametrize("way", ["PeftModel", "second", "load_adapter"])
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_lacks_a_tensor_is_refused(way, tmp_path):
    """peft begins it at random and warns."""
    model = base()
    adapted(model, LoraConfig(r=4, **lora_targets(model))).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = [name for name in tensors if "layers.1." in name and ("down_B" in name or "kv_b_proj.lora_A" in name)]
    save_file({name: tensor for name, tensor in tensors.items() if name not in lost}, file)
    model = base()
    holder = adapted(model, lora()(model)) if way == "second" else model
    computed, before = logits(holder), tree(holder.train())
    with pytest.raises(ValueError, match=rf"the adapter in .* lacks .*layers\.1\..* and {len(lost) - 1} more, and its"):
        if way == "PeftModel":
            PeftModel.from_pretrained(model, tmp_path)
        else:
            holder.load_adapter(str(tmp_path), "other")
    assert same_tree(tree(holder), before) and torch.equal(logits(holder), computed)


@pytest.mark.parametrize("trained_on", ["more layers", "experts"])
@pytest.mark.parametrize("way", ["PeftModel", "second", "load_adapter"])
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_another_model_is_refused(way, trained_on, tmp_path):
    """peft leaves out, without a word, what it finds no layer for."""
    trained, changes = (tiny.model("kmkkm"), {}) if trained_on == "more layers" else (base(), tiny.DENSE)
    adapted(trained, lora(target_modules=["q_proj", "experts"])(trained)).save_pretrained(tmp_path)
    model = base(**changes)
    holder = adapted(model, lora()(model)) if way == "second" else model
    computed, before = logits(holder), tree(holder)
    with pytest.raises(
        ValueError, match=r"the adapter in .* has .*layers\.(3|4|1\..*experts).*, which has no place on"
    ):
        if way == "PeftModel":
            PeftModel.from_pretrained(model, tmp_path)
        else:
            holder.load_adapter(str(tmp_path), "other")
    assert same_tree(tree(holder), before) and torch.equal(logits(holder), computed)


@pytest.mark.filterwarnings("ignore")
def test_the_numbers_of_a_loaded_adapter(tmp_path):
    """peft keeps factors in float32; transformers rounds those beside weights of bfloat16, as for all models."""
    model = tiny.model("kmk", **tiny.PACKED).bfloat16()
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "experts"])).save_pretrained(tmp_path)

    def factors(model):
        named = {name.partition("lora_")[2]: p.dtype for name, p in model.named_parameters() if "lora_" in name}
        return named["A.default.weight"], named["down_A.default"]

    model = tiny.model("kmk", **tiny.PACKED).bfloat16()
    model.load_adapter(tmp_path)
    assert factors(model) == (torch.bfloat16, torch.float32)
    again = PeftModel.from_pretrained(tiny.model("kmk", **tiny.PACKED).bfloat16(), tmp_path)
    assert factors(again) == (torch.float32, torch.float32)


@pytest.mark.filterwarnings("ignore")
def test_the_verbs_of_transformers(tmp_path):
    """They work, or are refused where transformers asks for another peft."""
    model, config = base(), lora(target_modules=["q_proj", "experts"])(None)
    plain, before = logits(model), tree(model)
    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        with pytest.raises(ValueError, match="version of PEFT"):
            model.add_adapter(config)
        assert same_tree(tree(model), before)
        return
    model.add_adapter(config, "one")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.double()
    acting = logits(model)
    assert (acting - plain).abs().max() > 1e-3
    model.disable_adapters()
    assert torch.equal(logits(model), plain)
    model.enable_adapters()
    assert torch.equal(logits(model), acting)
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "two")
    model.double().delete_adapter("one")
    model.set_adapter("two")
    torch.testing.assert_close(logits(model), acting, **CLOSE)
    model.delete_adapter("two")
    assert torch.equal(logits(model), plain)


@pytest.mark.filterwarnings("ignore")
def test_swapping_in_place_refuses_another_scale(tmp_path):
    """Through transformers, which swaps the factors alone; the experts' too."""
    expected = {}
    for name, alpha in (("first", 4), ("alike", 4), ("other", 16)):
        config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "experts"])
        adapter = adapted(base(), config, seed=len(expected))
        expected[name] = logits(adapter)
        adapter.save_pretrained(tmp_path / name)
    model = base()
    model.load_adapter(tmp_path / "first", "swapped")
    model.load_adapter(tmp_path / "alike", "swapped", hotswap=True)
    torch.testing.assert_close(logits(model), expected["alike"], **CLOSE)
    before = tree(model)
    with pytest.raises(ValueError, match=r"has the scale 4 and the one that it would replace 1 .* under a name of its"):
        model.load_adapter(tmp_path / "other", "swapped", hotswap=True)
    assert same_tree(tree(model), before)


@pytest.mark.filterwarnings("ignore")
def test_text_only_and_multimodal_classes_read_each_others_adapters(tmp_path):
    text = KimiK3ForCausalLM(tiny.config("kmk")).double()
    whole = KimiK3ForConditionalGeneration(KimiK3Config(text_config=tiny.config("kmk"), **tiny.SPECIAL)).double()
    whole.language_model.load_state_dict(text.state_dict())
    folders = {}
    for name, model in (("text", text), ("whole", whole)):
        adapter = adapted(copy.deepcopy(model), LoraConfig(r=4, **lora_targets(model)))
        expected = logits(adapter)
        folders[name] = tmp_path / name
        adapter.save_pretrained(folders[name])
    for name, reader in (("text", whole), ("whole", text)):
        loaded = PeftModel.from_pretrained(copy.deepcopy(reader), folders[name])
        torch.testing.assert_close(logits(loaded), expected, **CLOSE)
        loaded.load_adapter(folders[name], "second")
        loaded.set_adapter("second")
        torch.testing.assert_close(logits(loaded), expected, **CLOSE)
        loaded = copy.deepcopy(reader)
        loaded.load_adapter(folders[name])
        torch.testing.assert_close(logits(loaded), expected, **CLOSE)


# Whatever reads adapters, and no import but of the model: what lm-eval, trl and the like do.
FRESH = """
import sys, warnings, torch
warnings.simplefilter("ignore")
from pathlib import Path
from transformers import AutoModelForCausalLM
base, folder, remote = sys.argv[1:]
if remote:
    assert "kimi_k3" not in sys.modules
else:
    import kimi_k3
trust = {"trust_remote_code": bool(remote), "dtype": torch.float32}
first, *others = sorted(Path(folder).iterdir())
models = {"Auto": AutoModelForCausalLM.from_pretrained(first, **trust)}
assert ("kimi_k3" in sys.modules) != bool(remote)
models["load_adapter"] = AutoModelForCausalLM.from_pretrained(base, **trust)
models["load_adapter"].load_adapter(str(first))
from peft import AutoPeftModelForCausalLM, PeftModel
models["AutoPeft"] = AutoPeftModelForCausalLM.from_pretrained(first, **trust)
for adapter in (first, *others):
    models["PeftModel"] = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **trust), adapter)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        torch.save({way: model.eval()(input_ids=ids).logits for way, model in models.items()}, adapter / "logits.pt")
    models.clear()
"""
PARTS = ("attention", "dense", "experts", "shared", "latent", "router")


def read_by_a_fresh_process(folder, adapters, remote=""):
    """Save adapters of packed experts and read them: the first in every way, the others by peft."""
    tiny.model("kmk", **tiny.PACKED).save_pretrained(folder / "base")
    expected = []
    for number, (parts, options) in enumerate(adapters):
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        targets = lora_targets(model, **{part: part in parts for part in PARTS} if parts else {})
        adapter = adapted(model, LoraConfig(**targets, **options)).float()
        adapter.save_pretrained(folder / "adapters" / str(number))
        expected.append(logits(adapter))
    environment = tiny.environment(HF_MODULES_CACHE=str(folder / "modules"), HF_HUB_OFFLINE="1")
    command = [sys.executable, "-P", "-c", FRESH, str(folder / "base"), str(folder / "adapters"), remote]
    subprocess.run(command, check=True, env=environment)
    for number, wanted in enumerate(expected):
        read = torch.load(folder / "adapters" / str(number) / "logits.pt")
        assert len(read) == (1 if number else 4)
        for way, got in read.items():
            torch.testing.assert_close(
                got, wanted, atol=1e-5, rtol=0, msg=lambda text, i=number, way=way: f"{adapters[i]}, {way}: {text}"
            )


PLAIN = None, {"r": 4}


@pytest.mark.filterwarnings("ignore")
def test_a_fresh_process_loads_an_adapter_folder_with_its_code(tmp_path):
    read_by_a_fresh_process(tmp_path, [PLAIN], remote="remote")


# What a part refuses is left out: experts take plain factors, a parameter that is no module's weight no dropout.
CONFIGURATIONS = st.builds(
    lambda parts, dora, dropout, **options: (
        parts,
        options
        | {"use_dora": dora and not parts & {"experts", "router"}, "lora_dropout": dropout * ("router" not in parts)},
    ),
    st.frozensets(st.sampled_from(PARTS), min_size=1),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
    r=st.integers(1, 9),
    lora_alpha=st.integers(1, 32),
    use_rslora=st.booleans(),
    modules_to_save=st.sampled_from([None, ["lm_head"]]),
)


@pytest.mark.one_release
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=1, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(CONFIGURATIONS, min_size=4, max_size=4))
def test_random_adapters_are_saved_and_read_by_a_fresh_process(tmp_path_factory, drawn):
    """One process for all of them, since it starts for seconds."""
    read_by_a_fresh_process(tmp_path_factory.mktemp("random"), [PLAIN, *drawn])
