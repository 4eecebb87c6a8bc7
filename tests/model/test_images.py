"""Images in a text, against golden logits and text, and what holds for any text (docs/vision.md)."""

import copy
import inspect

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import kimi_k3
from kimi_k3 import HybridCache, KimiK3ForCausalLM
from kimi_k3.images_kimi_k3 import make_room
from rounding import EXACT, rms, rms_of_float32

CACHE = kimi_k3.CACHE_ARGUMENT
PROMPTS = [("base", name) for name in ("square", "wide", "two_images", "batch")]
PROMPTS += [("small_signal", name) for name in ("single", "clip")]
IMAGE = 5  # the placeholder of both checkpoints
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def models(data_dir):
    """Folder -> (model in float64, golden tensors)."""
    folders = {name: data_dir / "k3_vision" / name for name in ("base", "small_signal")}
    return {
        name: (
            AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).double(),
            load_file(folder / "golden.safetensors"),
        )
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def small(models):
    return models["small_signal"][0]


def pictures(tensors, chosen):
    pieces = tensors["pixel_values"].split(tensors["grid_thws"].prod(-1).tolist())
    return {"pixel_values": torch.cat([pieces[i] for i in chosen]), "grid_thws": tensors["grid_thws"][chosen]}


def prompt_of(tensors, name, form):
    """Arguments of a golden prompt with one placeholder for each image, or expanded."""
    ids, mask = ("input_ids", "attention_mask") if form == "one" else ("expanded_ids", "expanded_mask")
    images = pictures(tensors, tensors[f"{name}.images"].tolist())
    return {"input_ids": tensors[f"{name}.{ids}"], "attention_mask": tensors[f"{name}.{mask}"], **images}


def images(grids, seed=0):
    """Arguments for random pictures with these grids."""
    count = sum(t * h * w for t, h, w in grids)
    pixels = torch.rand(count, 3, 14, 14, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"pixel_values": pixels * 2 - 1, "grid_thws": torch.tensor(grids)}


def some(pieces, grids, first):
    """Arguments for those of many pictures that a row has, or none."""
    pixels = pieces[first : first + len(grids)]
    return {"pixel_values": torch.cat(pixels), "grid_thws": torch.tensor(grids)} if grids else {}


# --- golden


@pytest.mark.parametrize(("folder", "name"), PROMPTS, ids=lambda part: part)
@torch.no_grad()
def test_logits(models, folder, name):
    """Of the text that grew, in both conventions; what lies under padding is nobody's."""
    model, tensors = models[folder]
    expected, real = tensors[f"{name}.logits"], tensors[f"{name}.expanded_mask"].bool()
    logits = model(**prompt_of(tensors, name, "one")).logits
    assert logits.shape == expected.shape
    difference = (logits - expected)[real]
    assert difference.abs().max() < 1e-3 and rms(difference) < 1e-4
    assert torch.equal(logits.argmax(-1)[real], expected.argmax(-1)[real])
    torch.testing.assert_close(model(**prompt_of(tensors, name, "each")).logits[real], logits[real], **EXACT)


@pytest.mark.parametrize(("folder", "name"), [PROMPTS[2], PROMPTS[4]], ids=lambda part: part)
@torch.no_grad()
def test_logits_in_float32(models, folder, name):
    model, tensors = models[folder]
    real = tensors[f"{name}.expanded_mask"].bool()

    def logits(model):
        return model(**prompt_of(tensors, name, "one")).logits[real]

    single = logits(copy.deepcopy(model).float())
    assert single.dtype == torch.float32 and rms(single - tensors[f"{name}.logits"][real]) < 1e-4
    assert rms(single - logits(model)) < rms_of_float32(model, logits)


@torch.no_grad()
def test_loss(models):
    """Labels grow with the text, and none of an image counts, whatever they say there."""
    model, tensors = models["base"]
    labels, mask = tensors["two_images.labels"], tensors["two_images.expanded_mask"]
    given = prompt_of(tensors, "two_images", "one")
    loss = model(**given, labels=labels).loss
    torch.testing.assert_close(loss, tensors["two_images.loss"][0], atol=2e-5, rtol=0)
    assert model(**given, labels=labels.where(given["input_ids"] != IMAGE, 7)).loss == loss
    grown = torch.full_like(mask, 7)
    grown[tensors["two_images.expanded_ids"] != IMAGE] = labels[given["input_ids"] != IMAGE]
    again = model(**prompt_of(tensors, "two_images", "each"), labels=grown).loss
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=0)  # transformers' loss is float32


