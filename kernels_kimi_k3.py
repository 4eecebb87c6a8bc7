"""The door to `kernels/`: every file at the root takes the operations from here.

The import below is one that editors and type checkers follow. transformers' loader of remote code must not see it: its
regular expression would look for a file `kernels.py`, hence the line break in front of `import`. What the loader has to
copy along is listed here in the form that the expression reads, with a slash:

from .kernels/ahead import
from .kernels/attn_res import
from .kernels/attn_res_triton import
from .kernels/cross_entropy import
from .kernels/dispatch import
from .kernels/expert_rows_triton import
from .kernels/experts import
from .kernels/experts_few_gluon import
from .kernels/experts_gluon import
from .kernels/experts_triton import
from .kernels/gluon_tools import
from .kernels/kda import
from .kernels/kda_backward_triton import
from .kernels/kda_chunk_triton import
from .kernels/kda_context import
from .kernels/kda_step import
from .kernels/kda_step_triton import
from .kernels/mla_decode import
from .kernels/mla_decode_gluon import
from .kernels/mla_decode_triton import
from .kernels/mla_prefill import
from .kernels/mxfp4 import
from .kernels/norms import
from .kernels/norms_triton import
from .kernels/operators import
from .kernels/router import
from .kernels/router_triton import
from .kernels/short_conv import
from .kernels/short_conv_triton import
from .kernels/situ import
from .kernels/situ_triton import
from .kernels/triton_tools import
"""

# isort: off
from .kernels \
    import (
        ahead, attn_res, cross_entropy, dispatch, experts, kda, kda_step, mla_decode, mla_prefill, mxfp4, norms, router,
        short_conv, situ,
    )  # fmt: skip
# isort: on

__all__ = [
    "ahead",
    "attn_res",
    "cross_entropy",
    "dispatch",
    "experts",
    "kda",
    "kda_step",
    "mla_decode",
    "mla_prefill",
    "mxfp4",
    "norms",
    "router",
    "short_conv",
    "situ",
]
