"""Routed experts over ragged groups of tokens (torch reference).

Tokens are sorted by expert, each expert that was hit does two matrix products on its rows, and the results are combined
with the routing weights in float32. An expert's weights are asked for only when it is hit, so that packed weights can
be decoded one expert at a time.

How many tokens hit an expert is a number the host has to wait for, which a compiled or captured graph cannot. There,
`gathered_experts` gives every pair of token and expert its own copy of the weights: the same products, for the few
tokens of a decoding step.
"""

import functools
import threading
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from . import dispatch, mxfp4, norms, operators, situ

# Pairs of token and expert that the Triton kernels take at once: bounds what lies between the two products.
MOST_PAIRS = 2**18


def grouped_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    num_experts: int,
    weights_of: Callable[[int], tuple],
    activation: Callable[[torch.Tensor], torch.Tensor],
    linear: Callable = F.linear,
) -> torch.Tensor:
    """u_t = sum_k weight_tk * expert_k(x_t).

    Args:
        x: [T, D].
        expert_ids: [T, k] chosen experts, distinct in a row; E and above are another process's and add nothing.
        expert_weights: [T, k] float32.
        num_experts: E.
        weights_of: expert -> (gate_up [2M, D], gate rows first; down [D, M]), in the form that `linear` takes.
        activation: [rows, 2M] -> [rows, M].
        linear: (rows [n, in], weight [out, in]) -> [n, out].

    Returns:
        [T, D] float32 (float64 for float64 x), summed in the order of the experts.
    """
    out = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    if x.device.type == "meta":  # no ids to sort; shapes and dtypes are all there is
        return out
    top_k = expert_ids.shape[-1]
    flat_ids = expert_ids.flatten()
    order = torch.argsort(flat_ids, stable=True)
    counts = torch.bincount(flat_ids, minlength=num_experts)[:num_experts].tolist()
    tokens = order // top_k
    weights = expert_weights.flatten()[order]
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        rows = tokens[start : start + count]
        gate_up, down = weights_of(expert)
        result = linear(activation(linear(x[rows], gate_up)), down)
        out.index_add_(0, rows, result.to(out.dtype) * weights[start : start + count, None])
        start += count
    return out


def is_one_token(x: torch.Tensor, *tensors: torch.Tensor) -> bool:
    """Whether `token_experts` takes x [T, D] with these: one token on a CPU, of which no gradient is wanted."""
    here = x.device.type == "cpu" and all(tensor.device == x.device for tensor in tensors)
    return len(x) == 1 and here and not (torch.compiler.is_compiling() or dispatch.needs_grad(x, *tensors))


def token_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    weights_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`grouped_experts` of one token: nothing to sort, and as few operators as go.

    Args:
        x: [1, D].
        expert_ids: [1, k], all below E.
        expert_weights, activation: as there.
        weights_of: expert -> (gate_up [2M, D], down [D, M]).

    Returns:
        [1, D] float32 (float64 for float64 x), summed in the order of `expert_ids`.
    """
    matrices = [weights_of(expert) for expert in expert_ids[0].tolist()]
    hidden = activation(torch.cat([F.linear(x, gate_up) for gate_up, _ in matrices]))
    results = torch.cat([F.linear(row, down) for row, (_, down) in zip(hidden.split(1), matrices, strict=True)])
    results = norms.widened(results)
    return norms.cast(expert_weights, results.dtype) @ results


class DecodedExperts:
    """Packed experts of one layer as matrices, for single tokens on a CPU, where decoding costs more than the products.

    Those that were hit last are kept, `BYTES` of them at most. They are those of the very tensors that are given, in
    the version that autograd counts of each, or made anew: whoever writes behind its back, into `.data`, calls `clear`.
    Copied and pickled it is empty.
    """

    BYTES = 2**23  # of a layer

    def __init__(self) -> None:
        self._lock = threading.Lock()  # threads may share a model
        self.clear()

    def clear(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the one first whose last hit is longest ago
        self._dtype: torch.dtype | None = None
        # Of every tensor itself, an alias, which keeps its address from being used again, and its version.
        self._made_of: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def of(
        self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """What `token_experts` takes as `weights_of`.

        Args:
            weights, scales: packed `gate_up` and `down` as `fused_experts` takes them, and their scales.
        """
        if any(x.is_inference() for x in (*weights, *scales)):  # of these no versions are counted
            return lambda expert: _decoded(expert, weights, scales, dtype)
        with self._lock:
            if not self._is_of((*weights, *scales), dtype):
                self.clear()
                self._dtype, self._made_of = dtype, [(x, x.detach(), x._version) for x in (*weights, *scales)]
            kept = self._kept
        room = self.BYTES // (2 * dtype.itemsize * sum(x[0].numel() for x in weights))

        def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            with self._lock:
                found = kept.pop(expert, None)
                if found is None:
                    found = _decoded(expert, weights, scales, dtype)
                    while kept and len(kept) >= room:
                        kept.pop(next(iter(kept)))
                if room:
                    kept[expert] = found
            return found

        return matrices

    def _is_of(self, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> bool:
        return self._dtype == dtype and all(
            x is tensor and alias.data_ptr() == x.data_ptr() and version == x._version
            for x, (tensor, alias, version) in zip(tensors, self._made_of, strict=True)
        )

    def __reduce__(self) -> tuple:
        return DecodedExperts, ()


def _decoded(expert, weights, scales, dtype):
    gate_up, down = (
        mxfp4.dequantize_mxfp4(packed[expert], scale[expert], dtype)
        for packed, scale in zip(weights, scales, strict=True)
    )
    return gate_up, down


def gathered_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    weights_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`grouped_experts` with shapes that depend on no value; holds the weights of T k experts at once.

    Args:
        x, expert_ids, expert_weights, activation: as there.
        weights_of: experts [n] -> (gate_up [n, 2M, D], down [n, D, M]).

    Returns:
        [T, D] float32 (float64 for float64 x), summed in the order of `expert_ids`.
    """
    gate_up, down = weights_of(expert_ids.flatten())
    rows = x.repeat_interleave(expert_ids.shape[-1], dim=0)[..., None]  # [T k, D, 1]
    result = torch.bmm(down, activation(torch.bmm(gate_up, rows).squeeze(-1))[..., None]).squeeze(-1)
    result = result.to(torch.promote_types(x.dtype, torch.float32)) * expert_weights.reshape(-1, 1)
    return result.view(*expert_ids.shape, -1).sum(1)


