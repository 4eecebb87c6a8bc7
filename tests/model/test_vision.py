"""Vision tower and projector against the golden features, and what holds for any weights (tests/data/README.md)."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, modeling_flash_attention_utils

from kimi_k3 import KimiK3ForConditionalGeneration, KimiK3VisionConfig
from kimi_k3.vision_kimi_k3 import KimiK3Projector, KimiK3VisionTower, checked_grids
from rounding import EXACT, rms, rms_of_float32

FOLDERS = ["base", "small_signal"]
# Two images of other sizes, a clip and one more, none square.
GRIDS = [(1, 2, 6), (1, 8, 4), (3, 4, 2), (1, 6, 10)]


@pytest.fixture(scope="module", params=FOLDERS)
def golden(request, data_dir):
    folder = data_dir / "k3_vision" / request.param
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert type(model) is KimiK3ForConditionalGeneration
    return model.double(), load_file(folder / "golden.safetensors")


def tiny_tower(seed=0, **changes):
    """In float64; no two sizes are alike, and norms are not all ones."""
    settings = {
        "vt_hidden_size": 20, "mm_hidden_size": 20, "qkv_hidden_size": 24, "vt_num_attention_heads": 3,
        "vt_intermediate_size": 28, "vt_num_hidden_layers": 2, "patch_size": 7, "init_pos_emb_height": 5,
        "init_pos_emb_width": 6, "text_hidden_size": 16, **changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    tower = KimiK3VisionTower(KimiK3VisionConfig(**settings)).double()
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            parameter.normal_(0.5 if "norm" in name else 0.0, 0.3)
    return tower.eval()


def patches(grids, patch=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    count = sum(math.prod(grid) for grid in grids)
    return torch.rand(count, 3, patch, patch, generator=generator, dtype=torch.float64) * 2 - 1


def features(tower, grids, pixels=None):
    return tower(patches(grids) if pixels is None else pixels, torch.tensor(grids))


@torch.no_grad()
def test_features(golden):
    """All three stages. The golden run's own roundings are 1e-5 (two unrelated programs agree so far)."""
    model, tensors = golden
    pixels, grids = tensors["pixel_values"].double(), tensors["grid_thws"]
    tower = model.vision_tower
    embedded = tower.patch_embed(pixels, checked_grids(pixels, grids, tower.config))
    merged = tower(pixels, grids)
    stages = {"patch_embed": embedded, "vision_tower": merged, "mm_projector": model.mm_projector(merged)}
    expected = {name: tensors[name].double() for name in stages}
    torch.testing.assert_close(stages, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_features_in_float32(golden):
    model, tensors = golden

    def computed(model):
        return model.mm_projector(model.vision_tower(tensors["pixel_values"], tensors["grid_thws"]))

    single = computed(copy.deepcopy(model).float())
    assert single.dtype == torch.float32
    assert (single - tensors["mm_projector"]).abs().max() < 1e-4
    assert rms(single - computed(model)) < rms_of_float32(model, computed)


def test_every_weight_takes_part(golden):
    """No name of tower and projector is unused: each moves the features."""
    model, tensors = golden
    model.zero_grad()
    model.mm_projector(model.vision_tower(tensors["pixel_values"], tensors["grid_thws"])).square().sum().backward()
    for part in (model.vision_tower, model.mm_projector):
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    model.zero_grad()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_images_do_not_see_each_other(implementation):
    """Images of any sizes in one batch are what they are alone, whatever the order."""
    tower = tiny_tower()
    tower.set_attn_implementation(implementation)
    sizes = [math.prod(grid) for grid in GRIDS]
    pieces = patches(GRIDS).split(sizes)
    alone = [features(tower, [grid], piece) for grid, piece in zip(GRIDS, pieces, strict=True)]
    torch.testing.assert_close(features(tower, GRIDS), torch.cat(alone), **EXACT)
    turned = features(tower, GRIDS[::-1], torch.cat(pieces[::-1]))
    torch.testing.assert_close(turned, torch.cat(alone[::-1]), **EXACT)


@torch.no_grad()
def test_attention_implementations(monkeypatch):
    """Fault 25: eager, sdpa and flash give one result; a flash kernel is given the offsets of all images at once."""
    tower, asked = tiny_tower(), []

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, **_):
        assert cu_seqlens_q.dtype == torch.int32 and not causal and max_seqlen_q == max_seqlen_k == 60
        asked.append(cu_seqlens_q.tolist())
        images = zip(*(x.transpose(0, 1).split(cu_seqlens_k.diff().tolist(), 1) for x in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(*image, scale=softmax_scale) for image in images]
        return torch.cat(outs, dim=1).transpose(0, 1)

    expected = features(tower, GRIDS)
    tower.set_attn_implementation("eager")
    torch.testing.assert_close(features(tower, GRIDS), expected, **EXACT)
    tower.set_attn_implementation("flex_attention")  # of the text's masks
    assert tower.config._attn_implementation == "sdpa"
    utils = modeling_flash_attention_utils
    found = (None, varlen, None, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *args, **kwargs: found)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(KimiK3VisionTower, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    monkeypatch.setitem(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", lambda: True)
    tower.set_attn_implementation("flash_attention_2")
    torch.testing.assert_close(features(tower, GRIDS), expected, **EXACT)
    assert asked == [[0, 12, 44, 68, 128]] * 2


def test_the_setting_of_a_whole_model(data_dir):
    """The tower's follows the text's, or is its own; that of the file, a kernel that few have, does not count."""
    folder = data_dir / "k3_vision" / "small_signal"
    for given, text, tower in (
        ("eager", "eager", "eager"),
        ("flex_attention", "flex_attention", "sdpa"),
        ({"vision_config": "eager", "text_config": "sdpa"}, "sdpa", "eager"),
    ):
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=given)
        assert model.language_model.config._attn_implementation == text
        assert model.vision_tower.config._attn_implementation == tower
        assert model.vision_tower.encoder.blocks[0].config is model.vision_tower.config is model.config.vision_config
    model.set_attn_implementation("sdpa")
    assert model.vision_tower.config._attn_implementation == "sdpa"


def test_checkpointed_gradients():
    """Blocks run again in backward, and the gradients are those of a plain one."""
    tower, calls = tiny_tower().train(), []
    for block in tower.encoder.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(0))
    gradients = []
    for counted in (2, 4):
        calls.clear()
        features(tower, GRIDS).square().sum().backward()
        assert len(calls) == counted
        gradients.append([parameter.grad.clone() for parameter in tower.parameters()])
        tower.zero_grad()
        tower.gradient_checkpointing_enable()
    torch.testing.assert_close(*gradients, **EXACT)


@torch.no_grad()
def test_bfloat16(golden):
    """In the dtype of the released files: the epsilon of the norms is no other there, and only roundings differ."""
    model, tensors = golden

    def computed(model, pixels):
        return model.mm_projector(model.vision_tower(pixels, tensors["grid_thws"]))

    half = copy.deepcopy(model).bfloat16()
    got, exact = (computed(each, tensors["pixel_values"]) for each in (half, model))
    assert got.dtype == torch.bfloat16
    norms = [block.norm0.eps for block in half.vision_tower.encoder.blocks]
    assert {*norms, half.vision_tower.encoder.final_layernorm.eps} == {2**-23}
    assert rms(got.double() - exact) < 0.02 * rms(exact)  # a few units of 2^-8 in each of three blocks


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pixel_values": torch.zeros(4, 3, 14, 14)}, r"must be a tensor \[patches, 3, 7, 7\], got \[4, 3, 14, 14\]"),
        ({"pixel_values": [1]}, "pixel_values must be a tensor .* got list"),
        ({"grid_thws": torch.tensor([1, 2, 2])}, r"grid_thws must be a tensor \[images, 3\] .* got \[3\]"),
        ({"grid_thws": None}, "grid_thws must be a tensor .* got NoneType"),
        ({"grid_thws": torch.zeros(0, 3)}, "grid_thws holds no image: leave pixel_values and grid_thws out"),
        ({"grid_thws": torch.tensor([[1, 2, 4]])}, "holds 4 patches, but the grids in grid_thws have 8"),
        ({"grid_thws": torch.tensor([[1, 4, 1]])}, "grid of 1 x 4 x 1 patches: rows must be a multiple of 2"),
        ({"grid_thws": torch.tensor([[5, 2, 2]])}, "image 1 has 5 frames, the tower knows 4 at most"),
    ],
)
def test_what_does_not_fit_is_refused(changes, sentence):
    given = {"pixel_values": patches([(1, 2, 2)]), "grid_thws": torch.tensor([[1, 2, 2]]), **changes}
    with pytest.raises(ValueError, match=sentence):
        tiny_tower()(**given)


