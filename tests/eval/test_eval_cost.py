"""`kimi-k3 eval-cost`: what it measures is what the cache holds; it continues, and draws."""

import json

import pytest
import torch

from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3TextConfig
from kimi_k3 import __main__ as cli
from kimi_k3.eval import EvalError
from kimi_k3.eval.cost import FULL, HYBRID, CostPlan, _static, full_attention, measure, random_model
from kimi_k3.eval.memory import PeakMemory
from kimi_k3.eval.run import write_memory
from kimi_k3.files_kimi_k3 import load_record
from kimi_k3.runs_kimi_k3 import lock

pytestmark = pytest.mark.one_release

PLAN = CostPlan((96, 192), rows=2, steps=2, chunk=64)


@pytest.fixture(scope="module")
def folder(data_dir):
    return data_dir / "k3_tiny_mxfp4"


def test_bytes_are_those_of_the_layers_and_a_finished_run_is_not_measured_again(folder, tmp_path):
    config = KimiK3TextConfig.from_pretrained(folder)
    assert full_attention(config).layer_types == ["full_attention"] * config.num_hidden_layers
    lines = measure(config, PLAN, tmp_path, torch.device("cpu"), torch.float32)
    assert [(line["length"], line["attention"]) for line in lines] == [
        (96, HYBRID),
        (96, FULL),
        (192, HYBRID),
        (192, FULL),
    ]
    latent = 2 * 4 * (config.kv_lora_rank + config.qk_rope_head_dim)  # two rows of float32
    mla = config.layer_types.count("full_attention")
    linear = config.linear_attn_config
    heads, size = linear["num_heads"], linear["head_dim"]
    states = 2 * 4 * (config.num_hidden_layers - mla) * (heads * size * size + 9 * heads * size)
    for line in lines:
        layers = mla if line["attention"] == HYBRID else config.num_hidden_layers
        constant = states if line["attention"] == HYBRID else 0
        assert line["cache_bytes"] == latent * line["length"] * layers + constant
        assert line["first_token_s"] > 0 and line["decode_ms"] > 0
    written = (tmp_path / "cost.jsonl").read_bytes()
    assert measure(config, PLAN, tmp_path, torch.device("cpu"), torch.float32) == lines
    assert (tmp_path / "cost.jsonl").read_bytes() == written
    with lock(tmp_path, EvalError), pytest.raises(EvalError, match="another process is working in"):
        measure(config, PLAN, tmp_path, torch.device("cpu"), torch.float32)
    with pytest.raises(EvalError, match="holds results of another run"):
        measure(config, CostPlan((96,), rows=1), tmp_path, torch.device("cpu"), torch.float32)


@torch.no_grad()
def test_a_static_cache_goes_on_where_the_other_stands(folder):
    """What decodes on a GPU, here on a CPU."""
    model = random_model(KimiK3TextConfig.from_pretrained(folder), torch.device("cpu"), torch.float32)
    ids = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(0))
    cache = HybridCache(model.config)
    model(ids, **{CACHE_ARGUMENT: cache})
    static = _static(model, cache, 43)
    for token in (ids[:, :1], ids[:, 1:2]):
        got, expected = (model(token, **{CACHE_ARGUMENT: c}).logits for c in (static, cache))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_the_peak_is_compared_with_what_a_prefill_has_to_hold(monkeypatch):
    """Weights 100, foreign 7; a cache of 30 made by the first of three forwards, which need 50, 45 and 60 beside it."""
    model = torch.nn.Linear(25, 1, bias=False)
    model.device, model.dtype = torch.device("cpu"), torch.float32
    memory = PeakMemory(model)
    assert memory.weights == 100 and memory.line(30) == {}
    memory.on = True  # as on a GPU, whose counters say:
    held, peaks = iter([107, 137]), iter([187, 182, 197])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(held))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    memory.start()
    for _ in range(3):
        with memory.forward():
            pass
    line = {"weight_bytes": 100, "cache_bytes": 30, "chunk_bytes": 50, "peak_bytes": 190, "peak_ratio": 1.056}
    assert memory.line(30) == line


def test_memory_is_kept_by_length(tmp_path, caplog):
    assert write_memory(tmp_path, {}) == {} and not list(tmp_path.iterdir())
    write_memory(tmp_path, {4096: {"peak_ratio": 1.5}, 65536: {"peak_ratio": 1.2}})
    known = write_memory(tmp_path, {8192: {"peak_ratio": 1.1}, 4096: {"peak_ratio": 1.0}})
    assert list(known) == ["4096", "8192", "65536"] and known["4096"] == {"peak_ratio": 1.0}
    assert load_record(tmp_path / "memory.json") == known
    (tmp_path / "memory.json").write_text((tmp_path / "memory.json").read_text().replace("1.1", "1.3"))
    assert write_memory(tmp_path, {}) == {} and "memory.json is damaged: what earlier runs measured" in caplog.text


def test_the_command_draws(folder, tmp_path, capsys):
    command = [
        "eval-cost",
        str(folder),
        "--lengths",
        "64,128",
        "--steps",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(command) == 0
    assert "full attention" in capsys.readouterr().out
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert len([json.loads(line) for line in (tmp_path / "cost.jsonl").read_text().splitlines()]) == 4
    assert cli.main([*command[:3], "4x", *command[4:]]) == 2
    assert "'4x' is no length" in capsys.readouterr().err
