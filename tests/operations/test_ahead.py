"""Compiling ahead: nothing is launched, whole models ask for few kernels, and lengths for none of their own.

On a processor, with a driver for sm_90 that has no GPU and a compiler that only counts.
"""

import contextlib
import copy
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import tiny
from kimi_k3 import generation_kimi_k3, warmup_kimi_k3
from kimi_k3.kernels import ahead

_async_compile = pytest.importorskip("triton.runtime._async_compile")

pytestmark = pytest.mark.one_release

PROGRAM = """
import collections
import threading
from types import SimpleNamespace
import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda _: 0))
compiled, launches = collections.Counter(), []

class Kernel:
    function = packed_metadata = None
    launch_metadata = staticmethod(lambda *_: None)
    def __init__(self, name):
        self.name = name
    @property
    def run(self):
        compiled[self.name] += 1
        return lambda *_: launches.append(self.name)

triton.compiler.compile = lambda src, **_: Kernel(src.name)

import tiny
from kimi_k3 import warmup_kimi_k3
from kimi_k3.cli.warmup import one_of_every_kind, unfilled_model
from kimi_k3.kernels import ahead, dispatch, norms

assert ahead.is_possible()
dispatch.triton_refusal = lambda *tensors, sizes=(): None

def ask(model, *sizes, **options):
    compiled.clear()
    warmup_kimi_k3.warm_up(model, *sizes, **options)
    assert not launches
    return dict(compiled)

# Once the sizes that an expert gets are known, no length and no batch needs a prompt's kernels anew.
experts = {"plan_kernel", "rank_kernel", "tiles_kernel", "place_kernel", "gate_up_kernel", "down_kernel"}
model = tiny.model("kmk")
first = ask(model, 1, 33)
assert [first[f"{name}_kernel"] for name in ("norm", "mix", "glu", "conv", "prepare")] == [5, 3, 2, 1, 1], str(first)
for tokens in (17, 48, 100, 128, 200):
    assert ask(model, 1, tokens).keys() <= experts
assert not ask(model, 1, 199)
assert ask(model, 16, 33).keys() <= experts | {"decode_kernel", "merge_kernel"}
ask(model, 1, 33, training=True)
assert ask(model, 2, 64, training=True).keys() <= experts

# A model of few layers asks for all that the whole one does.
config = tiny.config("kkkmkkkmkk", attn_res_block_size=3, hidden_size=72)
small = one_of_every_kind(config)
assert (small.num_hidden_layers, small.layer_types[1:3]) == (4, ["linear_attention", "full_attention"])
few = unfilled_model(small, torch.float32, torch.device("cpu"))
compiled.clear()
few.warmup((1,), (40,), progress=False)
assert compiled and not any("backward" in name for name in compiled), compiled
few.warmup((1, 3), (40,), training=True, progress=False)
assert compiled["mix_kernel"] >= 8 and compiled["mix_backward_kernel"] >= 4, compiled
model = tiny.model("kkkmkkkmkk", attn_res_block_size=3, hidden_size=72)
compiled.clear()
model.warmup((1, 3), (40,), training=True, progress=False)
assert not compiled, compiled
# Nothing is left behind: gradients, the mode of the model, launches that do not run.
assert all(parameter.grad is None for parameter in model.parameters()) and not model.training and not launches
x, weight = torch.randn(3, 56), torch.ones(56)
norms.rms_norm(x, weight, 1e-5)
assert launches == ["norm_kernel"]
launches.clear()
# While one thread compiles ahead, others launch; results are zeros.
with ahead.compiled_only(torch.device("cpu")):
    assert not norms.rms_norm(x, weight, 1e-5).any() and not launches
    other = threading.Thread(target=norms.rms_norm, args=(x, weight, 1e-5))
    other.start()
    other.join()
assert launches == ["norm_kernel"]
launches.clear()

# The first prompt asks by itself, once, but not where a hook would see tokens that nobody sent.
asked = []
warmup_kimi_k3.warm_up = lambda model, *sizes: asked.append(sizes)
for hooked in (False, True):
    model = tiny.model("km")
    type(model).device = torch.device("cuda")
    if hooked:
        model.lm_head.register_forward_hook(lambda *_: None)
    for _ in range(2):
        warmup_kimi_k3.warm_up_once(model, 2, 5, torch.tensor([[0, 1], [1, 1]]))
assert asked == [(2, 5, True)], asked
"""


def test_a_prompt_and_a_step_whatever_ends_a_text():
    """Zeros may be an end, or give one."""
    model, calls = tiny.model("km"), []
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.zeros(2, 5, dtype=torch.long)
    warmup_kimi_k3._generate(model, ids, torch.ones_like(ids))
    assert len(calls) == 2


def test_what_a_model_launches_is_compiled_ahead():
    environment = tiny.environment()
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_kernels_there_is_nothing_to_compile():
    model = tiny.model("k")
    with pytest.raises(RuntimeError, match=r"nothing to compile ahead for this model: its kernels do not run: .* cpu"):
        model.warmup()
    warmup_kimi_k3.warm_up_once(model, 1, 5, None)
    assert model not in warmup_kimi_k3._warm


