"""KDA kernels on a GPU beside flash-linear-attention's, and the bytes that must move.

    python benchmarks/kda.py [--only "forward T=8192"] [--no-peer] [--out benchmarks/results/kda.jsonl]

Random bfloat16 inputs, head size 128, float32 state, decays bounded at -5; gate, L2 norms and sigmoid inside the
kernels of both. Forward cases are timed without the convolution (both sides) and, under a name of their own, with it.
Medians of CUDA events; a decode step is replayed from a CUDA graph over enough states to leave the cache, and ours is
the whole step from convolution to gated norm while the peer's is the recurrence alone. The roofline is the bytes that
must move over the copy bandwidth measured in the same run. Every line written names the command, date, GPU and
versions.
"""

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

import torch
import triton

from kimi_k3.kernels import kda, kda_step, short_conv

PEER = "fla 0.6.0"
SIZE, WIDTH, BOUND = 128, 4, -5.0
RESULTS = Path(__file__).parent / "results" / "kda.jsonl"
FORWARD = [(8192, 96), (32768, 96), (1024, 96), (8192, 32), (131072, 16)]
TRAINING = [(8192, 96)]
DECODE = [1, 64, 256]


def median_ms(function) -> float:
    function()
    torch.cuda.synchronize()
    return triton.testing.do_bench(function, warmup=50, rep=200, return_mode="median")


def replay_ms(calls) -> float:
    """Milliseconds of one of the `calls`, captured in one CUDA graph after a warm-up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_ms(graph.replay) / len(calls)


def facts() -> dict[str, str]:
    """What every line of results says besides its case."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, triton {triton.__version__}",
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
    }


def record(file: Path, case: str, ours: float, whose: str, peer: float | None, least: float, extra: dict, shared: dict,
           digits=4):  # fmt: skip
    """Print a case and append its line to `file`; milliseconds, rounded to `digits`."""
    line = {"case": case, "ours_ms": round(ours, digits), "peer": whose, "peer_ms": peer and round(peer, digits),
            "roofline_ms": round(least, digits), **extra, **shared}  # fmt: skip
    print(
        f"{case:45s} ours {ours:8.4f}  peer {peer or float('nan'):8.4f}  least {least:7.4f}  {extra or ''}".rstrip(),
        flush=True,
    )
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def copy_bytes_per_ms() -> float:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source))


def inputs(length, heads, batch=1, grad=False):
    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)

    q, k, v, g = (random(batch, length, heads, SIZE) for _ in range(4))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": random(batch, length, heads),
        "A_log": random(heads, dtype=torch.float32),
        "dt_bias": random(heads * SIZE, dtype=torch.float32),
    }


def peer_kda(x):
    from fla.ops.kda import chunk_kda

    return chunk_kda(
        **x, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
        lower_bound=BOUND, output_final_state=True,
    )  # fmt: skip


def ours_kda(x):
    tokens = {name: tensor for name, tensor in x.items() if name not in ("A_log", "dt_bias")}
    return kda.fused_kda(**tokens, parameters=parameters(x))


def parameters(x):
    return kda.KDAParameters(x["A_log"], x["dt_bias"], BOUND)


def agreement(ours, peer):
    return ((ours.float() - peer.float()).norm() / peer.float().norm()).item()


def forward_cases(wanted, with_peer, bandwidth):
    for length, heads in filter(lambda case: wanted(f"forward T={case[0]} H={case[1]}"), FORWARD):
        x = inputs(length, heads)
        least = 5 * 2 * SIZE * length * heads / bandwidth
        extra = {}
        if with_peer:
            extra["agreement"] = agreement(ours_kda(x)[0], peer_kda(x)[0])
        with torch.no_grad():
            ours = median_ms(lambda x=x: ours_kda(x))
            peer = median_ms(lambda x=x: peer_kda(x)) if with_peer else None
        yield f"forward T={length} H={heads}", ours, peer, least, extra
        weight = torch.randn(heads * SIZE, 1, WIDTH, device="cuda")

        def convolved(convolve, x=x, weight=weight):
            return {**x, **{n: convolve(x[n].flatten(2), weight).view_as(x[n]) for n in "qkv"}}

        def ours_conv(u, weight):
            return short_conv.short_conv(u, weight)[0]

        def peer_conv(u, weight):
            from fla.modules.convolution import causal_conv1d

            return causal_conv1d(u, weight[:, 0].to(u.dtype), activation="silu", backend="triton")[0]

        if (length, heads) == FORWARD[0]:
            with torch.no_grad():
                ours = median_ms(lambda: ours_kda(convolved(ours_conv)))
                peer = median_ms(lambda: peer_kda(convolved(peer_conv))) if with_peer else None
            yield f"forward with convolution T={length} H={heads}", ours, peer, least, {}


