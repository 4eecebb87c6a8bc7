"""What Attention Residuals cost in training memory: bytes counted at K3's shape and a small one, nothing timed.

    python benchmarks/activation_memory.py [--length 4096]

Every storage is counted from its making to its release, in a forward and backward of the backbone on one row. All of it
is on the meta device, where shapes are real and nothing is computed, so no GPU is needed; the code takes the path of a
GPU, with flash attention, and its Triton kernels get their arguments but are not launched. Each model is counted with
its blocks and with ordinary residuals. Weights are not counted, and their gradients are dropped when they are complete.
K3 has 32 routed experts here, of which a token takes 16 as ever: another number changes the router's logits alone.
"""

import argparse
import contextlib
import gc
import sys
import weakref
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kimi_k3

CHECKPOINTING = {"no": None, "yes": {"use_reentrant": False}, "re-entrant": {"use_reentrant": True}}


class Memory(TorchDispatchMode):
    """Bytes of the storages made inside: `live` now, `peak`, and the `largest` of them."""

    def __init__(self):
        super().__init__()
        self.held, self.live, self.peak, self.largest = set(), 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in inputs and key not in self.held:
                    weakref.finalize(storage, self._released, key, size)
                    self.held.add(key)
                    self.live += size
                    self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        return result

    def _released(self, key, size):
        self.held.remove(key)
        self.live -= size


@contextlib.contextmanager
def gpu_path():
    """Inside, tensors on the meta device are handled as those on an H200 would be, without launching a kernel."""
    from kimi_k3.kernels import attn_res_triton, dispatch, experts, triton_tools

    def flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
        assert attn_mask is None, "flash attention takes no mask"
        operator = torch.ops.aten._scaled_dot_product_flash_attention
        return operator(query, key, value, dropout_p, is_causal, scale=scale)[0]

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (dispatch, "triton_refusal", lambda *tensors, sizes=(): None),
            (triton_tools, "multiprocessors", lambda device: 132),
            (triton_tools, "shared_bytes", lambda device: 227 * 1024),
            (type(attn_res_triton.mix_kernel), "run", lambda kernel, *arguments, **options: None),
            (experts, "groups_on_device", lambda *tensors: True),
            (torch.nn.functional, "scaled_dot_product_attention", flash),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def count(config, length, checkpointing):
    """(bytes held when a training forward has ended, the most during it and its backward), bfloat16 on meta.

    Args:
        config: a `KimiK3TextConfig`.
        length: T of the one row.
        checkpointing: arguments of `gradient_checkpointing_enable`; None for none.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = kimi_k3.KimiK3Model(config).train()
    finally:
        torch.set_default_dtype(before)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ids = torch.empty(1, length, dtype=torch.long, device="meta")
    gc.collect()
    with Memory() as memory:
        out = model(input_ids=ids, use_cache=False).last_hidden_state
        gc.collect()
        held = memory.live
        out.backward(torch.empty_like(out))
    return held, memory.peak


def models():
    """name -> fields of a config with blocks."""
    sys.path.insert(0, str(Path(__file__).parent))
    from training import DENSE

    return {
        "K3": {**kimi_k3.KimiK3TextConfig().to_dict(), "num_experts": 32},
        "dense 0.5B, blocks of 4": {**DENSE, "attn_res_block_size": 4},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens (default: %(default)s)")
    options = parser.parse_args()
    if options.length < 1:
        parser.error(f"--length {options.length}: at least one token")
    print(
        "| model | checkpointing | held: blocks, ordinary | more | peak: blocks, ordinary | more |\n" + "|---" * 6 + "|"
    )
    for name, fields in models().items():
        for word, checkpointing in CHECKPOINTING.items():
            both = [{**fields, "attn_res_block_size": size} for size in (fields["attn_res_block_size"], None)]
            with gpu_path():
                found = [count(kimi_k3.KimiK3TextConfig.from_dict(x), options.length, checkpointing) for x in both]
            cells = [
                f"{blocks / 1e9:.2f}, {ordinary / 1e9:.2f} GB | {100 * (blocks / ordinary - 1):.1f} %"
                for blocks, ordinary in zip(*found, strict=True)
            ]
            print(f"| {name} | {word} | {cells[0]} | {cells[1]} |", flush=True)
    command = " ".join(["python benchmarks/activation_memory.py", *sys.argv[1:]])
    print(f"\nT={options.length}, torch {torch.__version__}, `{command}`")


if __name__ == "__main__":
    main()