def test_sizes_that_cannot_be(monkeypatch):
    monkeypatch.setattr(warmup_kimi_k3, "refusal", lambda model: None)
    with pytest.raises(ValueError, match=r"prompt_lengths are numbers of at least 1, not \[8, 0\]"):
        tiny.model("k").warmup(prompt_lengths=(8, 0))


@pytest.fixture
def _kernels_run(monkeypatch):
    """As far as warming up asks."""
    monkeypatch.setattr(warmup_kimi_k3, "refusal", lambda model: None)


@pytest.mark.usefixtures("_kernels_run")
def test_nobody_sees_zeros_that_nobody_sent():
    model, seen = tiny.model("k"), []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(RuntimeError, match="before hooks are set or modules wrapped: lm_head has a hook"):
        model.warmup(training=True)
    assert not seen


def test_every_part_of_a_model_keeps_its_mode():
    model = tiny.model("k").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    warmup_kimi_k3._train(model, torch.zeros(1, 5, dtype=torch.int64))
    assert [module.training for module in model.modules()] == modes and len({*modes}) == 2


def test_zeros_generate_two_tokens_whatever_ends_the_texts_of_a_model():
    model, fed = tiny.model("km"), []
    torch.nn.init.zeros_(model.lm_head.weight)  # the first token is 0, as of logits that are zeros
    model.generation_config.eos_token_id, model.generation_config.stop_strings = 0, ["end"]
    settings = copy.deepcopy(model.generation_config)
    model.model.register_forward_pre_hook(lambda _, args, given: fed.append(given["input_ids"].shape), with_kwargs=True)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    warmup_kimi_k3._generate(model, ids, torch.ones_like(ids))
    assert fed == [(2, 5), (2, 1)]
    assert model.generation_config.to_dict() == settings.to_dict()


def test_a_first_prompt_of_embeddings_warms_up_and_a_refused_one_does_not(monkeypatch):
    model, asked = tiny.model("k"), []
    monkeypatch.setattr(generation_kimi_k3, "warm_up_once", lambda model, *sizes: asked.append(sizes[:2]))
    embeds = torch.randn(2, 5, tiny.SIZES["hidden_size"])
    options = {"max_new_tokens": 1, "pad_token_id": 0}
    with pytest.raises(ValueError, match="prefill_chunk_size splits input_ids"):
        model.generate(inputs_embeds=embeds, prefill_chunk_size=2, **options)
    assert not asked
    model.generate(inputs_embeds=embeds, **options)
    model.generate(torch.ones(3, 4, dtype=torch.int64), prefill_chunk_size=2, **options)
    assert asked == [(2, 5), (3, 4)]


@pytest.mark.usefixtures("_kernels_run")
def test_a_prompt_without_tokens_leaves_the_first_one_to_come(monkeypatch):
    model, asked = tiny.model("k"), []
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(warmup_kimi_k3, "warm_up", lambda model, *sizes: asked.append(sizes))
    for tokens in (0, 3, 3):
        warmup_kimi_k3.warm_up_once(model, 1, tokens, None)
    assert asked == [(1, 3, False)]


def test_an_interrupt_waits_for_no_kernel_that_is_queued(monkeypatch):
    monkeypatch.setattr(ahead, "MOST_WORKERS", 1)
    started, goes_on, compiled = threading.Event(), threading.Event(), []

    def compile_kernel():
        started.set()
        goes_on.wait(10)
        compiled.append(1)
        return SimpleNamespace(run=None, name="kernel")

    with pytest.raises(KeyboardInterrupt), ahead.compiled_only(torch.device("cpu")):
        mode = _async_compile.active_mode.get()
        for key in range(3):
            mode.submit(key, compile_kernel, lambda kernel: None, lambda kernel: None)
        assert started.wait(10)
        threading.Timer(0.2, goes_on.set).start()
        raise KeyboardInterrupt
    assert compiled == [1]


@pytest.mark.usefixtures("_kernels_run")
def test_a_length_that_was_asked_for_is_the_one_that_runs(monkeypatch):
    """Tiles of experts and the form of the scan depend on it; before a first prompt it is not worth its products."""
    model, ran = tiny.model("k"), []
    monkeypatch.setattr(ahead, "compiled_only", lambda *_: contextlib.nullcontext([]))
    monkeypatch.setattr(warmup_kimi_k3, "_generate", lambda model, ids, mask: ran.append((*ids.shape,)))
    model.warmup((1,), (40_000,))
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(warmup_kimi_k3, "warm_up", lambda model, *sizes: ran.append(sizes[:2]))
    warmup_kimi_k3.warm_up_once(tiny.model("k"), 1, 40_000, None)
    assert ran == [(1, 40_000), (1, 2048)]