def training_cases(wanted, with_peer, bandwidth):
    for length, heads in filter(lambda case: wanted(f"forward + backward T={case[0]} H={case[1]}"), TRAINING):
        x = inputs(length, heads, grad=True)
        grad = torch.randn_like(x["v"])

        def step(run, x=x, grad=grad):
            return torch.autograd.grad(run(x)[0], list(x.values()), grad)

        def extra_bytes(run, step=step):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(run)
            return torch.cuda.max_memory_allocated() - before

        ours, memory = median_ms(lambda step=step: step(ours_kda)), {"ours_extra_bytes": extra_bytes(ours_kda)}
        peer = None
        if with_peer:
            peer = median_ms(lambda step=step: step(peer_kda))
            memory["peer_extra_bytes"] = extra_bytes(peer_kda)
            pairs = zip(step(ours_kda), step(peer_kda), strict=True)
            memory["agreement"] = max(agreement(a, b) for a, b in pairs)
        # forward: four inputs and the output; backward: five of them again, and four gradients
        least = 14 * 2 * SIZE * length * heads / bandwidth
        yield f"forward + backward T={length} H={heads}", ours, peer, least, memory


def decode_cases(wanted, with_peer, bandwidth, heads=96):
    from contextlib import suppress

    for batch in filter(lambda batch: wanted(f"decode B={batch} H={heads}"), DECODE):
        sets = max(2, -(-(2**28) // (batch * heads * SIZE * SIZE * 4)))
        calls, peers = [], []
        for _ in range(sets):
            x = inputs(1, heads, batch)
            flat = {name: x[name].flatten(2) for name in ("q", "k", "v", "g")}
            state = torch.randn(batch, heads, SIZE, SIZE, device="cuda")
            tails = tuple(torch.randn_like(flat["q"]).expand(-1, WIDTH - 1, -1).contiguous() for _ in range(3))
            weights = tuple(torch.randn(heads * SIZE, 1, WIDTH, device="cuda") for _ in range(3))
            rest = {
                "beta": x["beta"],
                "gate": torch.randn_like(flat["v"]),
                "tails": tails,
                "conv_weights": weights,
                "parameters": parameters(x),
                "norm_weight": torch.ones(SIZE, device="cuda"),
                "state": state,
                "norm_eps": 1e-5,
                "in_place": True,
            }
            calls.append(lambda flat=flat, rest=rest: kda_step.kda_step(**flat, **rest))
            if with_peer:
                with suppress(ImportError):
                    from fla.ops.kda import fused_recurrent_kda

                    peers.append(
                        lambda x=x, state=state, run=fused_recurrent_kda: run(
                            **x,
                            initial_state=state,
                            output_final_state=True,
                            use_qk_l2norm_in_kernel=True,
                            use_gate_in_kernel=True,
                            use_beta_sigmoid_in_kernel=True,
                            lower_bound=BOUND,
                        )
                    )
        with torch.no_grad():
            ours = replay_ms(calls)
            peer = replay_ms(peers) if peers else None
        least = 2 * heads * SIZE * SIZE * 4 * batch / bandwidth
        yield f"decode B={batch} H={heads}", ours, peer, least, {"peer": f"{PEER}, recurrence alone"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--no-peer", action="store_true", help="time this package alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="lines are appended to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kda.py times GPU kernels, and torch sees no GPU here")
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_ms()
    shared = {**facts(), "copy_tb_per_s": round(bandwidth / 1e9, 2)}
    print(json.dumps(shared))
    args.out.parent.mkdir(exist_ok=True)
    for cases in (forward_cases, training_cases, decode_cases):
        for case, ours, peer, least, extra in cases(lambda name: args.only in name, not args.no_peer, bandwidth):
            record(args.out, case, ours, PEER, peer, least, extra, shared)


if __name__ == "__main__":
    main()