def sorted_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`grouped_experts` on torch's grouped matrix product, for training: forward and backward wait for nothing.

    Rows are laid out by expert and fetched back through the permutation and its inverse, so that both moves are gathers
    in both directions; the gradient of plain indexing would sort and add.

    Args:
        x, expert_ids, expert_weights, activation: as there.
        gate_up: [E, 2M, D], gate rows first, of the dtype of `x`; under autocast each is rounded to its dtype.
        down: [E, D, M].
        dtype: of the result; None: that of `x`.

    Returns:
        [T, D], rounded once from a float32 sum in the order of `expert_ids`.
    """
    dtype = x.dtype if dtype is None else dtype
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        products = torch.get_autocast_dtype(x.device.type)
        x, gate_up, down = (norms.cast(each, products) for each in (x, gate_up, down))
    # A GPU sorts by digits: a quarter of an int64's passes.
    flat_ids = expert_ids.flatten().to(torch.int16 if len(gate_up) < 2**15 else torch.int32)
    sorted_ids, order = flat_ids.sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    inverse = inverse.view(expert_ids.shape)
    experts = torch.arange(len(gate_up), device=x.device, dtype=flat_ids.dtype)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    fused = x.numel() > 0 and dispatch.triton_refusal(x, expert_weights) is None
    rows = _Spread.apply(x, order, inverse, fused)
    hidden = activation(F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
    rows = F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    return _Combine.apply(rows, expert_weights, order, inverse, dtype if fused else None).to(dtype)


class _Spread(torch.autograd.Function):
    """x [T, D] -> the rows of its pairs [T k, D], pair order[i] at i; inverse [T, k] is where a pair lies.

    With `fused` the backward pass is a Triton kernel, where it runs.
    """

    @staticmethod
    def forward(ctx, x, order, inverse, fused):
        ctx.fused = fused
        ctx.save_for_backward(inverse)
        return x.index_select(0, order // inverse.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        out = dispatch.run_kernels(_rows("combine"), grad, inverse, None, grad.dtype) if ctx.fused else None
        if out is None:
            out = grad.index_select(0, inverse.flatten()).unflatten(0, inverse.shape).sum(1)
        return out, None, None, None


class _Combine(torch.autograd.Function):
    """rows of pairs [T k, D], weights [T, k] float32 -> their weighted sums [T, D] float32; keeps the rows alone.

    With a `dtype` a Triton kernel each way, where they run, with sums rounded to it.
    """

    @staticmethod
    def forward(ctx, rows, weights, order, inverse, dtype):
        ctx.fused = dtype is not None
        ctx.save_for_backward(rows, weights, order, inverse)
        out = dispatch.run_kernels(_rows("combine"), rows, inverse, weights, dtype) if ctx.fused else None
        if out is None:
            out = (rows.index_select(0, inverse.flatten()).unflatten(0, inverse.shape) * weights[..., None]).sum(1)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        rows, weights, order, inverse = ctx.saved_tensors
        grads = dispatch.run_kernels(_rows("combine_backward"), grad, rows, inverse, weights) if ctx.fused else None
        if grads is None:
            grad = grad.to(weights.dtype).index_select(0, order // weights.shape[1])
            grads = (grad * weights.flatten()[order, None]).to(rows.dtype), (rows * grad).sum(-1)[inverse]
        return *grads, None, None, None


def fused_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    beta: float | None,
    linear_beta: float | None,
    elsewhere: bool = False,
) -> torch.Tensor | None:
    """`grouped_experts` in two Triton kernels that wait for nothing; None where they do not run, or need a gradient.

    Args:
        x, expert_ids, expert_weights: as there.
        gate_up: [E, 2M, D], gate rows first, or packed MXFP4 [E, 2M, D / 2] uint8.
        down: [E, D, M], or packed [E, D, M / 2] uint8.
        scales: of the packed weights, [E, 2M, D / 32] and [E, D, M / 32] uint8; None for floating-point weights.
        beta, linear_beta: of SiTU; `beta` None for SwiGLU.
        elsewhere: whether ids of E and above, another process's experts, may be among `expert_ids`.

    Returns:
        [T, D] float32, summed in the order of `expert_ids`.
    """
    floating = (x, expert_weights) if scales is not None else (x, expert_weights, gate_up, down)
    if dispatch.operator_refusal(*floating) is not None or dispatch.needs_grad(*floating):
        return None
    if gate_up.device != x.device or x.shape[0] == 0:  # offloaded bytes, or nothing
        return None
    arguments = x, expert_ids, expert_weights, gate_up, down
    if torch.compiler.is_compiling():
        return _OPERATOR(*arguments, list(scales or ()), beta, linear_beta, elsewhere)
    return _in_kernels(*arguments, scales, beta, linear_beta, elsewhere)


def _in_kernels(x, expert_ids, expert_weights, gate_up, down, scales, beta, linear_beta, elsewhere):
    tokens, pairs = max(1, MOST_PAIRS // expert_ids.shape[1]), (x, expert_ids, expert_weights)
    weights = gate_up, down, *(scales or (None, None)), beta, linear_beta, elsewhere
    if len(x) <= tokens:
        return dispatch.run_first(_kernels(*pairs, *weights), *pairs, *weights)
    parts = [
        dispatch.run_first(_kernels(*part, *weights), *part, *weights)
        for part in zip(*(tensor.split(tokens) for tensor in pairs), strict=True)
    ]
    return None if any(part is None for part in parts) else torch.cat(parts)


def groups_on_device(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether torch's grouped matrix product, which keeps the counts on the device, takes these on a GPU."""
    if not x.is_cuda:
        return False
    types = {x.dtype, gate_up.dtype, down.dtype}
    device = x.device.type
    if torch.is_autocast_enabled(device) and types <= {torch.float32, torch.bfloat16}:
        types = {torch.get_autocast_dtype(device)}
    if types != {torch.bfloat16}:
        return False
    aligned = all(size % 8 == 0 for size in (*gate_up.shape[1:], *down.shape[1:]))
    return aligned and hasattr(F, "grouped_mm")


