"""The mix over depth, the experts and MLA decoding on a GPU beside public code, and the bytes that must move.

    python benchmarks/layers.py [--only attnres] [--no-peer] [--out benchmarks/results/layers.jsonl]

Kimi K3's sizes in bfloat16: hidden width 7168 with the output norm fused; experts 3584 x 3072 with SiTU, 112 of them as
on one of eight devices, rows spread at random; latents 512 + 64 wide for 96 heads. The peer of the mix is
flash-linear-attention's, that of the experts torch's grouped matrix product on bfloat16 weights (both products, without
the activation between), that of MLA the torch path of this package. Medians of CUDA events; a short mix and MLA are
replayed from a CUDA graph. The roofline is the bytes that must move over the copy bandwidth measured in the same run,
and for experts and MLA at least the operations over the rate of a large matrix product.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from kda import copy_bytes_per_ms, facts, median_ms, record, replay_ms

from kimi_k3.kernels import attn_res, experts, mla_decode, mxfp4
from kimi_k3.layers_kimi_k3 import eager_attention_forward

RESULTS = Path(__file__).parent / "results" / "layers.jsonl"
WIDTH, SOURCES = 7168, 9
EXPERTS, LATENT, INNER = 112, 3584, 3072
HEADS, RANK, ROPE, SCALE = 96, 512, 64, 192**-0.5


def random(*shape, dtype=torch.bfloat16, factor=1.0):
    return torch.randn(*shape, device="cuda", dtype=dtype) * factor


def attnres_cases(with_peer, bandwidth, flops):
    weights = random(WIDTH, factor=0.1), random(1, WIDTH, factor=0.1), random(WIDTH)

    def ours(sources, norm, proj, out):
        return attn_res.attn_res_mix_norm(sources, norm, proj, 1e-5, out, 1e-5)[1]

    def peer(sources, norm, proj, out):
        from fla.ops.attnres import fused_attnres

        return fused_attnres(proj.view(-1), sources, norm, out, rms_eps=1e-5)

    for tokens in (8192, 64):
        sources = [random(1, tokens, WIDTH) for _ in range(SOURCES)]
        least = (SOURCES + 1) * 2 * WIDTH * tokens / bandwidth
        with torch.no_grad():
            if tokens == 64:
                sets = [[random(1, tokens, WIDTH) for _ in range(SOURCES)] for _ in range(16)]
                times = [
                    replay_ms([lambda s=s, run=run: run(s, *weights) for s in sets]) if run else None
                    for run in (ours, peer if with_peer else None)
                ]
            else:
                times = [
                    median_ms(lambda run=run, sources=sources: run(sources, *weights)) if run else None
                    for run in (ours, peer if with_peer else None)
                ]
        yield f"attnres forward N={SOURCES} T={tokens}", *times, "fla 0.6.0 fused_attnres", least
    sources = [random(1, 8192, WIDTH).requires_grad_() for _ in range(SOURCES)]
    leaves = [w.detach().requires_grad_() for w in weights]
    grad = random(1, 8192, WIDTH)

    def step(run):
        return torch.autograd.grad(run(sources, *leaves), [*sources, *leaves], grad)

    times = [median_ms(lambda run=run: step(run)) if run else None for run in (ours, peer if with_peer else None)]
    least = (3 * SOURCES + 3) * 2 * WIDTH * 8192 / bandwidth
    yield f"attnres forward + backward N={SOURCES} T=8192", *times, "fla 0.6.0 fused_attnres", least


def expert_cases(with_peer, bandwidth, flops):
    shapes = ((EXPERTS, 2 * INNER, LATENT), (EXPERTS, LATENT, INNER))
    packed = [torch.randint(0, 256, (*s[:-1], s[-1] // 2), device="cuda", dtype=torch.uint8) for s in shapes]
    scales = tuple(torch.randint(115, 121, (*s[:-1], s[-1] // 32), device="cuda", dtype=torch.uint8) for s in shapes)
    wide = None
    for rows in (32, 1024, 16384):
        x, ids = random(rows, LATENT), torch.randint(0, EXPERTS, (rows, 1), device="cuda")
        routing = torch.rand(rows, 1, device="cuda")
        hit = len(ids.unique())
        moved = hit * sum(s[1] * s[2] * (0.5 + 1 / 32) for s in shapes)
        least = max(moved / bandwidth, 2 * rows * sum(s[1] * s[2] for s in shapes) / flops)
        with torch.no_grad():
            measure = median_ms if rows > 1024 else lambda call: replay_ms([call] * 4)
            ours = measure(lambda: experts.fused_experts(x, ids, routing, *packed, scales, 3.0, 2.0))  # noqa: B023
            peer = None
            if with_peer:
                if wide is None:
                    wide = [mxfp4.dequantize_mxfp4(p, s).transpose(1, 2) for p, s in zip(packed, scales, strict=True)]
                sorted_ids = ids.flatten().sort().values
                ends = torch.searchsorted(sorted_ids, torch.arange(1, EXPERTS + 1, device="cuda")).int()
                inner = random(rows, INNER)

                def grouped(x=x, inner=inner, ends=ends, wide=wide):
                    torch._grouped_mm(x, wide[0], offs=ends)
                    torch._grouped_mm(inner, wide[1], offs=ends)

                peer = measure(grouped)
        yield f"experts mxfp4 E={EXPERTS} rows={rows}", ours, peer, "torch grouped_mm bf16", least


def mla_cases(with_peer, bandwidth, flops):
    """One step over the latents of all earlier tokens, from the absorbed query to the sum of latents."""
    module = torch.nn.Module().eval()
    for batch, keys in ((1, 131072), (16, 1024)):
        query, rope = random(batch, 1, HEADS, RANK), random(batch, 1, HEADS, ROPE)
        caches = [random(batch, keys, RANK + ROPE) for _ in range(max(2, 2**18 // (batch * keys)))]

        def ours(latents, query=query, rope=rope):
            return mla_decode.mla_decode(query, rope, latents, SCALE)

        def peer(latents, query=query, rope=rope):
            rows, latents = torch.cat([query, rope], dim=-1), latents[:, None]
            return eager_attention_forward(module, rows, latents, latents[..., :RANK], None, SCALE)[0]

        least = max(batch * keys * (RANK + ROPE) * 2 / bandwidth, 2 * batch * keys * HEADS * (2 * RANK + ROPE) / flops)
        with torch.no_grad():
            times = [
                replay_ms([lambda c=c, run=run: run(c) for c in caches]) if run else None
                for run in (ours, peer if with_peer else None)
            ]
        yield f"mla decode H={HEADS} B={batch} T={keys}", *times, "torch path", least


def flops_per_ms() -> float:
    a, b = random(8192, 8192), random(8192, 8192)
    return 2 * 8192**3 / median_ms(lambda: a @ b)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["attnres", "experts", "mla"])
    parser.add_argument("--no-peer", action="store_true", help="time this package alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="lines are appended to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/layers.py times GPU kernels, and torch sees no GPU here")
    torch.manual_seed(0)
    bandwidth, flops = copy_bytes_per_ms(), flops_per_ms()
    shared = {**facts(), "copy_tb_per_s": round(bandwidth / 1e9, 2), "matmul_tflop_per_s": round(flops / 1e9)}
    print(json.dumps(shared))
    args.out.parent.mkdir(exist_ok=True)
    for name, cases in {"attnres": attnres_cases, "experts": expert_cases, "mla": mla_cases}.items():
        if args.only in (None, name):
            for case, ours, peer, whose, least in cases(not args.no_peer, bandwidth, flops):
                record(args.out, case, ours, whose, peer, least, {}, shared)


if __name__ == "__main__":
    main()