@pytest.mark.parametrize("form", ["one", "each"])
@pytest.mark.parametrize("name", ["square", "batch"])
def test_greedy_text(models, name, form):
    """The prompt comes back as it was given, and the golden text behind it."""
    model, tensors = models["base"]
    given = prompt_of(tensors, name, form)
    text = model.generate(**given, **GREEDY)
    assert torch.equal(text, torch.cat([given["input_ids"], tensors[f"{name}.greedy_ids"]], dim=1))


# --- any text


@pytest.mark.parametrize("form", ["one", "each"])
@torch.no_grad()
def test_rows_are_what_they_are_alone(small, form):
    """Padding on the left, on the right and in the middle; a row without an image, and one with two."""
    rows = [
        ([7, IMAGE, 9, 11], [(1, 4, 6)], [0, 1, 4, 6, 7]),
        ([12, 13, 14, 15, 16], [], [0, 2, 3, 5, 6]),
        ([IMAGE, 21, 22, IMAGE, 23], [(1, 2, 2), (2, 4, 2)], [0, 1, 2, 3, 4]),
        ([31, IMAGE], [(1, 2, 4)], [7, 8]),
    ]
    ids, mask = torch.full((4, 9), 3), torch.zeros(4, 9, dtype=torch.long)
    rows = [(row, grids, places[: len(row)]) for row, grids, places in rows]
    for number, (row, _, places) in enumerate(rows):
        ids[number, places], mask[number, places] = torch.tensor(row), 1
    grids = [grid for _, grids, _ in rows for grid in grids]
    pixels = images(grids, seed=5)
    pieces = pixels["pixel_values"].split([t * h * w for t, h, w in grids])
    tokens = [h * w // 4 for _, h, w in grids]
    if form == "each":
        text = make_room(ids, tokens, IMAGE, mask)
        ids, mask = text.input_ids, text.attention_mask
    logits = small(ids, attention_mask=mask, **pixels).logits
    grown = make_room(ids, tokens, IMAGE, mask).attention_mask.bool()
    fed = 0
    for number, (row, of_row, _) in enumerate(rows):
        expected = small(torch.tensor([row]), **some(pieces, of_row, fed)).logits[0]
        torch.testing.assert_close(logits[number, grown[number]], expected, **EXACT)
        fed += len(of_row)


@pytest.mark.parametrize("form", ["one", "each"])
@torch.no_grad()
def test_packed_documents(small, form):
    """Images move the positions behind them, and no document sees another."""
    documents = [([7, IMAGE, 9], [(1, 4, 6)]), ([12, 13], []), ([IMAGE, 21, IMAGE], [(1, 2, 2), (1, 4, 2)])]
    grids = [grid for _, grids in documents for grid in grids]
    tokens, pixels = [h * w // 4 for _, h, w in grids], images(grids)
    pieces = pixels["pixel_values"].split([h * w for _, h, w in grids])
    ids = torch.tensor([[token for row, _ in documents for token in row]])
    positions = torch.cat([torch.arange(len(row)) for row, _ in documents])[None]
    text = make_room(ids, tokens, IMAGE, position_ids=positions)
    assert text.position_ids.tolist() == [[*range(8), *range(2), *range(4)]]
    if form == "each":
        ids, positions = text.input_ids, text.position_ids
    logits = small(ids, position_ids=positions, **pixels).logits[0]
    fed, at = 0, 0
    for row, of_row in documents:
        expected = small(torch.tensor([row]), **some(pieces, of_row, fed)).logits[0]
        torch.testing.assert_close(logits[at : at + len(expected)], expected, **EXACT)
        fed, at = fed + len(of_row), at + len(expected)
    assert at == len(logits)


@torch.no_grad()
def test_steps_behind_an_image(small):
    """A step may carry the pixels that a loop of one's own keeps; another image goes behind the cache."""
    first, second = images([(1, 4, 6)], 1), images([(1, 4, 2)], 2)
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    ids = torch.tensor([[7, IMAGE, 9, 11, 12, IMAGE, 13]])
    whole = small(ids, **both).logits
    cache = HybridCache(small.config)
    parts = [small(ids[:, :3], **first, **{CACHE: cache}).logits]
    parts += [small(ids[:, i : i + 1], **first, **{CACHE: cache}).logits for i in (3, 4)]
    mask = torch.ones(1, int(cache.get_seq_length()) + 2, dtype=torch.long)
    parts += [small(ids[:, 5:], attention_mask=mask, **second, **{CACHE: cache}).logits]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)


def test_gradients(small):
    """They reach tower and projector through the text, alike in both conventions, and not the placeholder's vector."""
    pixels, ids = images([(1, 4, 6)]), torch.tensor([[7, IMAGE, 9, 11]])
    text = make_room(ids, [6], IMAGE)
    gradients = []
    for given in (ids, text.input_ids):
        small.zero_grad()
        small(given, labels=given, **pixels).loss.backward()
        parts = (*small.vision_tower.parameters(), *small.mm_projector.parameters())
        gradients.append([parameter.grad.clone() for parameter in parts])
        assert all(gradient.abs().max() > 0 for gradient in gradients[-1])
        table = small.get_input_embeddings().weight.grad
        assert table[7].abs().max() > 0 and table[IMAGE].abs().max() == 0
    torch.testing.assert_close(*gradients, **EXACT)
    small.zero_grad()


@torch.no_grad()
def test_text_alone_is_the_text_model(small, data_dir):
    """A folder with a tower is read by the text class, and text costs no image: the numbers are the same to the bit."""
    text = KimiK3ForCausalLM.from_pretrained(data_dir / "k3_vision" / "small_signal", dtype=torch.float32).double()
    ids = torch.randint(6, 96, (2, 11), generator=torch.Generator().manual_seed(0))
    assert torch.equal(small(ids).logits, text(ids).logits)
    assert torch.equal(small.generate(ids, **GREEDY), text.generate(ids, **GREEDY))


def test_the_arguments_are_named(small):
    """`Trainer` drops the columns of a data set that the forward does not name."""
    assert {"pixel_values", "grid_thws", "labels"} <= set(inspect.signature(small.forward).parameters)


# --- generate


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=["beams", "static", "samples"],
)
def test_modes_of_generation(small, settings):
    """Each mode gives, behind a prompt with one placeholder, what it gives behind the expanded one."""
    pixels, ids = images([(1, 4, 6), (1, 2, 2)]), torch.tensor([[0, 7, IMAGE, 9, 11], [12, 13, IMAGE, 14, 15]])
    mask = (ids != 0).long()
    text, outputs = make_room(ids, [6, 1], IMAGE, mask), []
    for given, given_mask in ((ids, mask), (text.input_ids, text.attention_mask)):
        torch.manual_seed(0)
        output = small.generate(given, attention_mask=given_mask, **pixels, **{**GREEDY, **settings})
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        count = settings.get("num_return_sequences", 1)
        assert torch.equal(sequences[:, : given.shape[1]], given.repeat_interleave(count, dim=0))
        outputs.append(sequences[:, given.shape[1] :])
    assert torch.equal(*outputs) and outputs[0].shape[1] == 8


