"""No two sizes of the tiny models are alike, nor are two widths that are made of them."""

import pytest

import tiny

pytestmark = pytest.mark.one_release


def sizes(config):
    linear = config.linear_attn_config
    heads, nope, rope, values = (
        getattr(config, name) for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return {
        **{name: getattr(config, name) for name in tiny.SIZES},
        **{name: linear[name] for name in tiny.KDA_SIZES},
        "queries of a head": nope + rope,
        "keys and values of a head from the latent": nope + values,
        "queries": heads * (nope + rope),
        "keys and values": heads * (nope + values),
        "values": heads * values,
        "cached of a token": config.kv_lora_rank + rope,
        "KDA channels": linear["num_heads"] * linear["head_dim"],
        "width of the shared experts": config.num_shared_experts * config.moe_intermediate_size,
    }


@pytest.mark.parametrize("changes", [{}, tiny.PACKED], ids=["plain", "packed"])
def test_no_two_sizes_are_alike(changes):
    found = sizes(tiny.config("kmkm", **changes))
    assert len(set(found.values())) == len(found), sorted(found.items(), key=lambda item: item[1])
