"""The cost model against `torch.utils.flop_counter`, the tensors of small models, and published totals."""

import importlib
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MistralConfig, Qwen3MoeConfig

from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3Config, KimiK3ForCausalLM, KimiK3TextConfig
from kimi_k3 import __main__ as cli
from kimi_k3.costs import formulas
from kimi_k3.costs.report import cost_of, read_cost

pytestmark = pytest.mark.one_release

attn_res, experts, kda = (importlib.import_module(f"kimi_k3.kernels.{name}") for name in ("attn_res", "experts", "kda"))
FOLDERS = ("k3_tiny_mxfp4", "k3_dense_flat", "kimi_linear_flat")


class Flops(TorchDispatchMode):
    """As `FlopCounterMode` counts, without the hooks by which that one tells modules apart: they are called then."""

    def __init__(self, mapping):
        super().__init__()
        self.total, self.mapping = 0, {**flop_registry, **mapping}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if (count := self.mapping.get(function.overloadpacket)) is not None:
            shape = out.shape if isinstance(out, torch.Tensor) else None
            own = function.overloadpacket in flop_registry
            self.total += count(*args, **(kwargs or {}), **({"out_val": out} if own else {"out_shape": shape}))
        return out


def flops_of(function, mapping=None):
    with torch.no_grad(), Flops(mapping or {}) as counter:
        function()
    return counter.total


def elementwise(*args, out_shape=None, **kwargs):
    return out_shape.numel()


@pytest.fixture(scope="module", params=FOLDERS)
def small(request, data_dir):
    """(float32 model with eager attention, its cost)."""
    folder = data_dir / request.param
    model = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model, formulas.text_cost(model.config, request.param, dtype_bytes=4)


def test_parameters_and_bytes_are_those_of_the_tensors(small):
    model, counted = small
    logical = sum(
        p.numel() if p.dtype != torch.uint8 else 2 * p.numel() * name.endswith("packed")
        for name, p in (*model.named_parameters(), *model.named_buffers())
    )
    assert counted.totals()[0] == logical
    assert counted.totals()[2] == sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))


def test_cache_is_that_of_the_tensors(small):
    model, counted = small
    cache = HybridCache(model.config)
    with torch.no_grad():
        for tokens in (1, 36):
            model(torch.full((1, tokens), 7), **{CACHE_ARGUMENT: cache})
            assert cache.nbytes == counted.cache_bytes(cache.get_seq_length())
    assert cache.nbytes == counted.state_bytes() + 37 * counted.per_token_bytes()