@pytest.mark.one_release
@torch.no_grad()
def test_a_transcription_by_loops():
    """One patch after another in Python numbers: rotation, attention, frames, cells and the resized table."""
    tower = tiny_tower(vt_num_hidden_layers=1)
    block, (t, h, w) = tower.encoder.blocks[0], GRIDS[2]
    pixels = patches([(t, h, w)])
    table = tower.patch_embed.pos_emb.weight
    half = table.shape[-1] // 2
    rows = []
    for frame in range(t):
        for y in range(h):
            for x in range(w):
                place = torch.zeros(2 * half, dtype=torch.float64)
                for at, weight_y in _between((y + 0.5) * table.shape[0] / h - 0.5, table.shape[0]):
                    for across, weight_x in _between((x + 0.5) * table.shape[1] / w - 0.5, table.shape[1]):
                        place += weight_y * weight_x * table[at, across]
                for i in range(half):
                    angle = frame * 10000 ** (-i / half)
                    place[i] += math.sin(angle)
                    place[half + i] += math.cos(angle)
                weight = tower.patch_embed.proj.weight.flatten(1)
                rows.append(weight @ pixels[len(rows)].flatten() + place)
    stream = torch.stack(rows)

    def norm(x, layer):
        return x * (x.square().mean(-1, keepdim=True) + 2**-23).rsqrt() * layer.weight

    heads, size = 3, 8
    queries, keys, values = (norm(stream, block.norm0) @ block.wqkv.weight.T).view(-1, 3, heads, size).unbind(1)
    for each in (queries, keys):
        for number in range(len(each)):
            y, x = number // w % h, number % w
            for pair in range(size // 2):
                angle = (y if pair % 2 else x) * 10000 ** (-4 * (pair // 2) / size)
                turn = complex(math.cos(angle), math.sin(angle))
                for head in range(heads):
                    a, b = each[number, head, 2 * pair : 2 * pair + 2].tolist()
                    turned = complex(a, b) * turn
                    each[number, head, 2 * pair], each[number, head, 2 * pair + 1] = turned.real, turned.imag
    weights = (torch.einsum("nhd,mhd->hnm", queries, keys) / math.sqrt(size)).softmax(-1)
    stream = stream + torch.einsum("hnm,mhd->nhd", weights, values).flatten(1) @ block.wo.weight.T
    inner = F.gelu(norm(stream, block.norm1) @ block.mlp.fc0.weight.T, approximate="tanh")
    stream = norm(stream + inner @ block.mlp.fc1.weight.T, tower.encoder.final_layernorm)
    cells = [
        sum(stream[frame * h * w + (y + down) * w + x + across] for frame in range(t)) / t
        for y in range(0, h, 2)
        for x in range(0, w, 2)
        for down in (0, 1)
        for across in (0, 1)
    ]
    expected = torch.stack(cells).view(h * w // 4, 4, -1)
    torch.testing.assert_close(features(tower, [(t, h, w)], pixels), expected, **EXACT)

    projector = KimiK3Projector(tower.config).double()
    hidden = F.gelu(expected.flatten(1) @ projector.proj[0].weight.T) @ projector.proj[2].weight.T
    exact = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * projector.post_norm.weight
    torch.testing.assert_close(projector(expected), exact, **EXACT)


def _between(place, size):
    """Neighbours of a place in a row of `size` entries, and their weights; outside it the last entry goes on."""
    low = math.floor(place)
    share = place - low
    return [(min(max(low + step, 0), size - 1), weight) for step, weight in ((0, 1 - share), (1, share))]


def test_blocks_stay_whole_on_a_device(data_dir):
    """`device_map` cuts between blocks of the tower and layers of the text, not inside them."""
    model = AutoModelForImageTextToText.from_pretrained(data_dir / "k3_vision" / "small_signal")
    assert {"KimiK3VisionBlock", "KimiK3DecoderLayer"} <= set(model._no_split_modules)