def test_a_conversation_goes_on(small):
    """With all ids, all images and the cache: neither the first turn nor its image is read again, and the text is that
    of a whole run."""
    first, second = images([(1, 4, 6)], 1), images([(1, 4, 2)], 2)
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    ids, cache = torch.tensor([[7, IMAGE, 9]]), HybridCache(small.config)
    turn = small.generate(ids, **first, **{CACHE: cache}, **GREEDY)
    held = int(cache.get_seq_length())
    ids = torch.cat([turn, torch.tensor([[11, IMAGE, 12]])], dim=1)
    fed, seen = [], []
    hooks = [
        small.language_model.model.register_forward_pre_hook(
            lambda _, args, kwargs: fed.append(kwargs["input_ids"] is None and kwargs["inputs_embeds"].shape[1]),
            with_kwargs=True,
        ),
        small.vision_tower.register_forward_pre_hook(lambda _, args: seen.append(args[1].tolist())),
    ]
    again = small.generate(ids, **both, **{CACHE: cache}, **GREEDY)
    assert fed[0] == ids.shape[1] + 5 + 1 - held and not any(fed[1:]) and seen == [[[1, 4, 2]]]
    ids = torch.cat([again, torch.tensor([[14]])], dim=1)
    third = small.generate(ids, **both, **{CACHE: cache}, **GREEDY)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 1
    assert torch.equal(again, small.generate(again[:, :-8], **both, **GREEDY))
    assert torch.equal(third, small.generate(ids, **both, **GREEDY))