@pytest.mark.parametrize(("tokens", "past"), [(64, 0), (1, 50), (20, 60)])
def test_flops_are_those_of_the_counter(small, tokens, past, monkeypatch):
    """Matrix products of a whole forward. What the counter cannot know is put in by hand: the square of pairs that
    eager attention computes instead of the causal ones, and the recurrence, which has a test of its own. Sums that some
    forms write as products are left out: mixes over depth, and of one token's experts."""
    model, counted = small
    monkeypatch.setattr(attn_res, "MAX_STACKED", 0)
    monkeypatch.setattr(experts, "is_one_token", lambda *tensors: False)
    cache = HybridCache(model.config)
    with torch.no_grad():
        if past:
            model(torch.full((1, past), 7), **{CACHE_ARGUMENT: cache})
        ids = torch.randint(3, 100, (1, tokens), generator=torch.Generator().manual_seed(0))
        got = flops_of(lambda: model(ids, **{CACHE_ARGUMENT: cache}))
    expected = counted.flops(tokens, past, heads=tokens) - sum(
        a.attention_flops(tokens, past) for a in counted.attention
    )
    for layer in counted.attention:
        if layer.kind == "MLA":
            pairs = tokens * (tokens + past)
            forms = [layer.expanded_flops(pairs, tokens, tokens + past)]
            forms += [layer.absorbed_flops(pairs, tokens)] if past else []
            expected += min(forms)
        elif tokens > kda.FEW_TOKENS:
            steps = -(-tokens // kda.CHUNK) * kda.CHUNK
            expected += steps * layer.heads * (6 * layer.head_dim**2 + (4 * kda.CHUNK - 4) * layer.head_dim)
        else:
            expected += tokens * layer.heads * 6 * layer.head_dim**2
    assert got == expected


def test_a_kda_token_takes_7_d_squared():
    """The recurrence as the equation has it, elementwise products and sums counted too."""
    size = 32
    state, k, q = torch.randn(size, size), torch.randn(size), torch.randn(size)

    def step():
        decayed = torch.mul(state, k[:, None])
        error = torch.mm(k[None], decayed)
        new = torch.add(decayed, torch.mul(k[:, None], error))
        torch.mm(q[None], new)

    aten = torch.ops.aten
    got = flops_of(step, {aten.mul: elementwise, aten.add: elementwise})
    layer = formulas.KDA(1, 1, size, 0, True, 4, 4)
    assert got == 7 * size**2 == layer.attention_flops(1, 10)
    assert layer.decode_bytes(10) == 2 * state.numel() * state.element_size()


def test_a_kda_prefill_is_linear_and_counts_the_chunked_form():
    """Matrix products as counted, plus the triangular solve and the first level of the tree, which are not."""
    size, heads = 32, 2
    layer = formulas.KDA(1, heads, size, 0, True, 4, 4)
    for tokens in (64, 256):
        q, k, v, g = (torch.rand(1, tokens, heads, size) for _ in range(4))
        got = flops_of(lambda tensors=(q, k, v, -g, g[..., 0]): kda.chunk_kda(*tensors))
        solve, first_level = 2 * kda.CHUNK * size, 4 * size
        assert got + tokens * heads * (solve + first_level) == layer.attention_flops(tokens, 0)


def test_the_released_model_has_its_published_counts(data_dir):
    """Totals, active parameters and bytes of the public tensor list; 32 padding values of each A_log are not ours."""
    config = KimiK3Config.from_pretrained(data_dir / "config_kimi_k3.json").text_config
    counted = formulas.text_cost(config, "K3")
    listed = json.loads((data_dir / "tensors_kimi_k3.json").read_text())
    assert listed, "the table of the release"
    padding = 69 * 32
    parameters, active, size = counted.totals()
    vision = 401_214_464 + 46_144_512
    assert parameters + vision + padding == 2_779_931_837_184
    assert active + padding == 104_189_614_848
    assert size + 2 * vision + 4 * padding == 1_560_860_324_864
    assert counted.per_token_bytes() == 27_648
    assert counted.state_bytes() == 434_110_464 + 69 * 3 * 3 * 12288 * 2
    linear = KimiK3TextConfig.from_pretrained(data_dir / "config_kimi_linear_48b.json")
    assert formulas.text_cost(linear).totals()[2] == 98_245_528_576
    assert 5600 < counted.break_even(formulas.without_recurrence(counted)) < 5700


def test_rooflines_of_the_formulas_on_one_h200(data_dir):
    """Numbers that were derived apart from this code for one layer (datasheet speed)."""
    config = KimiK3Config.from_pretrained(data_dir / "config_kimi_k3.json").text_config
    counted = formulas.text_cost(config)
    kda_layer, mla = counted.attention[0], counted.attention[3]
    gpu = formulas.GPUS["h200"]
    assert kda_layer.decode_bytes(1) / gpu.bandwidth == pytest.approx(2.62e-6, rel=0.01)
    assert mla.decode_bytes(131072) / gpu.bandwidth == pytest.approx(31.5e-6, rel=0.01)
    assert mla.absorbed_flops(131072, 1) / gpu.flops == pytest.approx(27.7e-6, rel=0.01)
    experts = counted.feed_forward[1]
    for tokens, distinct in ((1, 16), (8, 120), (16, 224), (32, 393), (64, 613)):
        assert formulas.distinct_experts(896, 16, tokens) == pytest.approx(distinct, abs=0.6)
    assert experts.one_expert == 33_030_144
    assert formulas.communication_ratio(experts, gpu, 8) == pytest.approx(2 * 989e12 / (6 * 3072 * 450e9) * 7 / 8)
    halved = formulas.dataclasses.replace(experts, latent=1792)
    assert formulas.all_to_all_bytes(64, experts, 8) == 2 * formulas.all_to_all_bytes(64, halved, 8)


def test_a_node_holds_what_its_memory_says(data_dir):
    """Weights, states and latents of the sessions that fit fill the memory, and one more session does not fit."""
    config = KimiK3Config.from_pretrained(data_dir / "config_kimi_k3.json").text_config
    counted, session = formulas.text_cost(config), 142_000
    for by_heads in (True, False):
        node = formulas.Node(formulas.GPUS["b300"], 8, by_heads)
        one = counted.state_bytes() + (8 if by_heads else 1) * 27_648 * session
        assert node.held_bytes(counted, session) == one
        sessions = node.cache_capacity(counted, session) / session
        assert counted.totals()[2] + sessions * one == pytest.approx(8 * 288e9, rel=1e-6)
    assert [formulas.GQA(64, 8, 4, 8, 0, 2).copies(gpus) for gpus in (1, 4, 8)] == [1, 1, 2]
    assert formulas.Node(formulas.GPUS["h100"], 1).cache_capacity(counted, session) == 0


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2),
        MistralConfig(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=1, head_dim=8, sliding_window=16),
        Qwen3MoeConfig(vocab_size=99, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
                       num_experts_per_tok=2),
    ],
    ids=["llama", "mistral", "qwen3_moe"],
)  # fmt: skip
def test_grouped_query_models_of_transformers(config):
    """Parameters, K/V cache and FLOPs of other families, against the model that transformers builds."""
    torch.manual_seed(0)
    config._attn_implementation = config._experts_implementation = "eager"  # fused ones are not counted
    model = AutoModelForCausalLM.from_config(config)
    counted = cost_of(config, "other", dtype_bytes=4)
    assert counted.totals()[0] == sum(p.numel() for p in model.parameters())
    past = 40
    ids = torch.arange(3, 3 + past)[None]
    with torch.no_grad():
        out = model(ids, use_cache=True)
        layers = getattr(out, CACHE_ARGUMENT).layers
        held = sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))
        kept = 15 if config.model_type == "mistral" else past  # transformers leaves out what the next token cannot read
        assert held * max(1, 16 / 15 * (kept == 15)) == counted.cache_bytes(past)
        got = flops_of(lambda: model(ids[:, :1], **{CACHE_ARGUMENT: getattr(out, CACHE_ARGUMENT)}))
    rotary = got - counted.flops(1, past if kept == past else 15)
    assert 0 <= rotary <= 2 * 64  # rotary tables are a matrix product in transformers


