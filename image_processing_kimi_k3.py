"""Pictures to patches, as the released processor makes them: sizes, resize, background, padding, numbers.

Pillow reads and resizes, in the picture's own mode; torch does the rest. `docs/vision.md` has the rules.
"""

import base64
import binascii
import copy
import io
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ImagesKwargs

try:
    import PIL.Image
except ImportError:  # said when a processor is made
    PIL = None  # type: ignore[assignment]

# `media_proc_cfg` of the released processor. Keys about videos are kept and written back, as unknown ones are.
_RELEASED = {
    "in_patch_limit": 65536,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16384,
    "sample_fps": 8.0,
    "temporal_merge_kernel_size": 4,
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}
_COUNTS = ("in_patch_limit", "patch_size", "merge_kernel_size", "patch_limit_on_one_side")
_CHOICES = {"pattern": ("chessboard", "white"), "transparent_bg_fill_stage": ("after_resize", "before_resize")}
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """The whole of a `media_proc_cfg`, of which a file may leave keys out."""
    settings = {**copy.deepcopy(_RELEASED), **copy.deepcopy(given)}
    background = settings["transparent_bg_config"]
    if not isinstance(background, dict):
        raise ValueError(f"media_proc_cfg.transparent_bg_config must be a dict, got {background!r}")
    for name, choices in _CHOICES.items():
        value = background.get(name) if name == "pattern" else settings[name]
        if value not in choices:
            raise ValueError(f"media_proc_cfg: {name} {value!r} is not implemented, only {' and '.join(choices)} are")
    if background["pattern"] == "chessboard":
        missing = _RELEASED["transparent_bg_config"].keys() - background.keys()  # type: ignore[attr-defined]
        if missing:
            raise ValueError(f"media_proc_cfg.transparent_bg_config of a chessboard needs {', '.join(sorted(missing))}")
    for name in _COUNTS:
        if not isinstance(settings[name], int) or settings[name] < 1:
            raise ValueError(f"media_proc_cfg.{name} must be a positive number, got {settings[name]!r}")
    for name in ("image_mean", "image_std"):
        if len(settings[name]) != 3 or (name == "image_std" and not all(settings[name])):
            raise ValueError(f"media_proc_cfg.{name} must be three numbers, for red, green and blue")
    if settings["fixed_output_tokens"] is not None:
        raise ValueError("media_proc_cfg.fixed_output_tokens is not implemented: leave it null")
    return settings


class KimiK3ImagesKwargs(ImagesKwargs, total=False):
    """What `from_pretrained` takes in place of what a file says."""

    media_proc_cfg: dict


