"""Every Triton kernel compiles for the GPUs that we claim, without a GPU: Triton lowers for a named target anywhere."""

import os
import subprocess
import sys

import pytest

from kimi_k3.kernels import mla_decode

pytest.importorskip("triton")

pytestmark = pytest.mark.one_release


# In a process of its own, where Triton is not in its interpreter.
COMPILE = """
import os
import sys
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kimi_k3.kernels import (
    attn_res_triton, expert_rows_triton, experts_triton, kda_backward_triton, kda_chunk_triton, kda_step_triton,
    mla_decode_triton, norms_triton, router_triton, short_conv_triton, situ_triton,
)

for target in sys.argv[1:]:  # a child for each, which need not import again
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0, target
else:
    sys.exit()
backend, architecture, warp = target.split("-")
warp = int(warp)
experts_triton.tools.USE_PTX = backend == "cuda"  # as there, whatever this torch is built for
# Types of the arguments that are not *bf16, the type of most.
FLOAT32 = dict.fromkeys(
    "A_log dt_bias decay decay_out dA_log ddt_bias state new_state norm_weight h0 ht dht "
    "dh0 transition offset dweight scores inverse_rms d_query d_out_weight routing y part log2_sum".split(), "*fp32")
NUMBERS = dict.fromkeys("scale lower_bound eps norm_eps out_eps linear_beta lowest".split(), "fp32")
COUNTS = dict.fromkeys("T P tokens segment_steps rows keys splits count".split(), "i32")
PLANS = dict.fromkeys("order tiles".split(), "*i32") | dict.fromkeys("expert_ids lengths".split(), "*i64")
STRIDES = "stride_", "batch_", "head_"
BUNDLES = dict.fromkeys("tails new_tails".split(), ("*bf16",) * 3) | dict(conv_weights=("*fp32",) * 3)
BUNDLES |= dict.fromkeys("query_strides rope_strides out_strides".split(), ("i32",) * 3)
BUNDLES |= dict.fromkeys("latents_strides mask_strides".split(), ("i32",) * 2)
BUNDLES |= dict.fromkeys("batch_strides token_strides".split(), ("i32",) * 6)
TYPES = {**FLOAT32, **NUMBERS, **COUNTS, **PLANS, **BUNDLES}
COMMON = dict(
    H=4, K=128, V=128, BK=128, BV=128, C=32, BS=32, DT=tl.bfloat16, IT=tl.float16, W=4, BT=32, BP=128, VARLEN=False,
    cu_seqlens=None, block_offsets=None, block_seq=None, sequence_of=None, HAS_TAIL=True, PTX=backend == "cuda",
    BOUNDED=True, NARROW=True, FOR_BACKWARD=False, inverse_out=None, lower_out=None, HAS_H0=True, HAS_DHT=True, EVERY=0,
    SEGMENTS=1, STEPS=4, STAGES=1 if backend == "hip" else 3, checkpoints=None, checkpoint_offsets=None,
    ONE_TOKEN=True, IN_PLACE=True, BH=2, N=9, D=7168, BD=8192, NORM=True, KEEP=True, HAS_MIXED=True, HAS_OUT=True,
    slots=None,
)
EXPERTS = dict(D=3584, M=3072, X=3584, WIDTH=3072, TOP_K=16, SITU=True, CAPPED=True, P=64, BM=16)
RANKS = dict.fromkeys("counts ranks".split(), "*i32") | dict(pairs="i32")
BYTES = dict(weight="*i32", scale="*u8", beta="fp32")
# Kimi K3's latents, with the tiles that a GPU of this kind gets; a mask a row, and one a token of a draft.
SHARED = 232448 if architecture == "90" else 65536 if backend == "hip" else 101376
BM, BN, MLA_WARPS, MLA_STAGES = mla_decode_triton.tiles(torch.bfloat16, 512, SHARED)
MLA = dict(H=96, R=512, P=64, BR=512, BP=64, BM=BM, BN=BN, CAUSAL=True, STAGES=MLA_STAGES, BRANCH=BM == 64,
           PAGE=64, table=None, ONE_MASK=True, PRECISION="ieee")
MERGE = dict(H=96, R=512, BC=128, BS=64)
NORMS = dict(D=7168, BD=8192, BR=1)
GLU, BETA = dict(M=33792, BLOCK=1024, SITU=True, CAPPED=True), dict(beta="fp32")
CONVOLUTIONS = dict.fromkeys("xs tails ys dys dxs".split(), ("*bf16",) * 3) | dict(weights=("*fp32",) * 3)
ROUTER = dict.fromkeys("logits bias weights d_weights d_logits".split(), "*fp32")
ROUTER |= dict(chosen="*i64", scaling="fp32", stride="i32")
CHOICE = dict(E=896, BE=1024, K=16, BK=16, SOFTMAX=False, RENORMALIZE=True)
COLUMNS, ROWS_WARPS = expert_rows_triton.combine_blocks(3584)
COMBINE = dict(D=3584, BD=COLUMNS, K=16)
COLUMNS, BLOCK, BACKWARD_WARPS = expert_rows_triton.backward_blocks(3584, 16, 2)
COMBINE_BACKWARD = dict(D=3584, BD=COLUMNS, K=16, BK=BLOCK)
ROWS = dict.fromkeys("weights grad d_weights out".split(), "*fp32") | dict(rows="*bf16", inverse="*i64")
CASES = [
    (kda_chunk_triton.prepare_kernel, 2, dict(residual=None), {}),
    (kda_chunk_triton.prepare_kernel, 4, dict(residual=None, BOUNDED=False, NARROW=False), {}),
    (kda_chunk_triton.scan_kernel, 4, dict(BV=64, states=None, updated=None, residual=None), {}),
    (kda_chunk_triton.prepare_kernel, 2, dict(FOR_BACKWARD=True, inverse_out=..., lower_out=...), {}),
    (kda_chunk_triton.scan_kernel, 4, dict(BV=64, FOR_BACKWARD=True), {}),
    (kda_chunk_triton.transition_kernel, 4, dict(BV=64), {}),
    (kda_backward_triton.scan_backward_kernel, 4, dict(BV=64), {}),
    (kda_backward_triton.chunk_backward_kernel, 4, {}, {}),
    (kda_backward_triton.chunk_backward_kernel, 8, dict(BOUNDED=False, NARROW=False), {}),
    (kda_step_triton.step_kernel, 4, {}, {}),
    (kda_step_triton.keys_kernel, 4, {}, dict(keys="*fp32", batch_strides=("i32",) * 4)),
    (kda_step_triton.state_kernel, 4, dict(BS=64), dict(keys="*fp32")),
    (kda_step_triton.norm_kernel, 4, {}, {}),
    # of rows and pages of larger buffers
    (kda_step_triton.step_kernel, 4, dict(slots=...), dict(slots="*i64")),
    (kda_step_triton.keys_kernel, 4, dict(slots=...), dict(keys="*fp32", batch_strides=("i32",) * 4, slots="*i64")),
    (kda_step_triton.state_kernel, 4, dict(BS=64, slots=...), dict(keys="*fp32", slots="*i64")),
    (mla_decode_triton.decode_kernel, MLA_WARPS, dict(MLA, CAUSAL=False, table=..., mask=None), dict(table="*i32")),
    (short_conv_triton.conv_kernel, 4, dict(N=3), CONVOLUTIONS),
    (short_conv_triton.conv_backward_kernel, 4, dict(N=3, BP=32), dict(CONVOLUTIONS, dweights="*fp32")),
    (attn_res_triton.mix_kernel, 8, {}, {}),
    (attn_res_triton.mix_backward_kernel, 8, {}, {}),
    (expert_rows_triton.combine_kernel, ROWS_WARPS, COMBINE, ROWS),
    (expert_rows_triton.combine_kernel, ROWS_WARPS, dict(COMBINE, weights=None), dict(ROWS, out="*bf16")),
    (expert_rows_triton.combine_backward_kernel, BACKWARD_WARPS, COMBINE_BACKWARD, ROWS),
    (experts_triton.plan_kernel, 1, EXPERTS, RANKS),
    (experts_triton.order_kernel, 4, dict(D=3584, X=3584, BM=16, BN=256), {}),
    (experts_triton.rank_kernel, 4, dict(P=1024), RANKS),
    (experts_triton.tiles_kernel, 4, dict(EXPERTS=896, E=1024, BM=64), RANKS),
    (experts_triton.place_kernel, 4, dict(P=1024), RANKS),
    (mla_decode_triton.decode_kernel, MLA_WARPS, MLA, dict(mask="*i1")),
    (mla_decode_triton.decode_kernel, MLA_WARPS, dict(MLA, ONE_MASK=False, CAUSAL=False), {}),
    (norms_triton.norm_kernel, 4, dict(NORMS, BR=16, D=128, BD=128, GATED=True), {}),
    (norms_triton.norm_backward_kernel, 8, dict(NORMS, GATED=False, gate=None, d_gate=None), dict(d_weight="*fp32")),
    (router_triton.choose_kernel, 1, CHOICE, ROUTER),
    (router_triton.choose_backward_kernel, 1, CHOICE, ROUTER),
    (router_triton.choose_kernel, 1, CHOICE | dict(SOFTMAX=True), ROUTER),
    (router_triton.choose_backward_kernel, 1, CHOICE | dict(SOFTMAX=True), ROUTER),
    (situ_triton.glu_kernel, 4, GLU, BETA),
    (situ_triton.glu_backward_kernel, 4, GLU, BETA),
    (mla_decode_triton.merge_kernel, 4, MERGE, {}),
]
# The tiles of the experts that a GPU of this kind gets.
for BM, PARTS, PACKED, STORED in (
    (16, 1, False, torch.bfloat16), (128, 1, False, torch.bfloat16), (128, 1, False, torch.float32),
    (64, 1, True, torch.int32), (64, 3, True, torch.int32),
):
    if PACKED:
        KERNELS = experts_triton.packed_gate_up_kernel, experts_triton.packed_down_kernel
    else:
        KERNELS = experts_triton.gate_up_kernel, experts_triton.down_kernel
    for DOWN in (False, True):
        BN, BK, WARPS, STEPS = experts_triton.block_sizes(BM, PARTS, PACKED, DOWN, torch.bfloat16, STORED, SHARED)
        OPTIONS = dict(EXPERTS, BM=BM, PARTS=PARTS, BN=BN, BK=BK, BW=BK, STAGES=STEPS)
        FLOATS = dict(beta="fp32", weight="*fp32" if STORED == torch.float32 else "*bf16")
        CASES.append((KERNELS[DOWN], WARPS, OPTIONS, BYTES if PACKED else FLOATS))
# Every case for sm_90; for the others every kernel whose tiles depend on the GPU's memory, in another of its cases for
# each of them, and of the rest either one or the other.
OF_KERNEL = {}
for case in CASES:
    OF_KERNEL.setdefault(id(case[0]), []).append(case)
TILED = (mla_decode_triton.decode_kernel, experts_triton.gate_up_kernel, experts_triton.down_kernel,
         experts_triton.packed_gate_up_kernel, experts_triton.packed_down_kernel)
if architecture != "90":
    CASES = [cases[(number + (backend == "hip")) % len(cases)] for number, cases in enumerate(OF_KERNEL.values())
             if cases[0][0] in TILED or number % 2 == (backend == "hip")]
# At full size these take five to ten seconds, and a third of the shared memory that there is: once is enough.
SLOW = kda_chunk_triton.prepare_kernel, kda_backward_triton.chunk_backward_kernel
SMALL = dict(K=64, V=64, BK=64, BV=64)
for case in CASES:
    kernel, warps, options, types = case
    if kernel in SLOW and (architecture != "90" or case is not OF_KERNEL[id(kernel)][0]):
        options = options | SMALL
    constants = {name: value for name, value in {**COMMON, **options}.items()
                 if name in kernel.arg_names and value is not ...}
    signature = {}
    for name in kernel.arg_names:
        kind = {**TYPES, **types}.get(name, "*bf16")
        if name.startswith(STRIDES) and isinstance(kind, str):
            kind = "i32"
        if name == "sources":
            kind = ("*bf16",) * constants["N"]
        signature[name] = "constexpr" if name in constants else kind
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {}
    for i, name in enumerate(kernel.arg_names):
        bundle = isinstance(signature[name], tuple)
        for j, kind in enumerate(signature[name] if bundle else [signature[name]]):
            if kind.startswith("*") or name.startswith(STRIDES) or name.endswith("_strides"):
                aligned[(i, j) if bundle else (i,)] = [["tt.divisibility", 16]]
    target = GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, warp)
    is_mla = kernel is mla_decode_triton.decode_kernel
    compiled = triton.compile(ASTSource(kernel, signature, places, aligned), target=target,
                              options={"num_warps": warps, "num_stages": MLA_STAGES if is_mla else 1})
    print(kernel.__name__, compiled.metadata.shared)
    # What a program may have there, and on sm_80 what the smallest GPUs of its instruction set give it.
    assert compiled.metadata.shared <= SHARED, kernel.__name__
"""


