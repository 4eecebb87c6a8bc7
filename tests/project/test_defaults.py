"""What a call does about an argument that is left out: the values that the docs tell and that users build on."""

import inspect

import pytest

from kimi_k3 import HybridCache, KimiK3ForCausalLM, KimiK3Model
from kimi_k3.conversion.run import convert
from kimi_k3.conversion.verify import verify
from kimi_k3.costs import formulas, report, trace
from kimi_k3.costs.simulation import Simulation
from kimi_k3.kernels import cross_entropy, router
from kimi_k3.serving.prefix_cache import PrefixCache
from kimi_k3.speculative.decoding import speculative_generate
from kimi_k3.training import balancing, lora, muon, qat

pytestmark = pytest.mark.one_release

DEFAULTS = {
    HybridCache: {"max_length": None, "offload": False},
    KimiK3Model: {"dequantize": False},
    KimiK3ForCausalLM: {"dequantize": False},
    KimiK3ForCausalLM.warmup: {"batch_sizes": (1,), "prompt_lengths": (1024,), "training": False, "progress": True},
    PrefixCache: {
        "host_bytes": 0, "folder": None, "disk_bytes": 0, "block": 512, "every": 32768, "write_through": True,
        "chunk": None, "admission": "first",
    },
    convert: {
        "target": None, "workers": None, "overwrite": False, "allow_pickle": False, "drop_foreign": False,
        "progress": False,
    },
    verify: {"tolerance": 0.0, "text_only": False, "logits": True, "seed": 0, "progress": False},
    formulas.text_cost: {"name": "", "dtype_bytes": 2},
    formulas.all_to_all_bytes: {"element_bytes": 2},
    formulas.communication_ratio: {"element_bytes": 2},
    report.cost_of: {"dtype_bytes": 2},
    trace.generate: {"seed": 0},
    Simulation: {"host_bytes": 0, "ssd_bytes": 0, "write_through": False, "seed": 0},
    cross_entropy.chunked_cross_entropy: {"chunk": 1024},
    router.choose_experts: {"groups": 1, "kept_groups": 1, "activation": "sigmoid"},
    speculative_generate: {"temperature": 0.0, "eos_token_id": None, "generator": None},
    balancing.QuantileBalancer: {"ema": 0.0},
    balancing.QuantileBalancerCallback: {"ema": 0.0},
    lora.lora_targets: {
        "attention": None, "dense": None, "experts": None, "shared": None, "latent": None, "router": False,
        "vision": False,
    },
    muon.muon_groups: {"weight_decay": 0.1},
    muon.PerHeadMuon: {"lr": 1e-3, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-8, "ns_steps": 5},
    muon.QKClip: {"threshold": 100.0},
    qat.start_qat: {"activations": True},
}  # fmt: skip


@pytest.mark.parametrize("called", DEFAULTS, ids=lambda called: called.__qualname__)
def test_arguments_that_are_left_out(called):
    parameters = inspect.signature(called).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == DEFAULTS[called]
