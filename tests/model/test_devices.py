"""A model on several devices, and caches offloaded from them, on devices that are pretended.

A `Pretended` tensor says that it lies on a device, while its data are a CPU tensor; an operation that mixes devices
raises as it would on GPUs. The layers are moved to two such devices and joined by accelerate's hooks, as
`device_map="auto"` does it.
"""

import contextlib
import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from transformers import AutoModelForCausalLM

from kimi_k3 import CACHE_ARGUMENT as CACHE
from kimi_k3 import HybridCache
from rounding import EXACT

CPU = torch.device("cpu")
DEVICES = [
    torch.device("cpu:1"),
    torch.device("cpu:2"),
]  # names that torch knows, that differ, and that need no runtime
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Pretended(torch.Tensor):
    @staticmethod
    def __new__(cls, data, device):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=device
        )

    def __init__(self, data, device):
        self.data_on_cpu = data

    def tolist(self):  # reads memory without an operation
        return self.data_on_cpu.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class FromLists(TorchFunctionMode):
    """`torch.tensor(list, device=...)` as an operation on the CPU and a copy."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        device = (kwargs or {}).pop("device", None) if function is torch.tensor else None
        result = function(*args, **(kwargs or {}))
        return result if device is None else result.to(device)


class Operations(TorchDispatchMode):
    """Where operations that make tensors on a pretended device are caught."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


@contextlib.contextmanager
def pretended_devices():
    with FromLists(), Operations():
        yield


def run(function, args, kwargs):
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    lie_on = {x.device for x in tensors if x.dim() > 0 or x.device != CPU}  # a number on the CPU goes with any device
    if len(lie_on) > 1 and function not in COPIES:
        raise RuntimeError(f"{function} mixes the devices {sorted(map(str, lie_on))}")
    device = args[0].device if function == COPIES[1] else next(iter(lie_on), CPU)
    if kwargs.get("device") is not None:
        device, kwargs = torch.device(kwargs["device"]), {**kwargs, "device": CPU}
    to_cpu = lambda x: x.data_on_cpu if isinstance(x, Pretended) else x  # noqa: E731
    result = function(*tree_map(to_cpu, args), **tree_map(to_cpu, kwargs))
    if device == CPU:
        return result
    wrapped = tree_map(lambda x: Pretended(x, device) if isinstance(x, torch.Tensor) else x, result)
    return return_and_correct_aliasing(function, args, kwargs, wrapped)


def to_cpu(tensor):
    return tensor.data_on_cpu if isinstance(tensor, Pretended) else tensor


@pytest.fixture(scope="module", params=["k3_tiny_mxfp4", "kimi_linear_flat"])
def model(request, data_dir):
    return AutoModelForCausalLM.from_pretrained(data_dir / request.param, dtype=torch.float32).double()