def _kernels(x, expert_ids, expert_weights, gate_up, down, gate_up_scale, *rest):
    """The modules whose kernels take these, the fastest first."""
    from . import experts_triton, triton_tools

    gluon = _gluon() if gate_up_scale is not None and triton_tools.is_hopper(x.device) else ()
    arguments = x, expert_ids, expert_weights, gate_up, down, gate_up_scale, *rest
    return *(module for module in gluon if module.fits(*arguments)), experts_triton


@functools.cache  # an import that fails is made anew every time
def _gluon():
    """The modules for Hopper, for few and for many rows an expert; none where they do not import."""

    def load():
        from . import experts_few_gluon, experts_gluon

        return experts_few_gluon, experts_gluon

    return dispatch.if_importable(load, "MXFP4 experts") or ()


def _rows(name):
    from . import expert_rows_triton

    return getattr(expert_rows_triton, name)


def _run_operator(x, expert_ids, expert_weights, gate_up, down, scales, beta, linear_beta, elsewhere):
    out = None
    if dispatch.triton_refusal(x, expert_weights) is None:
        pairs = x, expert_ids, expert_weights
        out = _in_kernels(*pairs, gate_up, down, tuple(scales) or None, beta, linear_beta, elsewhere)
    if out is not None:
        return out

    def activation(both):
        return situ.swiglu(both, None) if beta is None else situ.situ_glu(both, None, beta, linear_beta)

    def weights_of(expert):
        if not scales:
            return gate_up[expert], down[expert]
        packed = (gate_up[expert], scales[0][expert]), (down[expert], scales[1][expert])
        return tuple(mxfp4.dequantize_mxfp4(*weight, x.dtype) for weight in packed)

    return grouped_experts(x, expert_ids, expert_weights, len(gate_up), weights_of, activation)


_OPERATOR = operators.define(
    "fused_experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down, Tensor[] scales, "
    "float? beta, float? linear_beta, bool elsewhere) -> Tensor",
    _run_operator,
    lambda x, *_: x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)),
)
