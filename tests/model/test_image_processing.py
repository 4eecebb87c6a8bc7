"""The image processor against pictures of the golden run, byte for byte, and what it takes and refuses."""

import base64
import hashlib
import io
import json
import struct
import zlib

import PIL.Image
import PIL.ImageFile
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

# transformers 5.17 has it only where torchvision is installed, which ours does not need.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from kimi_k3 import KimiK3ImageProcessor

# 1.0 / 127.5, the distance of two bytes after normalisation; another Pillow may round a resized one to the next.
ONE_LEVEL = 0.0079
NAMES = [
    "gradient_rgb", "noise_shrunk", "alpha_rgba", "alpha_rgba_shrunk", "alpha_white_before_resize", "gray_l",
    "palette_clear_shrunk", "rgb_colour_key", "exif_quarter_turn", "line_1x100",
]  # fmt: skip
FORMULAS = ["formula_7500x40", "formula_1x9000"]
MODES = [
    "1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "I", "F", "I;16", "I;16B", "LA", "La", "PA", "RGBA", "RGBa",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(data_dir):
    return data_dir / "k3_images"


@pytest.fixture(scope="module")
def cases(folder):
    """name -> (its settings, what the golden run says of it)"""
    described = json.loads((folder / "cases.json").read_text())
    return {c["name"]: ({**described["media_proc_cfg"], **c["media_proc_cfg"]}, c) for c in described["cases"]}


def picture(mode="RGB", size=(44, 60), seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (size[1], size[0], 4), generator=generator, dtype=torch.uint8)
    image = PIL.Image.fromarray(pixels.numpy(), "RGBA")
    if mode.startswith("I;"):
        return PIL.Image.fromarray(pixels[..., 0].to(torch.uint16).numpy()).convert(mode)
    steps = {"La": ("LA", "La"), "PA": ("P", "PA")}.get(mode, (mode,))
    image = image if mode in ("RGBA", "RGBa", "LA", "La") else image.convert("RGB")
    for step in steps:
        image = image.convert(step)
    return image


def encoded(image, form="PNG"):
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def assert_same(one, other):
    assert torch.equal(one["pixel_values"], other["pixel_values"]) and torch.equal(one["grid_thws"], other["grid_thws"])


def test_golden_pictures(cases, folder):
    tensors = load_file(folder / "golden.safetensors")
    for name in NAMES:
        settings, expected = cases[name]
        processor = KimiK3ImageProcessor(settings)
        size = expected["width"], expected["height"]
        assert (
            processor.resized(*size) == tuple(expected["resized"])
            and processor.num_tokens(*size) == expected["num_tokens"]
        )
        got = processor(folder / expected["file"])
        assert got["pixel_values"].dtype == torch.float32 and got["grid_thws"].dtype == torch.int64
        assert torch.equal(got["grid_thws"], tensors[f"{name}.grid_thws"])
        difference = (got["pixel_values"] - tensors[f"{name}.pixel_values"]).abs().max()
        assert difference <= (ONE_LEVEL if tuple(expected["resized"]) != size else 0), name


@pytest.mark.parametrize("name", FORMULAS)
def test_golden_pictures_beyond_the_limits(cases, name):
    settings, expected = cases[name]
    rows, columns = torch.arange(expected["height"])[:, None, None], torch.arange(expected["width"])[:, None]
    pixels = (7 * columns + 13 * rows + 101 * torch.arange(3) + columns * rows // 3) % 256
    got = KimiK3ImageProcessor(settings)(pixels.to(torch.uint8))["pixel_values"]
    assert list(got.shape) == expected["shape"]
    assert (got.flatten()[expected["at"]] - torch.tensor(expected["values"])).abs().max() <= ONE_LEVEL
    if hashlib.sha256(got.numpy().tobytes()).hexdigest() != expected["sha256_float32_le"]:  # of another Pillow
        assert abs(got.double().mean() - expected["mean"]) < ONE_LEVEL / 10


def test_sizes(folder):
    """160 rows of arithmetic: what is cut off where, in floating point."""
    rows = json.loads((folder / "sizes.json").read_text())["rows"]
    assert len(rows) == 160
    for limit, side, width, height, *expected in rows:
        processor = KimiK3ImageProcessor({"in_patch_limit": limit, "patch_limit_on_one_side": side})
        resized, (frames, down, across) = processor.resized(width, height), processor.grid(width, height)
        padding = 14 * across - resized[0], 14 * down - resized[1]
        assert [*resized, *padding, processor.num_tokens(width, height)] == expected and frames == 1


def test_every_byte_is_the_number_of_the_definition():
    """x / 255 in float64, cast, then mean and standard deviation of its channel, in float32."""
    settings = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
    pixels = torch.arange(256, dtype=torch.uint8).view(16, 16, 1).expand(-1, -1, 3)
    got = KimiK3ImageProcessor(settings)(pixels)["pixel_values"]
    laid = got.view(2, 2, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(3, 28, 28)
    exact = (torch.arange(256, dtype=torch.float64) / 255).float().view(16, 16)
    for channel in range(3):
        mean, std = torch.tensor(settings["image_mean"][channel]), torch.tensor(settings["image_std"][channel])
        assert torch.equal(laid[channel, :16, :16], (exact - mean) / std)
        assert (laid[channel, 16:] == -mean / std).all() and (laid[channel, :, 16:] == -mean / std).all()


def test_all_forms_of_one_picture(tmp_path):
    image, processor = picture(), KimiK3ImageProcessor()
    data = encoded(image)
    (tmp_path / "image.png").write_bytes(data)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(60, 44, 3)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    expected = processor(image, return_tensors="pt")
    forms = [tmp_path / "image.png", str(tmp_path / "image.png"), data, bytearray(data), url]
    for form in (*forms, pixels, pixels.permute(2, 0, 1), pixels.numpy(), pixels.permute(2, 0, 1).numpy()):
        assert_same(processor(form), expected)
    gray = processor(picture("L"))
    for form in (pixels_of(picture("L")), pixels_of(picture("L"))[..., None], pixels_of(picture("L"))[None]):
        assert_same(processor(form), gray)
    assert_same(processor(pixels_of(picture("RGBA"))), processor(picture("RGBA")))
    assert processor(image, return_tensors="np")["pixel_values"].shape == (24, 3, 14, 14)


def pixels_of(image):
    channels = len(image.getbands())
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, channels)
    return pixels[..., 0] if channels == 1 else pixels


def test_a_batch_is_its_pictures_in_order():
    processor = KimiK3ImageProcessor()
    batch = [picture(size=(44, 60)), picture("RGBA", size=(15, 90)), picture("L", size=(30, 1))]
    single = [processor(image) for image in batch]
    together = processor([batch[:1], [], batch[1:]])
    assert torch.equal(together["pixel_values"], torch.cat([each["pixel_values"] for each in single]))
    assert together["grid_thws"].tolist() == [[1, 6, 4], [1, 8, 2], [1, 2, 4]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [65536, 6], ids=["as it is", "shrunk"])
def test_every_mode(mode, limit):
    """Resized in its own mode, then as Pillow makes RGB of it, or laid on the chessboard."""
    image, processor = picture(mode), KimiK3ImageProcessor({"in_patch_limit": limit})
    resized = image.resize(processor.resized(*image.size), PIL.Image.Resampling.BICUBIC) if limit == 6 else image
    if mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        rgba = pixels_of((resized.convert("LA") if mode == "La" else resized).convert("RGBA")).float()
        rows, columns = (torch.arange(n) // 8 for n in rgba.shape[:2])
        board = torch.where((rows[:, None] + columns) % 2 == 0, 255.0, 180.0)[..., None]
        alpha = rgba[..., 3:] / 255
        expected = (rgba[..., :3] * alpha + board * (1 - alpha)).to(torch.uint8)
    else:
        expected = pixels_of(resized.convert("RGB"))
    assert_same(processor(image), KimiK3ImageProcessor()(expected))


def png_of_size(width, height):
    """The bytes of a file whose header promises that many pixels, and which holds none."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (b"", "image 2 is no picture that Pillow reads, or is damaged"),
        (b"not a picture", "image 2 is no picture that Pillow reads, or is damaged"),
        ("/nowhere/picture.png", "image 2: there is no file /nowhere/picture.png"),
        ("https://example.com/a.png", r"image 2 is an address \(https://example.com/a.png\): download it"),
        ("data:image/png;base64,!!!", "image 2 is a data URL that is no base64"),
        ("data:image/png;base64", "image 2 is a data URL without a comma"),
        (png_of_size(10000, 9000), "image 2 has 10000 x 9000 = 90000000 pixels, more than the 89478485 of PIL"),
        (png_of_size(200000, 200000), "image 2 has too many pixels"),
        (PIL.Image.new("RGB", (0, 5)), "image 2 has 0 x 5 pixels: there is nothing to see"),
        (torch.zeros(0, 5, 3, dtype=torch.uint8), "image 2 has 5 x 0 pixels: there is nothing to see"),
        (torch.zeros(5, 5, 3), r"image 2 is an array of torch.float32: give bytes from 0 to 255 \(uint8\)"),
        (torch.zeros(5, 5, 2, dtype=torch.uint8), r"image 2 is an array of shape \[5, 5, 2\], expected \[H, W\]"),
        (7, "image 2 is a int: give a Pillow image, a path, bytes"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_read_is_refused(image, sentence, monkeypatch):
    """By its number, and before any picture is decoded."""
    first = PIL.Image.open(io.BytesIO(encoded(picture())))
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", lambda *_: pytest.fail("a picture was decoded"))
    with pytest.raises(ValueError, match=sentence):
        KimiK3ImageProcessor()([first, image])


def test_what_breaks_while_it_is_decoded_is_refused():
    data = encoded(picture())
    with pytest.raises(ValueError, match="image 1 cannot be decoded"):
        KimiK3ImageProcessor()(data[: len(data) // 2])
    deep = PIL.Image.fromarray(torch.full((20, 20), 5000).to(torch.uint16).numpy())
    for image in (deep, deep.convert("I"), deep.convert("F"), PIL.Image.new("F", (4, 4), float("nan"))):
        with pytest.raises(
            ValueError, match=f"image 1 has mode {image.mode} and values from .* scale it to bytes before"
        ):
            KimiK3ImageProcessor()(image)
    with pytest.raises(ValueError, match="no image came"):
        KimiK3ImageProcessor()([])
    with pytest.raises(ValueError, match="do_resize: sizes, background and numbers are those of media_proc_cfg"):
        KimiK3ImageProcessor()(picture(), do_resize=False)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens is not implemented"),
        (
            {"transparent_bg_fill_stage": "never"},
            "transparent_bg_fill_stage 'never' is not implemented, only after_resize",
        ),
        (
            {"transparent_bg_config": {"pattern": "black"}},
            "pattern 'black' is not implemented, only chessboard and white",
        ),
        (
            {"transparent_bg_config": {"pattern": "chessboard"}},
            "chessboard needs chessboard_gray_value, .*_white_value",
        ),
        ({"transparent_bg_config": None}, "transparent_bg_config must be a dict, got None"),
        ({"patch_size": 0}, "patch_size must be a positive number, got 0"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std must be three numbers"),
    ],
    ids=str,
)
def test_settings_that_are_not_implemented_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        KimiK3ImageProcessor(settings)


def test_a_folder_of_the_released_kind(data_dir, tmp_path):
    """Its file names classes of its own, which are not needed, and keys that nothing here reads, which come back."""
    small = data_dir / "k3_vision" / "small_signal"
    (tmp_path / "config.json").write_text((small / "config.json").read_text())
    section = KimiK3ImageProcessor().media_proc_cfg | {"in_patch_limit": 6, "sample_fps": 3.0, "a_key_of_theirs": [1]}
    theirs = {"AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor", "AutoProcessor": "other.Other"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"auto_map": theirs, "media_proc_cfg": section}))
    for given in ({}, {"trust_remote_code": True}):
        processor = AutoImageProcessor.from_pretrained(tmp_path, **given)
        assert type(processor) is KimiK3ImageProcessor and processor.media_proc_cfg == section
    processor.save_pretrained(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text())
    assert written == {
        "auto_map": {"AutoImageProcessor": "image_processing_kimi_k3.KimiK3ImageProcessor"},
        "image_processor_type": "KimiK3ImageProcessor",
        "media_proc_cfg": section,
    }
    again = AutoImageProcessor.from_pretrained(tmp_path / "saved")
    assert_same(again(picture()), processor(picture()))
    assert AutoImageProcessor.from_pretrained(tmp_path, media_proc_cfg={}).media_proc_cfg["in_patch_limit"] == 65536
    with pytest.raises(ValueError, match="patch_size must be a positive number"):
        AutoImageProcessor.from_pretrained(tmp_path, media_proc_cfg={"patch_size": -1})


def test_pictures_reach_the_text(data_dir):
    """From files to tokens, and the order of pictures matters."""
    model = AutoModelForImageTextToText.from_pretrained(data_dir / "k3_vision" / "small_signal")
    one, other = picture(seed=1), picture("RGBA", seed=2, size=(30, 30))
    ids = torch.tensor([[7, 5, 9], [5, 8, 9]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    processor = KimiK3ImageProcessor()
    texts = [model.generate(ids, **processor(batch), **settings) for batch in ([one, other], [other, one])]
    assert texts[0].shape == (2, 6)
    with torch.no_grad():
        logits = [
            model(ids, attention_mask=torch.ones_like(ids), **processor(b)).logits for b in ([one, other], [one, one])
        ]
    assert logits[0].shape == (2, 3 - 1 + 6, 96) and not torch.equal(logits[0][1, -1], logits[1][1, -1])