def placed(model, devices):
    """A copy of the model with its layers on these devices in turn, embedding and head on the first."""
    model = copy.deepcopy(model)
    prefix = "language_model." if hasattr(model, "language_model") else ""
    layers = len(getattr(model, "language_model", model).model.layers)
    # blocks of two neighbours, so that states of both kinds of layer lie on both devices
    places = {f"{prefix}model.layers.{i}": devices[i // 2 % len(devices)] for i in range(layers)}
    inner = getattr(model, "language_model", model)
    others = [name for name, _ in inner.model.named_children() if name != "layers"]
    places |= {f"{prefix}model.{name}": devices[-1] if "attn_res" in name else devices[0] for name in others}
    places[f"{prefix}lm_head"] = devices[0]
    for name, module in model.named_modules():
        owner = next((place for place in places if f"{name}.".startswith(f"{place}.")), f"{prefix}lm_head")
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    moved = Pretended(tensor.detach(), places[owner])
                    held[key] = nn.Parameter(moved, requires_grad=False) if held is module._parameters else moved
    attach_align_device_hook_on_blocks(
        model,
        execution_device={**places, "": devices[0]},
        offload=dict.fromkeys(places, False),
        skip_keys=model._skip_keys_device_placement,
    )
    return model


def tokens(rows, length, seed=0):
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(seed))


def lies_on(layer):
    return {tensor.device for tensor in layer.tensors()}


def test_mixing_devices_raises():
    with pretended_devices(), pytest.raises(RuntimeError, match="mixes the devices"):
        torch.ones(2, device=DEVICES[0]) + torch.ones(2, device=DEVICES[1])


@pytest.mark.one_release
@pytest.mark.parametrize("kind", ["growing", "static", "offloaded"])
@torch.no_grad()
def test_states_lie_with_their_layers(model, kind):
    """Fault 45: padding, blocks of depth and a cache across two devices; offloaded, all is on the CPU between."""
    ids, mask = tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[0, :5], mask[1, 22] = 0, 0
    expected = model(ids, attention_mask=mask).logits
    cache = HybridCache(model.config, max_length=30 if kind == "static" else None, offload=kind == "offloaded")
    with pretended_devices():
        split = placed(model, DEVICES)
        inner = getattr(split, "language_model", split)
        inner.model.check_finite = True
        outputs, start = [], 0
        for stop in (20, 21, 22, 23, 24):
            output = split(
                ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE: cache}, output_hidden_states=True
            )
            outputs.append(to_cpu(output.logits.to("cpu")))
            start = stop
            for layer, decoder in zip(cache.layers, inner.model.layers, strict=True):
                home = decoder.input_layernorm.weight.device
                assert lies_on(layer) == {CPU if kind == "offloaded" else home}
        assert {next(iter(lies_on(layer))) for layer in cache.layers} == ({CPU} if kind == "offloaded" else {*DEVICES})
    torch.testing.assert_close(torch.cat(outputs, dim=1)[mask.bool()], expected[mask.bool()], **EXACT)


@pytest.mark.parametrize("offload", [False, True], ids=["on its device", "offloaded"])
@torch.no_grad()
def test_the_cache_across_devices(model, offload):
    """Faults 44, 45: rollback, reorder, save and load with layers on two devices."""
    ids, following = tokens(2, 20), tokens(2, 3, 1)
    expected = model(torch.cat([ids, following], dim=1).flip(0)).logits[:, -3:]
    with pretended_devices():
        split = placed(model, DEVICES)
        cache = HybridCache(model.config, offload=offload)
        cache.activate_past_recording()
        split(ids, **{CACHE: cache})
        split(tokens(2, 4, 2), **{CACHE: cache})
        cache.crop(-4)
        cache.reorder_cache(torch.tensor([1, 0]))
        elsewhere = copy.deepcopy(cache).to(CPU)  # as a loaded cache: it follows the layers
        for held in (cache, elsewhere):
            logits = split(following.flip(0), **{CACHE: held}).logits
            torch.testing.assert_close(to_cpu(logits.to("cpu")), expected, **EXACT)


@torch.no_grad()
def test_packed_documents_across_devices(model):
    ids = tokens(1, 24)
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
    expected = model(ids, position_ids=positions).logits
    with pretended_devices():
        logits = placed(model, DEVICES)(ids, position_ids=positions).logits
        torch.testing.assert_close(to_cpu(logits.to("cpu")), expected, **EXACT)


@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 8}],
    ids=["greedy", "beams", "prompt lookup", "chunks"],
)
def test_offloaded_generation_gives_the_same_text(model, how):
    ids = tokens(1, 12).repeat(1, 2)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    output = model.generate(ids, cache_implementation="offloaded", return_dict_in_generate=True, **settings, **how)
    assert all(layer.offloaded for layer in output.past_key_values.layers)
    assert torch.equal(output.sequences, model.generate(ids, **settings, **how))


@pytest.mark.parametrize("places", ["cpu", "disk"])
def test_weights_that_accelerate_offloads(places, model, tmp_path):
    """Its hooks of modules without weights have no device, and move every argument there, the cache too."""
    ids = tokens(1, 12)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    offloaded = copy.deepcopy(model)
    if places == "cpu":
        cpu_offload(offloaded, "cpu")
    else:
        disk_offload(offloaded, tmp_path, "cpu")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(offloaded.generate(ids, **options), expected)
