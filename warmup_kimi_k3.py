"""Compiling ahead what a model will launch: what the first `generate` does by itself, and `model.warmup()`.

A forward and a step run on zeros while nothing is launched (`kernels/ahead.py`), so that what is compiled is what
the model asks for and no list that could grow old.
"""

import copy
import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils.logging import tqdm

from .graph_kimi_k3 import examined
from .kernels_kimi_k3 import ahead, dispatch

logger = logging.getLogger(__name__)

# Tokens of a row at most, where nobody asked for a length: the products do run. More can change the tiles of experts
# and the form of KDA's scan, which then compile where they are met.
MOST_TOKENS = 2048
_warm: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def refusal(model: Any) -> str | None:
    """Why nothing can be compiled ahead for this model; None when it can."""
    if (reason := dispatch.triton_refusal(model.get_input_embeddings().weight)) is not None:
        return f"its kernels do not run: {reason}"
    return None if ahead.is_possible() else "this Triton compiles one kernel after another: 3.6 or newer is needed"


def warm_up(
    model: Any, rows: int, tokens: int, padded: bool = False, training: bool = False, progress: bool = False
) -> list[str]:
    """Compile what a prompt of `rows` times `tokens` and a decoding step launch, or a training step. -> kernels."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device=model.device)
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 2] = int(not padded)
    bar = functools.partial(tqdm, desc="kernels compiled", leave=False, disable=not progress)
    with ahead.compiled_only(model.device, bar) as names:
        if training:
            _train(model, ids)
        else:
            _generate(model, ids, mask)
    return names


def warm_up_once(model: Any, rows: int, tokens: int, mask: torch.Tensor | None) -> None:
    """Before a model's first prompt on a GPU; what goes wrong is the affair of the forward that needs the kernels."""
    if model in _warm or dispatch.is_compiling_only() or model.device.type in ("cpu", "meta") or not rows * tokens:
        return
    _warm.add(model)
    # A hook, or a forward of somebody's own, must not see tokens that nobody sent.
    if refusal(model) is not None or examined(model)[1] is not None:
        return
    padded = mask is not None and bool((mask == 0).any())
    try:
        warm_up(model, rows, min(tokens, MOST_TOKENS), padded)
    except Exception as error:  # too little memory for two forwards, for one
        logger.warning("kernels are compiled one by one, where they are met: %s: %s", type(error).__name__, error)


def warm_up_all(
    model: Any, batch_sizes: Sequence[int], prompt_lengths: Sequence[int], training: bool, progress: bool
) -> list[str]:
    """`KimiK3GenerationMixin.warmup`."""
    if (reason := refusal(model)) is not None:
        raise RuntimeError(f"there is nothing to compile ahead for this model: {reason}")
    for name, sizes in (("batch_sizes", batch_sizes), ("prompt_lengths", prompt_lengths)):
        if not sizes or any(size < 1 for size in sizes):
            raise ValueError(f"{name} are numbers of at least 1, not {list(sizes)}")
    with torch.autocast(model.device.type, enabled=False):  # which may be on: it says what is compiled
        reason = examined(model)[1]
    if reason is not None:
        raise RuntimeError(f"warmup feeds a model zeros, so it comes before hooks are set or modules wrapped: {reason}")
    names = []
    for rows in batch_sizes:
        for tokens in prompt_lengths:
            names += warm_up(model, rows, tokens, padded=False, progress=progress)
            if rows > 1:
                names += warm_up(model, rows, tokens, padded=True, progress=progress)
    if training:
        names += warm_up(model, batch_sizes[0], max(prompt_lengths), training=True, progress=progress)
    _warm.add(model)
    return names


def _generate(model, ids, mask):
    settings = GenerationConfig(max_new_tokens=2, pad_token_id=0)
    # What these leave open comes from the model's own settings: an end, which zeros may be, or strings to stop at. A
    # copy, which shares all modules, because other threads may generate with the model meanwhile.
    plain = copy.copy(model)
    plain.generation_config = settings
    try:
        plain.generate(ids, attention_mask=mask, generation_config=settings)
    finally:
        plain.release_decoding_buffers()  # its step ran on zeros


def _train(model, ids):
    """A step that leaves `grad` alone."""
    modes = {module: module.training for module in model.modules()}  # parts of a model may be in another one
    try:
        # Backward passes on a GPU run in a thread of their own, whose launches would be real.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
            wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss, wanted, allow_unused=True)
    finally:
        for module, is_training in modes.items():
            module.training = is_training
