"""The fingerprint of a model: another for any other weights, the same for equal ones however they are stored."""

import copy

import pytest
import torch

import tiny
from kimi_k3 import KimiK3ForCausalLM, fingerprint_kimi_k3
from kimi_k3.cache_kimi_k3 import model_fingerprint

pytestmark = pytest.mark.one_release


@pytest.fixture(scope="module")
def model():
    return tiny.model("km")


def permuted(weight):
    """The same values in other places, but for those of a sample of 64."""
    flat = weight.detach().flatten().clone()
    places = torch.arange(flat.numel())
    free = places[places % (flat.numel() // 64) != 0]
    flat[free] = flat[free.flip(0)]
    return flat.view_as(weight)


def test_any_other_weights_are_another_model(model):
    known = {model_fingerprint(model)}
    for name in ("layers.0.self_attn.q_proj.weight", "layers.1.mlp.gate_proj.weight", "embed_tokens.weight"):
        if name not in model.model.state_dict():
            name = next(other for other in model.model.state_dict() if other.endswith(name.split(".", 2)[-1]))
        other = copy.deepcopy(model)
        weight = other.model.get_parameter(name)
        weight.data = permuted(weight)
        known.add(model_fingerprint(other))
    assert len(known) == 4
    with_head = model_fingerprint(model, with_head=True)
    other = copy.deepcopy(model)
    other.lm_head.weight.data.neg_()
    assert model_fingerprint(other) in known and model_fingerprint(other, with_head=True) != with_head


@pytest.mark.parametrize("device", ["of the host", "of a GPU"])
@torch.no_grad()
def test_a_change_in_memory_is_seen(model, device, monkeypatch):
    """Written in place, permuted, past torch's count, replaced; and back again."""
    if device == "of a GPU":
        monkeypatch.setattr(fingerprint_kimi_k3, "_READ_EACH_TIME", ())
    first = model_fingerprint(model)
    weight = model.model.embed_tokens.weight
    right = weight.clone()
    known = {first}
    for change in (
        lambda: weight[3].neg_(),
        lambda: weight.copy_(permuted(right)),
        lambda: weight.data.copy_(right.flip(0)),
        lambda: weight.data.view(-1)[7].add_(1e-3),
        lambda: setattr(model.model.embed_tokens, "weight", torch.nn.Parameter(right + 1)),
    ):
        change()
        known.add(model_fingerprint(model))
    assert len(known) == 6
    model.model.embed_tokens.weight = weight
    weight.copy_(right)
    assert model_fingerprint(model) == first


def test_unchanged_weights_of_a_gpu_are_copied_once(model, monkeypatch):
    first = model_fingerprint(model)
    asked = []
    monkeypatch.setattr(fingerprint_kimi_k3, "_READ_EACH_TIME", ())
    assert model_fingerprint(model) == first
    monkeypatch.setattr(fingerprint_kimi_k3, "digest_of", lambda tensors: asked.extend(tensors) or [])
    assert model_fingerprint(model) == first and not asked


class Wrapped(torch.Tensor):
    """A weight in two tensors, as quantizers keep it."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default, "nothing else is asked of a wrapper"
        return cls(args[0].values, args[0].scale)


@pytest.mark.parametrize("device", ["of the host", "of a GPU"])
def test_what_a_wrapper_holds_is_hashed(device, monkeypatch):
    if device == "of a GPU":
        monkeypatch.setattr(fingerprint_kimi_k3, "_READ_EACH_TIME", ())
    model, known = tiny.model("k"), set()
    values, scale = torch.arange(40 * 56, dtype=torch.int8).view(40, 56), torch.ones(40)
    weight = torch.nn.Parameter(Wrapped(values, scale), requires_grad=False)
    model.model.layers[0].self_attn.q_proj.weight = weight
    for change in (lambda: None, lambda: values[3].neg_(), lambda: scale[7:8].mul_(2)):
        change()
        known.add(model_fingerprint(model))
        assert model_fingerprint(model) in known
    assert len(known) == 3


def test_equal_weights_are_one_model_wherever_they_lie(tmp_path):
    """Built, saved and loaded, and with layers on disk; another file of these gives another fingerprint."""
    model = tiny.model("km")
    first = model_fingerprint(model)
    model.save_pretrained(tmp_path / "saved")
    assert model_fingerprint(KimiK3ForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)) == first
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.layers": "disk"}
    places |= {"model.output_attn_res_norm": "cpu", "model.output_attn_res_proj": "cpu"}
    offloaded = []
    for scale in (1, -1):
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(scale)
        model.save_pretrained(tmp_path / "saved")
        settings = {"dtype": torch.float32, "device_map": places, "offload_folder": tmp_path / f"offload{scale}"}
        other = KimiK3ForCausalLM.from_pretrained(tmp_path / "saved", **settings)
        assert other.model.layers[0].self_attn.q_proj.weight.is_meta
        offloaded.append(model_fingerprint(other))
        assert model_fingerprint(other) == model_fingerprint(model) == offloaded[-1]
    assert offloaded[0] == first != offloaded[1]


def test_a_mark_sees_changes_that_sums_do_not():
    """Of tensors on a GPU, which are hashed once: places swapped, and edits whose weighted sums are nothing."""
    words = torch.randint(-(2**40), 2**40, (300,), generator=torch.Generator().manual_seed(0))
    marks = {fingerprint_kimi_k3._mark(words)[1]}
    for one, other in ((0, 1), (3, 200)):
        words[one], words[other] = words[other].clone(), words[one].clone()
        marks.add(fingerprint_kimi_k3._mark(words)[1])
    for edit in ((3, -1, 0), (-5, 0, 1)):  # odd weights 1, 3, 5
        words[:3] += torch.tensor(edit)
        marks.add(fingerprint_kimi_k3._mark(words)[1])
    assert len(marks) == 5