class KimiK3ImageProcessor(BaseImageProcessor):
    """Pictures to `pixel_values` [N, 3, p, p] float32 and `grid_thws` [n, 3] int64, of all pictures in order.

    Args:
        media_proc_cfg (`dict`, *optional*): the section of the released `preprocessor_config.json`; what it leaves out
            is as in the released one.

    Raises:
        ValueError: for settings that are not implemented; the sentence names the key.
        ImportError: without Pillow.
    """

    model_input_names = ["pixel_values", "grid_thws"]
    valid_kwargs = KimiK3ImagesKwargs

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **kwargs: Any):
        if PIL is None:
            raise ImportError("images are read with Pillow: pip install pillow")
        kwargs.pop("image_processor_type", None)
        kwargs.pop("auto_map", None)  # of a file: to_dict writes ours
        super().__init__(**kwargs)
        self.media_proc_cfg = _checked(media_proc_cfg or {})

    def to_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: `media_proc_cfg` under its released name, and where the code is."""
        return {
            **super().to_dict(),
            "media_proc_cfg": copy.deepcopy(self.media_proc_cfg),
            "auto_map": {"AutoImageProcessor": f"image_processing_kimi_k3.{type(self).__name__}"},
        }

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """transformers' `save_pretrained`, and this file beside the settings, so that they need nothing else."""
        os.makedirs(save_directory, exist_ok=True)
        source, target = Path(__file__), Path(save_directory) / Path(__file__).name
        if source.resolve() != target.resolve():
            shutil.copyfile(source, target)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of a picture's pixels in the model, before it is padded."""
        settings = self.media_proc_cfg
        patch, side = settings["patch_size"], settings["patch_limit_on_one_side"] * settings["patch_size"]
        patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(settings["in_patch_limit"] / patches), side / width, side / height)
        return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Frames, rows and columns of patches of a picture; a token of the text stands for `merge_kernel_size`^2."""
        settings, (width, height) = self.media_proc_cfg, self.resized(width, height)
        merged = settings["merge_kernel_size"]
        cell = settings["patch_size"] * merged
        return 1, -(-height // cell) * merged, -(-width // cell) * merged

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens that a picture takes in a text."""
        return math.prod(self.grid(width, height)) // self.media_proc_cfg["merge_kernel_size"] ** 2

    def preprocess(self, images: Any, return_tensors: Any = None, **kwargs: Any) -> BatchFeature:
        """
        Args:
            images: one or a list of: Pillow images, paths, bytes of a file, data URLs, and uint8 arrays or tensors
                [H, W], [H, W, 1, 3 or 4] or with the channels first.
            return_tensors: as in transformers; torch tensors if it is left out.

        Returns:
            `pixel_values` [N, 3, p, p] float32, patches row by row, and `grid_thws` [n, 3] int64.

        Raises:
            ValueError: for a picture that cannot be read, has no pixels or too many of them, by its number: from the
                headers of all before the first is decoded.
        """
        for name, value in kwargs.items():
            if value is not None:
                raise ValueError(f"{name}: sizes, background and numbers are those of media_proc_cfg; make a processor")
        opened = [_opened(image, number) for number, image in enumerate(_flat(images), 1)]
        if not opened:
            raise ValueError("no image came: leave the call out where a text has none")
        grids = [self.grid(*image.size) for image in opened]
        ends = [0]
        for grid in grids:
            ends.append(ends[-1] + math.prod(grid))
        patch = self.media_proc_cfg["patch_size"]
        pixels = torch.empty(ends[-1], 3, patch, patch)
        for number, (image, grid) in enumerate(zip(opened, grids, strict=True), 1):
            self._fill(pixels[ends[number - 1] : ends[number]], self._prepared(image, number), grid)
        data = {"pixel_values": pixels, "grid_thws": torch.tensor(grids)}
        return BatchFeature(data=data, tensor_type=return_tensors)

    def _prepared(self, image: Any, number: int) -> Any:
        """A picture in mode RGB and of its size in the model."""
        try:
            image.load()
        except Exception as error:  # each format's decoder has errors of its own
            raise ValueError(f"image {number} cannot be decoded: {error}") from error
        if image.mode == "F" or image.mode.startswith("I"):
            low, high = (image.convert("I") if ";" in image.mode else image).getextrema()
            if not 0 <= low <= high <= 255:
                raise ValueError(
                    f"image {number} has mode {image.mode} and values from {low} to {high}, which would be cut to "
                    "0 to 255: scale it to bytes before"
                )
        if self.media_proc_cfg["transparent_bg_fill_stage"] == "before_resize":
            image = self._opaque(image)
        size = self.resized(*image.size)
        if size != image.size:
            image = image.resize(size, PIL.Image.Resampling.BICUBIC)
        return self._opaque(image)

    def _opaque(self, image: Any) -> Any:
        """In mode RGB; on the background where the picture has alpha or, unless it is RGB already, a clear colour."""
        clear = image.mode in _WITH_ALPHA or "transparency" in image.info
        if image.mode == "RGB" or not clear:
            return image if image.mode == "RGB" else image.convert("RGB")
        image = image.convert("LA") if image.mode == "La" else image
        pixels = _bytes_of(image.convert("RGBA"), 4)
        alpha = pixels[..., 3:].float().div_(255)
        laid = pixels[..., :3] * alpha + self._background(image.width, image.height) * (1 - alpha)
        return PIL.Image.frombytes("RGB", image.size, laid.to(torch.uint8).numpy().tobytes())

    def _background(self, width: int, height: int) -> torch.Tensor:
        """[H, W, 1] float32"""
        settings = self.media_proc_cfg["transparent_bg_config"]
        if settings["pattern"] == "white":
            return torch.full((height, width, 1), 255.0)
        rows, columns = (torch.arange(n) // settings["chessboard_square_size"] for n in (height, width))
        like_first = (rows[:, None] + columns) % 2 == 0
        is_white = like_first == settings["chessboard_square_on_top_left"]
        white, gray = (float(settings[f"chessboard_{shade}_value"]) for shade in ("white", "gray"))
        return torch.where(is_white, white, gray)[..., None]

    def _fill(self, patches: torch.Tensor, image: Any, grid: tuple[int, int, int]) -> None:
        """Write the numbers of an RGB picture into its patches [h w, 3, p, p]: a row of patches at a time, in cache.

        What a crop has outside of the picture, on the right and at the bottom, is zero.
        """
        _, rows, columns = grid
        patch = self.media_proc_cfg["patch_size"]
        mean, std = (torch.tensor(self.media_proc_cfg[name])[:, None, None] for name in ("image_mean", "image_std"))
        for row, filled in enumerate(patches.view(rows, columns, 3, patch, patch)):
            strip = image.crop((0, row * patch, columns * patch, (row + 1) * patch))
            cells = _bytes_of(strip, 3).view(patch, columns, patch, 3).permute(1, 3, 0, 2)
            filled.copy_(cells.contiguous()).div_(255).sub_(mean).div_(std)


def _bytes_of(image: Any, channels: int) -> torch.Tensor:
    """[H, W, channels] uint8 of a Pillow image with a byte for each channel."""
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, channels)