@torch.no_grad()
def test_a_tower_on_another_device_than_the_text(models, data_dir, tmp_path):
    """Blocks of the tower, the projector and the text apart, as `device_map` lays them."""
    tensors = models["small_signal"][1]
    parts = {"vision_tower.patch_embed": "disk", "vision_tower.encoder": "disk", "mm_projector": "cpu"}
    folder = data_dir / "k3_vision" / "small_signal"
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, device_map={**parts, "language_model": "disk"}, offload_folder=tmp_path
    )
    given = prompt_of(tensors, "single", "one")
    assert (model(**given).logits - tensors["single.logits"]).abs().max() < 3e-4
    assert model.generate(**given, **GREEDY).shape == (1, 16)


# --- refusals


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"input_ids": [7, 8]}, r"have 0 placeholders of images \(token 5\), but 2 images of 7 tokens came"),
        ({"input_ids": [IMAGE] * 6}, r"have 6 placeholders of images \(token 5\), but 2 images of 7 tokens came"),
        ({"input_ids": [*[IMAGE] * 5, 7, IMAGE, IMAGE]}, "image 1 takes 6 tokens, but its placeholders do not stand"),
        ({"pixel_values": None}, "pixel_values must be a tensor .* got NoneType"),
        ({"grid_thws": None}, r"grid_thws must be a tensor \[images, 3\] beside pixel_values, got NoneType"),
        (
            {"pixel_values": None, "grid_thws": None, "labels": [7, IMAGE, IMAGE]},
            "have 2 placeholders .* no pixel_values",
        ),
        ({"inputs_embeds": [[0.0] * 32] * 3}, "pixel_values need input_ids, which say where the images go"),
        (
            {"cu_seq_lens_q": [0, 3]},
            "cu_seq_lens_q counts the columns of input_ids with one placeholder for each image",
        ),
        ({"attention_mask": [1, 1]}, r"attention_mask has shape \[1, 2\], expected \[1, 3\]"),
        ({"image_grid_thw": [[1, 2, 2]]}, "image_grid_thw is no argument of a text model"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_does_not_fit_is_refused(small, changes, sentence):
    """Before the tower computes."""
    given = {"input_ids": [7, IMAGE, IMAGE], **changes}
    flat = ("cu_seq_lens_q", "image_grid_thw")
    made = {
        n: None if v is None else torch.tensor(v if n in flat else [v]) for n, v in given.items() if n != "grid_thws"
    }
    made = {**images([(1, 4, 6), (1, 2, 2)]), **made, **({"grid_thws": None} if "grid_thws" in changes else {})}
    handle = small.vision_tower.register_forward_pre_hook(lambda *_: pytest.fail("the tower was called"))
    with pytest.raises(ValueError, match=sentence):
        small(**made)
    handle.remove()


def test_torn_by_the_end_of_a_row(small):
    with pytest.raises(ValueError, match="image 1 takes 6 tokens, but its placeholders do not stand side by side"):
        small(torch.tensor([[7, IMAGE, IMAGE, IMAGE], [IMAGE, IMAGE, IMAGE, 8]]), **images([(1, 4, 6)]))


def test_prompts_that_generate_refuses(small):
    pixels, ids = images([(1, 4, 6)]), torch.tensor([[7, IMAGE, 9]])
    with pytest.raises(ValueError, match=r"have 1 placeholders .* but no pixel_values came"):
        small.generate(ids, **GREEDY)
    with pytest.raises(ValueError, match="attention_mask is needed beside images"):
        small.generate(torch.tensor([[0, 7, IMAGE]]), **pixels, **GREEDY)
    with pytest.raises(ValueError, match="leave inputs_embeds, and images, out"):
        small.generate(ids, **pixels, **GREEDY, prompt_lookup_num_tokens=2)
    with pytest.raises(
        ValueError, match="prefill_chunk_size splits input_ids: leave it out with inputs_embeds and images"
    ):
        small.generate(ids, **pixels, **GREEDY, prefill_chunk_size=4)
    cache = HybridCache(small.config)
    small(ids, **pixels, **{CACHE: cache})
    with pytest.raises(ValueError, match="needs the ids of all tokens, those of the 8 in the cache included"):
        small.generate(ids, attention_mask=torch.ones(1, 11), **pixels, **{CACHE: cache}, **GREEDY)


def test_text_classes_refuse_images(data_dir):
    folder = data_dir / "k3_vision" / "small_signal"
    config = kimi_k3.KimiK3TextConfig.from_pretrained(folder)
    text = AutoModelForCausalLM.from_pretrained(folder, config=config)
    assert type(text) is KimiK3ForCausalLM
    with pytest.raises(ValueError, match="pixel_values is no argument of a text model"):
        text(torch.tensor([[7, 8]]), **images([(1, 2, 2)]))