def test_a_window_reads_no_more_than_its_keys():
    layer = formulas.GQA(64, 4, 2, 16, 10, 2)
    pairs = sum(min(i + 1, 10) for i in range(5, 30))
    assert layer.attention_flops(25, 5) == 4 * 64 * pairs
    assert layer.cache_bytes(30) == layer.cache_bytes(10)


def test_a_window_of_all_layers_or_of_none():
    """Configurations without kinds of layers say it in one key, and some switch it off in another."""
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    assert [layer.window for layer in cost_of(config, "plain").attention] == [0, 0]
    config.sliding_window = 16
    assert [layer.window for layer in cost_of(config, "all").attention] == [16, 16]
    config.use_sliding_window = False
    assert [layer.window for layer in cost_of(config, "none").attention] == [0, 0]


def test_data_sheets():
    """Bytes of memory, bytes a second, dense bfloat16 FLOP/s, bytes a second of the link in one direction."""
    sheets = {name: (gpu.memory, gpu.bandwidth, gpu.flops, gpu.link) for name, gpu in formulas.GPUS.items()}
    assert sheets == {
        "h100": (80e9, 3.35e12, 989e12, 450e9),
        "h200": (141e9, 4.8e12, 989e12, 450e9),
        "b200": (192e9, 8e12, 2250e12, 900e9),
        "b300": (288e9, 8e12, 2250e12, 900e9),
    }
    # What one H200 was measured to reach of them: 4.22 TB/s and 693 TFLOP/s.
    node = formulas.Node(formulas.GPUS["h200"], 2)
    assert node.seconds(2 * 693e12, 0) == pytest.approx(1) == node.seconds(0, 2 * 4.22e12)
    assert node.seconds(693e12, 4 * 4.22e12) == pytest.approx(2)


def test_mla_of_deepseek_has_our_latent_and_no_formula_is_an_error():
    config = DeepseekV3Config(vocab_size=99, hidden_size=64, num_hidden_layers=2, first_k_dense_replace=2)
    layer = cost_of(config, "v3").attention[0]
    assert layer.kind == "MLA" and layer.cache_bytes(1) == 2 * (config.kv_lora_rank + config.qk_rope_head_dim)
    with pytest.raises(ValueError, match="linear_attention"):
        cost_of(KimiLikeUnknown(), "other")


class KimiLikeUnknown(LlamaConfig):
    layer_types = ["linear_attention", "full_attention"]


def test_command(data_dir, tmp_path, capsys):
    """Three models side by side, a picture; every refusal is one sentence."""
    llama = tmp_path / "llama"
    LlamaConfig(num_key_value_heads=8, num_hidden_layers=4, hidden_size=512, num_attention_heads=8).save_pretrained(
        llama
    )
    picture = tmp_path / "cost.png"
    configs = [str(data_dir / f"config_{name}.json") for name in ("kimi_k3", "kimi_linear_48b")]
    assert cli.main(["cost", *configs, str(llama), "--picture", str(picture), "--context", "142000"]) == 0
    out = capsys.readouterr().out
    assert "2.78 T" in out and "104 G" in out and "3,316,421" in out and "break-even" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    for argument, said in (
        (tmp_path / "nowhere", "no configuration"),
        (tmp_path, "no config.json"),
        (data_dir / "tensors_kimi_k3.json", "cannot be read"),
    ):
        assert cli.main(["cost", str(argument)]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["cost", configs[0], "--picture", "x.txt"]) == 2
    assert read_cost(data_dir / "kimi_linear_flat").totals()[0] > 0
    assert KimiK3TextConfig().num_hidden_layers == 93