def test_every_kernel_compiles():
    """Fault 26: no kernel calls what this Triton does not know; CI runs the newest, a GPU machine its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    targets = {"cuda-80-32": 19, "cuda-90-32": 50, "hip-gfx942-64": 18}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE, *targets], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == sum(targets.values())


GLUON = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from kimi_k3.kernels import mla_decode_gluon as module

kernel, layout = module.decode_kernel, repr(module.SHARED)
for lengths in ("constexpr", "*i64"):
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("part", "log2_sum"), "*fp32")
    signature |= {"query": "*bf16", "query_rope": "*bf16", "lengths": lengths, "scale": "fp32"}
    signature |= {"latents": f"tensordesc<bf16[64, 256],{layout}>", "rope": f"tensordesc<bf16[64, 64],{layout}>"}
    constants = {(kernel.arg_names.index("lengths"),): None} if lengths == "constexpr" else {}
    compiled = triton.compile(GluonASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32),
                              options={"num_warps": 4})
    assert compiled.metadata.shared <= 232448
    print("compiled")

from kimi_k3.kernels import experts_gluon as module

kernel, layout = module.experts_kernel, repr(module.SHARED)
module.tools.USE_PTX = True
for down in (False, True):
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("beta", "linear_beta", "routing"), "fp32")
    signature |= {"weight": "*i64", "out": "*fp32" if down else "*bf16", "routing": "*fp32"}
    signature |= dict.fromkeys(("tiles", "order", "scale"), "*i32")
    for name, rows in (("wide_x", 128), ("narrow_x", 64), ("narrowest_x", 32)):
        signature[name] = f"tensordesc<bf16[{rows}, 64],{layout}>"
    options = dict(COLUMNS=3072, N=3584, BLOCKS=19) if down else dict(COLUMNS=3584, N=3072, BLOCKS=32)
    options |= dict(DOWN=down, SITU=True, CAPPED=True)
    signature |= dict.fromkeys(options, "constexpr")
    constants = {(kernel.arg_names.index(name),): value for name, value in options.items()}
    compiled = triton.compile(GluonASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32),
                              options={"num_warps": 4})
    assert compiled.metadata.shared <= 232448
    print("compiled")

from kimi_k3.kernels import experts_few_gluon as module

kernel, half, step = module.experts_kernel, module.HALF.value, module.STEP.value
words, scales = repr(module.WORDS_SHARED.value), repr(module.SCALES_SHARED.value)
for down in (False, True):
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(("tiles", "order"), "*i32")
    signature |= {"beta": "fp32", "linear_beta": "fp32", "routing": "*fp32", "out": "*fp32" if down else "*bf16"}
    signature["activations"] = f"tensordesc<i32[{module.PAIRS.value}, {step // 2}],{words}>"
    signature["weight"] = f"tensordesc<i32[{half}, {step // 8}],{words}>"
    signature["scale"] = f"tensordesc<u8[{half}, {step // 32}],{scales}>"
    options = dict(COLUMNS=3072, N=3584, BLOCKS=56) if down else dict(COLUMNS=3584, N=3072, BLOCKS=96)
    options |= dict(DOWN=down, SITU=True, CAPPED=True)
    signature |= dict.fromkeys(options, "constexpr")
    constants = {(kernel.arg_names.index(name),): value for name, value in options.items()}
    compiled = triton.compile(GluonASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32),
                              options={"num_warps": module.WARPS, "maxnreg": module.REGISTERS})
    assert (compiled.metadata.shared + 1024) * module.PROGRAMS <= 233472  # each has a KB of the driver's
    print("compiled")
"""


def test_the_kernels_of_groups_of_warps_compile():
    if mla_decode._gluon() is None:
        pytest.skip("needs Gluon for Hopper")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", "-c", GLUON], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["compiled"] * 6