def _flat(images: Any) -> Iterator[Any]:
    """The single images of one, or of nested lists."""
    if isinstance(images, list | tuple):
        for image in images:
            yield from _flat(image)
    else:
        yield images


def _opened(image: Any, number: int) -> Any:
    """A Pillow image whose header has been read, and no more where it lies in a file."""
    if not isinstance(image, PIL.Image.Image):
        is_array = isinstance(image, torch.Tensor) or hasattr(image, "__array_interface__")
        image = _from_array(image, number) if is_array else _from_file(image, number)
    width, height = image.size
    if min(width, height) < 1:
        raise ValueError(f"image {number} has {width} x {height} pixels: there is nothing to see")
    most = PIL.Image.MAX_IMAGE_PIXELS
    if most is not None and width * height > most:
        raise ValueError(
            f"image {number} has {width} x {height} = {width * height} pixels, more than the {most} of "
            "PIL.Image.MAX_IMAGE_PIXELS: make it smaller, or raise that"
        )
    return image


def _from_file(image: Any, number: int) -> Any:
    """A Pillow image of a path, of the bytes of a file or of a data URL."""
    if isinstance(image, str) and image.startswith("data:"):
        _, comma, data = image.partition(",")
        try:
            image = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"image {number} is a data URL that is no base64: {error}") from error
        if not comma:
            raise ValueError(f"image {number} is a data URL without a comma before its data")
    elif isinstance(image, str) and "://" in image:
        raise ValueError(f"image {number} is an address ({image[:80]}): download it, and give the path or its bytes")
    if not isinstance(image, bytes | bytearray | str | os.PathLike):
        raise ValueError(
            f"image {number} is a {type(image).__name__}: give a Pillow image, a path, bytes, a data URL, or an array"
        )
    try:
        return PIL.Image.open(io.BytesIO(image) if isinstance(image, bytes | bytearray) else image)
    except FileNotFoundError as error:
        raise ValueError(f"image {number}: there is no file {str(image)[:200]}") from error
    except PIL.Image.DecompressionBombError as error:
        raise ValueError(f"image {number} has too many pixels: {error}") from error
    except Exception as error:  # each format's reader has errors of its own
        raise ValueError(f"image {number} is no picture that Pillow reads, or is damaged: {error}") from error


def _from_array(image: Any, number: int) -> Any:
    """A Pillow image of uint8 numbers [H, W], [H, W, channels] or [channels, H, W]."""
    pixels = image.cpu() if isinstance(image, torch.Tensor) else torch.as_tensor(image)
    if pixels.dtype != torch.uint8:
        raise ValueError(f"image {number} is an array of {pixels.dtype}: give bytes from 0 to 255 (uint8)")
    pixels = pixels[..., None] if pixels.dim() == 2 else pixels
    if pixels.dim() == 3 and pixels.shape[-1] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = pixels.permute(1, 2, 0)
    if pixels.dim() != 3 or pixels.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"image {number} is an array of shape {list(image.shape)}, expected [H, W], [H, W, channels] or "
            "[channels, H, W] with 1, 3 or 4 channels"
        )
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[pixels.shape[-1]]
    return PIL.Image.frombytes(mode, (pixels.shape[1], pixels.shape[0]), pixels.contiguous().numpy().tobytes())


__all__ = ["KimiK3ImageProcessor"]
