"""What is put around the call of a module acts in a prefill and in cached steps alike.

Some forms of a layer read weights in place of calling the modules that hold them: the absorbed form of MLA, the steps
of KDA, the norms behind a mix. They give way where a call does more.
"""

import contextlib

import pytest
import torch
from accelerate import hooks
from torch import nn
from torch.nn.utils import parametrize

import tiny
from kimi_k3 import HybridCache
from kimi_k3.kernels import dispatch
from rounding import EXACT

FAMILIES = {"k3": {}, "kimi_linear": tiny.KIMI_LINEAR}
# A prompt, steps of one token and an addition of several.
PIECES = (7, 1, 1, 3)
PROMPT = torch.randint(3, tiny.VOCABULARY, (2, sum(PIECES)), generator=torch.Generator().manual_seed(0))


def of_family(name):
    """In float64, with weights at which every module matters: fresh ones are zeros and ones here and there."""
    model = tiny.model("kmkm", **FAMILIES[name]).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3, generator=generator)
    return model


def changed(value, factor):
    """The results of a module times `factor`; whole numbers (chosen experts) and caches as they are."""
    if isinstance(value, torch.Tensor):
        return value * factor if value.is_floating_point() else value
    return tuple(changed(x, factor) for x in value) if isinstance(value, tuple) else value


def intercept(module, how, factor, note):
    """Have `note` called at every call of the module, and its results (or its first input) multiplied."""

    def after(module, args, output):
        note()
        return changed(output, factor)

    def before(module, args):
        note()
        return (changed(args[0], factor), *args[1:]) if args and args[0] is not None else None

    if how == "hook":
        module.register_forward_hook(after)
    elif how == "pre-hook":
        module.register_forward_pre_hook(before)
    else:
        plain = module.forward

        def forward(*args, **kwargs):
            return after(module, args, plain(*args, **kwargs))

        module.forward = forward


def parts(model):
    """Every module by name, without the model itself and what is never called."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return {name: module for name, module in model.named_modules() if name and not isinstance(module, lists)}


def in_pieces(model, cache):
    """Logits of the prompt, fed in pieces."""
    logits, start = [], 0
    for size in PIECES:
        logits.append(model(PROMPT[:, start : start + size], cache=cache).logits)
        start += size
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_module_is_called_in_every_form(family, how):
    model, called = of_family(family), []
    plain, modules = model(PROMPT).logits, parts(model)
    for number, (name, module) in enumerate(modules.items()):
        intercept(module, how, 1 + (number % 7 + 1) / 50, lambda name=name: called.append(name))
    whole = model(PROMPT).logits
    # The first layer reads one source, the embedding, of which no mix is made where nothing trains.
    uncalled = {name for name in modules if name.startswith("model.layers.0.self_attention_res_")}
    assert set(called) == set(modules) - uncalled
    assert (whole - plain).abs().max() > 1e-2
    for places in (None, sum(PIECES)):
        got = in_pieces(model, HybridCache(model.config, max_length=places))
        torch.testing.assert_close(got, whole, **EXACT)
    cache = HybridCache(model.config)
    model(PROMPT[:, :-1], cache=cache)
    called.clear()
    model(PROMPT[:, -1:], cache=cache)
    assert set(called) == set(modules) - uncalled, "a step passes over a module"


@torch.no_grad()
def test_hooks_of_all_modules_and_of_one():
    """A hook on one projection, as a user sets it, and torch's hooks of every module."""
    model = of_family("k3")
    attention = model.model.layers[1].self_attn
    assert dispatch.stands_for_call(attention.kv_b_proj, nn.Linear), "or there is nothing to pass over"
    for place in ("kv_b_proj", "kv_a_layernorm"):
        handle = getattr(attention, place).register_forward_hook(lambda module, args, output: output * 0.5)
        torch.testing.assert_close(in_pieces(model, HybridCache(model.config)), model(PROMPT).logits, **EXACT)
        handle.remove()

    def halve(module, args, output):
        return output * 0.5 if isinstance(module, nn.Linear) else None

    with contextlib.ExitStack() as stack:
        stack.callback(nn.modules.module.register_module_forward_hook(halve).remove)
        torch.testing.assert_close(in_pieces(model, HybridCache(model.config)), model(PROMPT).logits, **EXACT)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_parametrized_weights(family):
    """Of every module that has one: the weight that counts is the parametrization's."""
    model = of_family(family)
    for module in list(model.modules()):
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            parametrize.register_parametrization(module, "weight", Doubled())
    torch.testing.assert_close(in_pieces(model, HybridCache(model.config)), model(PROMPT).logits, **EXACT)


def test_gradients_pass_hooks_in_a_cached_step():
    model, seen = of_family("k3"), set()
    for name, module in parts(model).items():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(lambda module, *_, name=name: seen.add(name))
    cache = HybridCache(model.config)
    model(PROMPT[:, :-1], cache=cache)
    model(PROMPT[:, -1:], cache=cache).logits.sum().backward()
    assert seen == {name for name, module in parts(model).items() if isinstance(module, nn.Linear)}


@pytest.mark.one_release
def test_a_wrapper_that_only_moves_inputs_leaves_the_fused_forms():
    """accelerate puts one around every module of a model on several devices: decoding there would expand all keys."""
    moving = hooks.add_hook_to_module(nn.Linear(3, 4), hooks.AlignDevicesHook(execution_device="cpu"))
    other = hooks.add_hook_to_module(nn.Linear(3, 4), hooks.ModelHook())
    assert "forward" in vars(moving) and "forward" in vars(other)
    assert dispatch.stands_for_call(moving, nn.Linear) and not dispatch.stands_for_call(other, nn.Linear)
    moving.register_forward_hook(lambda module, args, output: output * 2)
    assert not dispatch.stands_for_call(moving, nn.Linear)
