"""Context parallelism: the tokens of a prompt or of a packed training row, cut over processes by position.

Process r of W holds the r-th part of every row. What a layer needs from the other parts:

    short convolutions   the last W - 1 inputs of the part before                          one all-gather
    KDA                  (Phi, S^) of every part, then an exact fold (`kernels/kda_context`)  one all-gather
    MLA                  the latents of all tokens (all-gather); queries and outputs change from "all heads of my
                         tokens" to "all tokens of my heads" and back (two all-to-all), because causality would give
                         the last process 2 W - 1 times the work of the first
    everything else      nothing: norms, mixes over depth, router and experts see one token at a time

Serves a prefill as well as training. Models loaded as remote code, whose classes are not this package's, work too.
`docs/parallel.md` has the commands and the bytes.
"""

import contextlib
import hashlib
import inspect
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.utils.generic import is_flash_attention_requested

from ..kernels import dispatch, kda_context, short_conv
from ..packing_kimi_k3 import causal_mask, find_packing, packed_offsets

# torch 2.13 renamed them
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


@contextlib.contextmanager
def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None):
    """Inside, a forward takes this process's part of every row and computes what whole rows would give for it.

    Backward may run inside or after it. Every gradient is that of this process's tokens: the sum over the group is that
    of the whole rows. `shard` cuts a batch, `gather_cache` makes a cache whole.

    Args:
        model: a Kimi K3 model, or anything that holds one; the same weights on every process of the group.
        group: the processes, in the order of the parts; None for all.

    Raises:
        RuntimeError: without a process group.
        ValueError: when a forward gets what cannot be cut, on every process of the group and with the process that got
            it: padding, a cache, another number of rows, parts shorter than a convolution reaches back.
    """
    _check_group(group)
    backbone = next((m for m in model.modules() if any(c.__name__ == "KimiK3Model" for c in type(m).__mro__)), None)
    if backbone is None:
        raise ValueError(f"{type(model).__name__} holds no KimiK3Model whose tokens could be cut")
    group = dist.group.WORLD if group is None else group
    _agree(_facts(backbone.config, group), group)

    def prepare(module, args, kwargs):
        arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        arguments.update(arguments.pop("kwargs", {}))
        return (), {**arguments, **_planned(module.config, arguments, group)}

    hook = backbone.register_forward_pre_hook(prepare, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _check_group(group) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "context parallelism needs a process group: start with torchrun and call "
            "torch.distributed.init_process_group"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in the group whose processes hold the parts")


def shard(batch: dict[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """This process's part of a batch that every process has whole.

    Args:
        batch: `input_ids` [B, T]; also `labels` [B, T], and `position_ids` [B, T] or `cu_seq_lens_q` for packed
            documents, which become `position_ids`. Where W does not divide T, the first parts get a token more.
        group: as for `context_parallel`.

    Returns:
        the part [B, t] of each. With labels also `shift_labels`, shifted across the cuts, and `num_items_in_batch`, the
        number of labels in the whole batch: the losses of all processes sum up to that of the batch.

    Raises:
        ValueError: on every process, for what cannot be cut on one of them, and for batches that differ.
    """
    _check_group(group)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = {}

    def facts():
        whole.update(_whole(batch))
        return {"the batch, which has to be whole on each of them": _digests(whole)}

    _agree(_facts_or_refusal(facts), group)
    part = {name: value.tensor_split(world, dim=1)[rank].contiguous() for name, value in whole.items()}
    if "labels" in part:
        part["num_items_in_batch"] = (whole["shift_labels"] != -100).sum()
    return part


def _whole(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All that `shard` cuts, each [B, T]."""
    batch = dict(batch)
    ids = batch.pop("input_ids")
    whole = {"input_ids": ids}
    mask = batch.pop("attention_mask", None)
    if mask is not None and not mask.all():
        raise ValueError("shard cannot cut padding: pack the documents (position_ids), or leave the padding out")
    offsets = packed_offsets(batch)
    if offsets is not None:
        if ids.shape[0] != 1 or int(offsets[0]) != 0 or int(offsets[-1]) != ids.shape[1]:
            raise ValueError(f"cu_seq_lens_q {offsets.tolist()} does not describe one row of {ids.shape[1]} tokens")
        lengths = offsets.diff().tolist()
        batch["position_ids"] = torch.cat([torch.arange(n, device=ids.device) for n in lengths])[None]
    if batch.get("position_ids") is not None:
        whole["position_ids"] = batch.pop("position_ids").expand(ids.shape[0], -1)
    labels = batch.pop("labels", None)
    if labels is not None:
        whole |= {"labels": labels, "shift_labels": F.pad(labels[:, 1:], (0, 1), value=-100)}
    if batch := {name: value for name, value in batch.items() if value is not None}:
        raise ValueError(f"shard does not know how to cut {', '.join(batch)}: cut it by hand")
    for name, value in whole.items():
        if value.shape != ids.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {tuple(ids.shape)} as input_ids")
    return whole


def _digests(whole):
    return {
        name: (*value.shape, hashlib.sha256(value.cpu().contiguous().numpy().tobytes()).hexdigest()[:8])
        for name, value in whole.items()
    }


@torch.no_grad()
def gather_cache(cache, group: dist.ProcessGroup | None = None):
    """Make the caches of a prefill inside `context_parallel` whole, in place and on every process of the group.

    A cache then holds the last process's KDA states and the latents of all tokens, and continues like one that a single
    process filled: `model.generate(ids, attention_mask=..., past_key_values=cache)`.

    Call it once: a whole cache cannot be told from a part.

    Returns:
        the cache.
    """
    if cache is None:
        raise ValueError("there is no cache to make whole: the forward needs use_cache=True, and has none if packed")
    world = dist.get_world_size(group)
    lengths = [None] * world
    dist.all_gather_object(lengths, int(cache.get_seq_length()), group=group)
    source = dist.get_global_rank(group or dist.group.WORLD, world - 1)
    for layer in cache.layers:
        if "recurrent_state" in layer.tensor_names:
            tensors = [tensor.contiguous() for tensor in layer.tensors()]
            for tensor in tensors:
                dist.broadcast(tensor, source, group=group)
        else:
            tensors = [_gathered(layer.filled(), lengths, group)]
        layer.load(tensors, sum(lengths))
    return cache


@torch.no_grad()
def prefill(model: nn.Module, input_ids: torch.Tensor, group: dist.ProcessGroup | None = None):
    """The cache of a prompt without its last token, computed by all processes of the group.

    Args:
        input_ids: [B, T], the same on every process.

    Returns:
        the whole `HybridCache` of T - 1 tokens, on every process. `generate` continues with the last token:
        `model.generate(input_ids, attention_mask=torch.ones_like(input_ids), past_key_values=cache)`.
    """
    with context_parallel(model, group):
        out = model(**shard({"input_ids": input_ids[:, :-1]}, group), use_cache=True, logits_to_keep=1)
    return gather_cache(next(out[name] for name in ("cache", "past_key_values") if out.get(name) is not None), group)


def bytes_sent(config, parts: list[int], rank: int, rows: int, dtype_bytes: int) -> tuple[float, float]:
    """Bytes that process `rank` sends in (a forward, a backward), collectives taken as rings.

    Args:
        config: of the text model.
        parts: tokens of every process's part of a row.
        dtype_bytes: of a number of the model's dtype.
    """
    world, own, total, longest = len(parts), parts[rank], sum(parts), max(parts)
    others, share, linear = world - 1, 1 / world, config.linear_attn_config
    heads, size = linear["num_heads"], linear["head_dim"]
    tails = others * rows * 3 * (linear["short_conv_kernel_size"] - 1) * heads * size * dtype_bytes
    states = others * rows * heads * size * 4  # a column of Phi, of S^ or of its gradient
    latents = others * rows * longest * (config.kv_lora_rank + config.qk_rope_head_dim)
    by_heads = rows * config.num_attention_heads * own * others * share * dtype_bytes
    by_tokens = rows * config.num_attention_heads * (total - own) * share * dtype_bytes
    query, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    kda = config.layer_types.count("linear_attention")
    mla = config.layer_types.count("full_attention")
    forward = kda * (tails + 2 * size * states) + mla * (latents * dtype_bytes + query * by_heads + value * by_tokens)
    backward = kda * (tails + size * states) + mla * (latents * 4 + query * by_tokens + value * by_heads)
    return forward, backward


def _facts(config, group) -> dict:
    """What all processes must agree on before the first collective of a forward."""
    text = config.get_text_config(decoder=True)
    world, heads = dist.get_world_size(group), text.num_attention_heads
    refusal = None
    if heads % world:
        refusal = f"{heads} heads of MLA do not divide among {world} processes: use a divisor of {heads}"
    model = text.hidden_size, text.num_hidden_layers, heads, text.vocab_size
    return {"the model (hidden size, layers, heads, vocabulary)": model, "refusal": refusal}


def _facts_or_refusal(facts) -> dict:
    """The result or refusal of `facts()`, for `_agree`: if it fails, the others must not wait for this process."""
    try:
        return {"refusal": None, **facts()}
    except Exception as error:
        return {"refusal": str(error)}


def _agree(facts: dict, group) -> list[dict]:
    """The facts of all processes, in order; raises on every process when one of them refuses or they differ."""
    everybody = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, facts, group=group)
    for rank, other in enumerate(everybody):
        if other["refusal"] is not None:
            raise ValueError(f"process {rank} of {len(everybody)} cannot take its part: {other['refusal']}")
    for name in facts:
        if name.startswith("the ") and any(other[name] != everybody[0][name] for other in everybody):
            raise ValueError(f"the processes disagree about {name}: {[other[name] for other in everybody]}")
    return everybody


def _planned(config, arguments: dict, group) -> dict:
    """Arguments to change in a forward of the backbone: the plan of its parts, and what only the plan knows."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    part = ids if embeds is None else embeds
    facts = _facts_or_refusal(lambda: _part_facts(config, arguments, part))
    plan = ContextPlan(_agree(facts, group), part.device, group)
    if plan.packed and is_flash_attention_requested(config):
        raise ValueError("packed documents over several processes need attn_implementation 'sdpa', 'eager' or 'flex'")
    changed = {"context": plan, "attention_mask": None, "past_key_values": None, "cache": None}
    return {**changed, "use_cache": False} if plan.packed else changed


def _part_facts(config, arguments, part) -> dict:
    """First and last position of every row, the columns behind the first at which documents start, and sizes.

    Args:
        part: [B, t] ids or [B, t, hidden] embeddings.
    """
    if part is None or part.dim() < 2:
        raise ValueError("a part is input_ids [B, t] or inputs_embeds [B, t, hidden]")
    if any(arguments.get(name) is not None for name in PACKING_ARGUMENTS):
        raise ValueError(f"{', '.join(PACKING_ARGUMENTS)} describe a whole row: give the position_ids of the part")
    mask = arguments.get("attention_mask")
    if mask is not None and not mask.all():
        raise ValueError("padding cannot be cut: pack the documents (position_ids), or leave the padding out")
    if any(arguments.get(name) is not None for name in ("cache", "past_key_values")):
        raise ValueError("a cache cannot be given: use_cache=True makes one of this part, gather_cache makes it whole")
    if arguments.get("output_attentions") or config.output_attentions:
        raise ValueError("there are no attention weights of a part (output_attentions)")
    (rows, length), reach = part.shape[:2], config.linear_attn_config["short_conv_kernel_size"] - 1
    if length < max(reach, 1):
        raise ValueError(f"a part has {length} tokens, at least {max(reach, 1)} are needed: use fewer processes")
    positions = arguments.get("position_ids")
    facts = {"the rows of the batch": rows, "tokens": length, "the use of position_ids": positions is not None}
    if positions is None:
        return {**facts, "first": [None] * rows, "last": [None] * rows, "starts": [[]] * rows}
    positions = positions[None] if positions.dim() == 1 else positions
    if positions.dim() != 2 or positions.shape[1] != length or positions.shape[0] not in (1, rows):
        raise ValueError(f"position_ids has shape {tuple(positions.shape)}, expected {(rows, length)}")
    positions = positions.expand(rows, -1)
    inner = (positions.diff(dim=1) != 1).nonzero().tolist()
    starts = [[column + 1 for row, column in inner if row == number] for number in range(rows)]
    return {**facts, "first": positions[:, 0].tolist(), "last": positions[:, -1].tolist(), "starts": starts}


class ContextPlan:
    """Which tokens lie where in one forward, and what the layers exchange; an `exchange` of `kernels/kda_context`.

    Attributes:
        lengths: tokens of every process's part of a row.
        packed: whether a row holds more than one document.
        last: number of the last sequence of every row of this part; the rows' sequences lie end to end.
    """

    def __init__(self, everybody: list[dict], device: torch.device, group):
        self.group, self.world, self.rank = group, len(everybody), dist.get_rank(group)
        self.parts = [facts["tokens"] for facts in everybody]
        self.rows, self.device, self._masks = everybody[0]["the rows of the batch"], device, {}
        offsets = [0, *itertools.accumulate(self.parts)]
        # of every whole row: the columns at which documents start
        self._starts: list[list[int]] = [[] for _ in range(self.rows)]
        for rank, (facts, offset) in enumerate(zip(everybody, offsets, strict=False)):
            for row, starts in enumerate(self._starts):
                first, before = facts["first"][row], everybody[rank - 1]["last"][row]
                if rank == 0 or (first is not None and first != before + 1):
                    starts.append(offset)
                starts += [offset + column for column in facts["starts"][row]]
        self.packed = any(starts != [0] for starts in self._starts)
        begin, end = offsets[self.rank : self.rank + 2]
        inner = [[start for start in starts if begin < start < end] for starts in self._starts]
        self.lengths = [after - start for starts in inner for start, after in itertools.pairwise([begin, *starts, end])]
        documents = [1 + len(starts) for starts in inner]
        self._first = [sum(documents[:row]) for row in range(self.rows)]
        self.last = [first + count - 1 for first, count in zip(self._first, documents, strict=True)]
        # of every row: how many tokens before this part belong to the document that continues here
        behind = [begin - max(start for start in starts if start <= begin) for starts in self._starts]
        self._behind = torch.tensor(behind, device=device)
        self._goes_on = self._behind > 0
        self._passes = self._goes_on & torch.tensor([not starts for starts in inner], device=device)

    def short_convs(self, inputs, weights, tails, cu_seqlens, keep_tails):
        """As `short_conv.short_convs`; in front of every row the inputs of its first document in the part before."""
        history = weights[0].shape[-1] - 1
        rows = [x.reshape(self.rows, self.parts[self.rank], -1) for x in inputs]
        tails = torch.cat([x[:, -history:] for x in rows], dim=-1)
        before = _Exchange.apply(tails, lambda x: self._neighbour(x, -1), lambda grad: self._neighbour(grad, 1))
        distance = torch.arange(history, 0, -1, device=before.device)
        before = torch.where((distance <= self._behind[:, None])[..., None], before, 0)
        longer = [
            torch.cat([old, x], dim=1)
            for old, x in zip(before.split([x.shape[-1] for x in rows], dim=-1), rows, strict=True)
        ]
        if cu_seqlens is not None:
            longer = [x.flatten(0, 1)[None] for x in longer]
            lengths = list(self.lengths)
            for first in self._first:
                lengths[first] += history
            cu_seqlens = F.pad(torch.tensor(lengths, device=cu_seqlens.device).cumsum(0), (1, 0))
        outputs, new_tails = short_conv.short_convs(tuple(longer), weights, None, cu_seqlens, keep_tails)
        shape = self.rows, history + self.parts[self.rank], -1
        outputs = tuple(y.reshape(shape)[:, history:].reshape(x.shape) for x, y in zip(inputs, outputs, strict=True))
        return outputs, new_tails

    def fused_kda(self, *arguments, initial_state=None, cu_seqlens=None):
        """As `kda.fused_kda`, from the states that the parts before leave."""
        return kda_context.part_kda(*arguments, cu_seqlens, self)

    def entry_states(self, transition, offset):
        """Of `kernels.kda_context`: the states that the sequences of this part start from, and every part's Phi."""
        sent = torch.cat([transition * self._passes[:, None, None, None], offset], dim=-1)
        received = _all_gather(sent, self.group)
        size = transition.shape[-1]
        state = torch.zeros_like(offset)
        for part in received[: self.rank]:
            state = part[..., size:] + part[..., :size] @ state
        entry = offset.new_zeros(len(self.lengths), *offset.shape[1:])
        entry[self._first] = state * self._goes_on[:, None, None, None]
        return entry, received[self.rank + 1 :, ..., :size].clone()

    def end_gradients(self, d_entry, transitions):
        """Of `kernels.kda_context`: gradients of the final states, by what the parts behind do with them."""
        sent = d_entry[self._first] * self._goes_on[:, None, None, None]
        received = _all_gather(sent, self.group)
        grad = torch.zeros_like(sent)
        for transition, added in zip(transitions.flip(0), received[self.rank + 1 :].flip(0), strict=True):
            grad = transition.transpose(-1, -2) @ grad + added
        d_final = torch.zeros_like(d_entry)
        d_final[self.last] = grad
        return d_final

    def attention(self, module, query, latents, **options):
        """MLA of all tokens for this process's share of the heads.

        Args:
            module: the layer; query [B, H, t, qk_dim] and latents [B, t, R] of this part.

        Returns:
            [B, t, H, v_dim]
        """
        share = query.shape[1] // self.world
        first, size = self.rank * share, module.nope_dim + module.v_dim
        query = _Exchange.apply(query, self._by_heads, self._by_tokens)
        latents = _Exchange.apply(latents, lambda x: _gathered(x, self.parts, self.group), self._scattered)

        def kv_b(latent):
            if dispatch.stands_for_call(module.kv_b_proj, nn.Linear):
                return F.linear(latent, module.kv_b_proj.weight[first * size : (first + share) * size])
            return module.kv_b_proj(latent)[..., first * size : (first + share) * size]

        mask = self._mask(module.config, query)
        out, _ = module._expanded(query, latents, mask, need_weights=False, kv_b=kv_b, **options)
        return _Exchange.apply(out.transpose(1, 2), self._by_tokens, self._by_heads).transpose(1, 2)

    def _mask(self, config, like):
        """The mask of whole rows in the form of the attention implementation; None where causality is all."""
        key = config._attn_implementation, like.dtype
        if key not in self._masks:
            embeds, packing = like.new_empty(self.rows, sum(self.parts), 1), None
            if self.packed:
                ends = [[*starts, sum(self.parts)] for starts in self._starts]
                lengths = [after - start for row in ends for start, after in itertools.pairwise(row)]
                positions = torch.cat([torch.arange(length) for length in lengths]).view(self.rows, -1)
                packing = find_packing(None, positions, None, embeds, None)
            self._masks[key] = causal_mask(config, embeds, None, None, packing)
        return self._masks[key]

    def _neighbour(self, x, step):
        """x of the process that is `step` behind this one, zeros where there is none."""
        received, other = _all_gather(x, self.group), self.rank + step
        return received[other].clone() if 0 <= other < self.world else torch.zeros_like(x)

    def _scattered(self, grad):
        """Gradients [B, T, R] of all tokens, summed over the processes in float32 -> [B, t, R] of these tokens."""
        longest, wide = max(self.parts), grad.to(torch.promote_types(grad.dtype, torch.float32))
        parts = [F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in wide.split(self.parts, dim=1)]
        out = torch.empty_like(parts[0])
        _reduce_scatter_tensor(out, torch.cat(parts), group=self.group)
        return out[:, : self.parts[self.rank]].to(grad.dtype)

    def _by_heads(self, x):
        """[B, H, t, D], all heads of these tokens -> [B, H / W, T, D], all tokens of these heads."""
        batch, heads, _, size = x.shape
        shapes = [(batch, heads // self.world, tokens, size) for tokens in self.parts]
        return torch.cat(self._all_to_all(x.chunk(self.world, dim=1), shapes), dim=2)

    def _by_tokens(self, x):
        """[B, H / W, T, D] -> [B, H, t, D], the inverse of `_by_heads`."""
        shapes = [(*x.shape[:2], self.parts[self.rank], x.shape[3])] * self.world
        return torch.cat(self._all_to_all(x.split(self.parts, dim=2), shapes), dim=1)

    def _all_to_all(self, pieces, shapes):
        """Send piece r to process r; the tensor from process r has shape r."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        sent = torch.cat([piece.flatten() for piece in pieces])
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, sizes, [piece.numel() for piece in pieces], group=self.group)
        return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]


class _Exchange(torch.autograd.Function):
    """x -> `there(x)`, which sends it; its gradient is sent back, `back(grad)`."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def _all_gather(x, group):
    """[W, *x.shape], one entry a process."""
    world = dist.get_world_size(group)
    received = x.new_empty(world * x.shape[0], *x.shape[1:])
    _all_gather_tensor(received, x.contiguous(), group=group)
    return received.view(world, *x.shape)


def _gathered(x, lengths, group):
    """[B, t, R] -> [B, T, R] over parts of these lengths."""
    longest = max(lengths)
    received = _all_gather(F.pad(x, (0, 0, 0, longest - x.shape[1])), group)
    return torch.cat([part[:, :length] for part, length in zip(received, lengths, strict=True)], dim=1)
