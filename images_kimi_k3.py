"""Images in a text: the places that their tokens take, and their features in these places (`docs/vision.md`)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .cache_kimi_k3 import HybridCache
from .configuration_kimi_k3 import KimiK3Config, KimiK3VisionConfig
from .generation_kimi_k3 import one_cache
from .vision_kimi_k3 import Grid, KimiK3Projector, KimiK3VisionTower, checked_grids, merged_patches

# What images and grids are called here, and in other models.
_NAMES = ("pixel_values", "grid_thws")
_OTHER_NAMES = ("pixel_values_videos", "image_grid_hws", "image_grid_thw", "video_grid_thw", "grid_hws")
# Offsets of packed documents, which would have to grow with the ids.
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
_IGNORED = -100  # of labels, by torch's cross entropy


class Text(NamedTuple):
    """What the text model is to read, with a column for each token of an image.

    Attributes:
        input_ids: [B, T'].
        attention_mask: [B, S + T'] behind the S columns of a cache, or None where every column is a token.
        position_ids: [B, T'], or as it came where it is not [B, T] or [T].
        labels: [B, T'], ignored at images, or None.
        places: [M] flat indices in [B, T'] of the tokens of all images, in order.
        grown: whether T' columns stand for fewer.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    labels: torch.Tensor | None
    places: torch.Tensor
    grown: bool


def refuse_images(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if one of what a text model was given, and would ignore, is about images."""
    for name in (*_NAMES, *_OTHER_NAMES):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name} is no argument of a text model: images, and frames of clips, go to "
                "KimiK3ForConditionalGeneration, as pixel_values [patches, 3, p, p] and grid_thws [images, 3]"
            )


def make_room(
    input_ids: torch.Tensor,
    tokens: Sequence[int],
    placeholder: int,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    cached: int = 0,
    padding: int = 0,
) -> Text:
    """Find the places of images in a text that has one placeholder for each image, or for each token of an image.

    In the first case the text grows; rows that grow less than others are padded on the left.

    Args:
        input_ids: [B, T].
        tokens: how many each image takes, in the order of their places, row by row.
        placeholder: the id that marks them.
        attention_mask: [B, cached + T] of ones and zeros, or None.
        position_ids: [B, T] or [T], which show where packed documents start, or None.
        labels: [B, T] or None.
        cached: columns that a cache holds.
        padding: the id in columns of padding that are added.

    Raises:
        ValueError: if the placeholders are neither as many as images nor as many as their tokens, or those of an image
            do not stand side by side.
    """
    is_image, needed = input_ids == placeholder, sum(tokens)
    found = int(is_image.sum())
    if found not in (len(tokens), needed):
        raise ValueError(
            f"input_ids have {found} placeholders of images (token {placeholder}), but {len(tokens)} images of "
            f"{needed} tokens came: write one for each image, or one for each of its tokens"
        )
    if attention_mask is not None and attention_mask.shape != (len(input_ids), cached + input_ids.shape[1]):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected "
            f"{[len(input_ids), cached + input_ids.shape[1]]}: one column for each token in the cache and each new one"
        )
    labels = None if labels is None else labels.masked_fill(is_image, _IGNORED)
    text = Text(input_ids, attention_mask, position_ids, labels, _places(is_image), False)
    if found == needed:
        _check_side_by_side(text.places, tokens, input_ids.shape[1])
        return text
    widths = torch.ones_like(input_ids)
    widths[is_image] = torch.tensor(tokens, dtype=widths.dtype, device=widths.device)
    return _grow(text, is_image, widths, cached, padding)


def _places(is_image: torch.Tensor) -> torch.Tensor:
    return is_image.flatten().nonzero().flatten()


def _check_side_by_side(places: torch.Tensor, tokens: Sequence[int], columns: int) -> None:
    """Refuse placeholders of one image with something else between them, the end of a row included."""
    firsts = torch.tensor(list(itertools.accumulate(tokens, initial=0))[:-1], device=places.device)
    first = firsts.repeat_interleave(torch.tensor(tokens, device=places.device))  # [M], of each place's image
    behind = places - places[first] != torch.arange(len(places), device=places.device) - first
    torn = (behind | (places // columns != places[first] // columns)).nonzero().flatten().tolist()
    if torn:
        number = int((firsts <= torn[0]).sum())
        raise ValueError(
            f"image {number} takes {tokens[number - 1]} tokens, but its placeholders do not stand side by side: images "
            "must come in the order of their placeholders, row by row"
        )


def _grow(text: Text, is_image: torch.Tensor, widths: torch.Tensor, cached: int, padding: int) -> Text:
    """The text with `widths` [B, T] columns in place of each."""
    rows, columns = widths.shape
    lengths = widths.sum(-1)
    longest = int(lengths.max())
    is_filled = torch.arange(longest, device=widths.device) >= longest - lengths[:, None]  # [B, T']
    source = torch.arange(rows * columns, device=widths.device).repeat_interleave(widths.flatten())

    def spread(values: torch.Tensor, elsewhere: int) -> torch.Tensor:
        spread_out = values.new_full((rows, longest), elsewhere)
        spread_out[is_filled] = values.flatten()[source]
        return spread_out

    mask = text.attention_mask
    if mask is not None or not is_filled.all():
        mask = widths.new_ones(rows, cached + columns) if mask is None else mask
        mask = torch.cat([mask[:, :cached], spread(mask[:, cached:], 0)], dim=1)
    positions = text.position_ids
    if positions is not None and positions.dim() <= 2:
        firsts = widths.flatten().cumsum(0) - widths.flatten()
        positions = spread(_moved(positions.expand(rows, -1), widths), 0)
        positions[is_filled] += torch.arange(len(source), device=widths.device) - firsts[source]
    labels = None if text.labels is None else spread(text.labels, _IGNORED)
    places = _places(spread(is_image, 0))
    return Text(spread(text.input_ids, padding), mask, positions, labels, places, True)


def _moved(position_ids: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """[B, T] positions, each later by what images before it in its document have added."""
    columns = torch.arange(widths.shape[1], device=widths.device)
    added = widths.cumsum(-1) - widths - columns
    starts = torch.ones_like(widths, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    start = columns.expand_as(widths).masked_fill(~starts, 0).cummax(-1).values
    return position_ids + added - added.gather(1, start)


class KimiK3ImageMixin:
    """What a model with a vision tower, a projector and a language model does with images."""

    config: KimiK3Config
    vision_tower: KimiK3VisionTower
    mm_projector: KimiK3Projector

    def get_image_features(self, pixel_values: torch.Tensor, grid_thws: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What stands for images in a text.

        Args:
            pixel_values: [N, 3, p, p], patches of all images.
            grid_thws: [n, 3], frames, rows and columns of patches of each image.

        Returns:
            for each image [its tokens, hidden].
        """
        self._check_reads_images()
        features = self.mm_projector(self.vision_tower(pixel_values, grid_thws))
        return features.split(merged_patches(grid_thws.tolist(), self.vision_tower.config))

    def _check_reads_images(self) -> None:
        if self.config.vision_config is None:
            raise ValueError("pixel_values: this model reads text only, its config has no vision_config")

    def _with_images(
        self,
        pixel_values: torch.Tensor | None,
        grid_thws: torch.Tensor | None,
        cached: int,
        input_ids: torch.Tensor | None,
        others: dict[str, Any],
        held: int = 0,
        **inputs: Any,
    ) -> tuple[Text, torch.Tensor]:
        """The text with room for images, and its embeddings [B, T', hidden] with their features in place.

        Args:
            others: arguments that go to the text model as they are.
            held: columns that are in a cache; images there keep their placeholders' embeddings, which nobody reads.
            inputs: mask, positions and labels, as `make_room` takes them.
        """
        self._check_reads_images()
        if input_ids is None:
            raise ValueError("pixel_values need input_ids, which say where the images go: leave inputs_embeds out")
        config: Any = self.vision_tower.config
        grids = checked_grids(pixel_values, grid_thws, config)
        padding, placeholder = self.config.pad_token_id or 0, self.config.media_placeholder_token_id
        text = make_room(
            input_ids, merged_patches(grids, config), placeholder, cached=cached, padding=padding, **inputs
        )
        for name in _OFFSETS:
            if text.grown and others.get(name) is not None:
                raise ValueError(
                    f"{name} counts the columns of input_ids with one placeholder for each image, which grow: write "
                    "one for each token of an image, or give position_ids in its place"
                )
        model: Any = self
        embeds = model.get_input_embeddings()(text.input_ids)
        pixel_values, grid_thws, places = _unread(pixel_values, grid_thws, grids, text, config, held)
        if not len(places):
            return text, embeds
        features = torch.cat(self.get_image_features(pixel_values, grid_thws)).to(embeds)
        return text, embeds.flatten(0, 1).index_copy(0, places.to(embeds.device), features).view_as(embeds)

    def _text_inputs(
        self,
        pixel_values: torch.Tensor | None,
        grid_thws: torch.Tensor | None,
        cache: HybridCache | None,
        inputs: dict[str, Any],
        others: dict[str, Any],
    ) -> dict[str, Any]:
        """What a forward hands to the text model.

        Args:
            inputs: `input_ids`, `attention_mask`, `position_ids`, `labels` and `inputs_embeds` of the caller.
            others: the rest of the caller's arguments.
        """
        refuse_images(others)
        if pixel_values is None and grid_thws is None:
            if inputs["labels"] is not None:
                self._check_no_placeholder(inputs["input_ids"])
            return inputs
        cached = 0 if cache is None else int(cache.get_seq_length())
        if cached and inputs["input_ids"] is not None and not self._is_image(inputs["input_ids"]).any():
            return inputs  # a step behind images that are in the cache
        embeds = inputs.pop("inputs_embeds")
        if embeds is not None:
            inputs["input_ids"] = None
        text, embeds = self._with_images(pixel_values, grid_thws, cached, others=others, **inputs)
        return {
            "inputs_embeds": embeds,
            "attention_mask": text.attention_mask,
            "position_ids": text.position_ids,
            "labels": text.labels,
        }

    def _is_image(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids == self.config.media_placeholder_token_id

    def _check_no_placeholder(self, input_ids: torch.Tensor | None) -> None:
        """Refuse ids that mark the places of images which did not come."""
        if self.config.vision_config is None or input_ids is None or torch.compiler.is_compiling():
            return
        if found := int(self._is_image(input_ids).sum()):
            raise ValueError(
                f"input_ids have {found} placeholders of images (token {self.config.media_placeholder_token_id}), but "
                "no pixel_values came"
            )

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *args: Any,
        pixel_values: torch.Tensor | None = None,
        grid_thws: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, which here takes images too.

        Args:
            inputs: [B, T] ids, as `input_ids` too. What comes back begins with them as they were given; `max_length`
                and `min_length` count the tokens of images.
            pixel_values, grid_thws: as in a forward, of all images of the ids, of those in a cache too.

        Raises:
            ValueError: if the images do not fit the ids, and for what starts from ids alone (drafts, chunks).
        """
        parent: Any = super()
        inputs = kwargs.pop("input_ids", None) if inputs is None else inputs
        cache = one_cache(kwargs.get("cache"), kwargs.get("past_key_values"))
        cached = 0 if cache is None else int(cache.get_seq_length())
        if pixel_values is None and grid_thws is None:
            if not cached:
                self._check_no_placeholder(inputs)
            return parent.generate(inputs, *args, **kwargs)
        mask, pad = kwargs.pop("attention_mask", None), self.config.pad_token_id
        if mask is None and inputs is not None and pad is not None and (inputs == pad).any():
            raise ValueError("attention_mask is needed beside images where input_ids hold the token of padding")
        if mask is not None and inputs is not None and cached and mask.shape != inputs.shape:
            raise ValueError(
                f"beside images generate needs the ids of all tokens, those of the {cached} in the cache included"
            )
        positions = kwargs.pop("position_ids", None)
        text, embeds = self._with_images(
            pixel_values, grid_thws, 0, inputs, kwargs, held=cached, attention_mask=mask, position_ids=positions
        )
        beside = {"attention_mask": text.attention_mask, "position_ids": text.position_ids}
        kwargs.update((name, value) for name, value in beside.items() if value is not None)
        output = parent.generate(text.input_ids, *args, inputs_embeds=embeds, **kwargs)
        return _behind_prompt(output, inputs, text.input_ids.shape[1]) if text.grown else output


def _unread(
    pixel_values: Any, grid_thws: Any, grids: Sequence[Grid], text: Text, config: KimiK3VisionConfig, held: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Patches, grids and places of the images with a token behind the first `held` columns of the text."""
    if not held:
        return pixel_values, grid_thws, text.places
    patches = pixel_values.split([math.prod(grid) for grid in grids])
    places = text.places.split(merged_patches(grids, config))
    columns = text.input_ids.shape[1]
    unread = [number for number, part in enumerate(places) if (part % columns >= held).any()]
    pixels = torch.cat([pixel_values[:0], *(patches[number] for number in unread)])
    return pixels, grid_thws[unread], torch.cat([text.places[:0], *(places[number] for number in unread)])


def _behind_prompt(output: Any, prompt: Any, columns: int) -> Any:
    """The output of `generate` with the prompt as it was given in place of its first `columns`."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    given = prompt.repeat_interleave(len(sequences) // len(prompt), dim=0).to(sequences)
    sequences = torch.cat([given, sequences[:, columns:]], dim=1)
    if isinstance(output, torch.Tensor):
        return sequences
    output["sequences"] = sequences
    return output
