"""The captured decoding step: what it does where a capture is refused; for real on a GPU."""

import contextlib
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig

import kimi_k3
from kimi_k3 import generation_kimi_k3, graph_kimi_k3
from rounding import EXACT

ON_GPU = torch.cuda.is_available()


def load(data_dir, folder="k3_dense_flat", device="cpu"):
    return AutoModelForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32).to(device).eval()


def test_only_a_model_on_one_device_with_graphs_is_captured(data_dir):
    model = load(data_dir)
    assert not graph_kimi_k3.can_capture(model)
    assert not graph_kimi_k3.can_capture(model.to("meta"))


def test_generate_is_given_the_captured_forward_where_there_are_graphs(data_dir, monkeypatch):
    model = load(data_dir)
    monkeypatch.setattr(generation_kimi_k3, "can_capture", lambda _: True)
    assert isinstance(model.get_compiled_call(None), graph_kimi_k3.CapturedForward)
    assert not isinstance(model.get_compiled_call(CompileConfig()), graph_kimi_k3.CapturedForward)


@torch.no_grad()
def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once(data_dir, monkeypatch, caplog):
    @contextlib.contextmanager
    def graph(_, **options):
        raise RuntimeError("a hook waits for the device")
        yield

    device = SimpleNamespace(CUDAGraph=object, graph=graph, Stream=lambda _: None, device=contextlib.nullcontext)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    model, ids = load(data_dir).double(), torch.arange(5, 11)[None]
    step, cache = graph_kimi_k3.CapturedForward(model), kimi_k3.HybridCache(model.config, max_length=8)
    expected = model(ids).logits
    with caplog.at_level(logging.WARNING):
        for t in range(6):
            logits = step(input_ids=ids[:, t : t + 1], **{kimi_k3.CACHE_ARGUMENT: cache}).logits
            torch.testing.assert_close(logits[:, 0], expected[:, t], **EXACT)
    assert [record.message for record in caplog.records].count(
        "the decoding step runs without a CUDA graph: RuntimeError: a hook waits for the device"
    ) == 1


@torch.no_grad()
def test_a_forward_that_waits_for_the_device_is_never_captured(data_dir, monkeypatch, caplog):
    """Broken off, a capture would leave the process's generator in the middle of it."""
    modes = []
    device = SimpleNamespace(get_sync_debug_mode=lambda: 0, set_sync_debug_mode=modes.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    model, ids = load(data_dir), torch.arange(5, 9)[None]
    harmless = (
        ("Synchronization debug mode is a prototype feature, does not yet detect all synchronizing operations", "a.py"),
        ("called a synchronizing CUDA operation", "transformers/masking_utils.py"),
    )

    def hook(*_):
        for text, file in harmless:
            warnings.warn_explicit(text, UserWarning, file, 1)

    model.register_forward_hook(hook)
    step, cache = graph_kimi_k3.CapturedForward(model), kimi_k3.HybridCache(model.config, max_length=8)
    step(input_ids=ids[:, :1], **{kimi_k3.CACHE_ARGUMENT: cache})
    assert modes == ["warn", 0] and not caplog.records
    modes.clear()
    model.register_forward_hook(lambda *_: warnings.warn("called a synchronizing CUDA operation", stacklevel=1))
    step, cache = graph_kimi_k3.CapturedForward(model), kimi_k3.HybridCache(model.config, max_length=8)
    for t in range(4):
        step(input_ids=ids[:, t : t + 1], **{kimi_k3.CACHE_ARGUMENT: cache})
    assert modes == ["warn", 0] and cache.get_seq_length() == 4
    assert [record.message for record in caplog.records if "waits for the device" in record.message]


@torch.no_grad()
def test_a_step_that_returns_more_than_logits_is_not_captured(data_dir, caplog):
    model = load(data_dir)
    step, cache = graph_kimi_k3.CapturedForward(model), kimi_k3.HybridCache(model.config, max_length=8)
    ids = torch.arange(5, 8)[None]
    for t in range(3):
        outputs = step(input_ids=ids[:, t : t + 1], output_hidden_states=True, **{kimi_k3.CACHE_ARGUMENT: cache})
        assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1
    assert "hidden states" in caplog.text


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("folder", ["k3_dense_flat", "kimi_linear_flat", "k3_tiny_mxfp4"])
@torch.no_grad()
def test_generate_on_a_static_cache_replays_a_graph(data_dir, folder, monkeypatch):
    """Same tokens as the dynamic cache, with padding, and the forward runs in Python a few times only."""
    model = load(data_dir, folder, "cuda")
    torch.manual_seed(0)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (2, 9), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    calls, forward = [], type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, *a, **k: calls.append(1) or forward(self, *a, **k))
    got = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(got, expected)
    assert len(calls) == 3  # the prompt, the first step, the captured one
