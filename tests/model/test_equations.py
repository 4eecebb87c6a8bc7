"""Every kind of layer against its equations, one token, head and expert at a time, in float64.

Nothing here calls a function of the package for its result, no two sizes of the model are alike, and inputs are
so small that the epsilons of the norms show.
"""

import math

import pytest
import torch

import tiny
from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM, layers_kimi_k3

pytestmark = pytest.mark.one_release

TOKENS = 7


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(layers="km", **changes):
    """A model whose every parameter is random and matters; norms and gates do not start at one and zero."""
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(tiny.config(layers, rms_norm_eps=3e-5, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.5 if parameter.dim() > 1 else 0.3)
            if "norm" in name:
                parameter.add_(1)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(std=0.3)
    return model


def normed(x, weight, eps):
    return x / math.sqrt(sum(value * value for value in x.tolist()) / len(x) + eps) * weight


def softmax(scores):
    largest = max(scores)
    powers = [math.exp(score - largest) for score in scores]
    return [power / sum(powers) for power in powers]


def gated(config, gate, up):
    """SiTU-GLU with both caps, SwiGLU without."""
    if config.hidden_act == "silu":
        return gate * torch.sigmoid(gate) * up
    beta, linear = config.activation_situ_beta, config.activation_situ_linear_beta
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear * torch.tanh(up / linear)


def latent_attention(layer, config, xs):
    """Keys and values of every head from the normed latent; the latent norms have an epsilon of 1e-6."""
    heads, nope, rope, wide = 6, 12, 14, 10
    results = []
    latents = [layer.kv_a_proj_with_mqa.weight @ x for x in xs]
    kv = [layer.kv_b_proj.weight @ normed(latent[:20], layer.kv_a_layernorm.weight, 1e-6) for latent in latents]
    for t, x in enumerate(xs):
        if config.q_lora_rank is None:
            query = layer.q_proj.weight @ x
        else:
            query = layer.q_b_proj.weight @ normed(layer.q_a_proj.weight @ x, layer.q_a_layernorm.weight, 1e-6)
        out = []
        for h in range(heads):
            q = query[h * (nope + rope) : (h + 1) * (nope + rope)]
            keys = [kv[s][h * (nope + wide) :][:nope] for s in range(t + 1)]
            values = [kv[s][h * (nope + wide) + nope :][:wide] for s in range(t + 1)]
            scores = [
                ((q[:nope] @ keys[s] + q[nope:] @ latents[s][20:]) / math.sqrt(nope + rope)).item()
                for s in range(t + 1)
            ]
            out.append(sum(weight * value for weight, value in zip(softmax(scores), values, strict=True)))
        out = torch.cat(out)
        if config.mla_use_output_gate:
            out = out * torch.sigmoid(layer.g_proj.weight @ x)
        results.append(layer.o_proj.weight @ out)
    return torch.stack(results)


@pytest.mark.parametrize("family", ["k3", "kimi-linear"])
@torch.no_grad()
def test_latent_attention(family):
    model = build("m", **(tiny.KIMI_LINEAR if family == "kimi-linear" else {}))
    layer = model.model.layers[0].self_attn
    for size in (1.0, 1e-3):
        xs = torch.randn(TOKENS, 56) * size
        got, weights = layer(xs[None])
        assert weights is None
        torch.testing.assert_close(got[0], latent_attention(layer, model.config, xs), rtol=1e-9, atol=1e-12 * size)


def test_the_form_of_attention_with_fewer_multiplications():
    """A pair of query and key takes 2 x 20 in latents and 12 + 10 expanded, which takes 20 x (12 + 10) a key."""
    attention = build("m").model.layers[0].self_attn
    assert (attention.kv_rank, attention.nope_dim, attention.v_dim) == (20, 12, 10)
    assert attention._absorbing_is_cheaper(24, 100)  # 24 x 18 < 440
    assert not attention._absorbing_is_cheaper(25, 100)
    assert not attention._absorbing_is_cheaper(24, 24)  # without a cache nothing is expanded twice
    most = layers_kimi_k3.MOST_SCORES
    queries = torch.empty(2, 4, 8, 1, device="meta")
    assert not attention._scores_are_many(queries, torch.empty(2, most // 64, 1, device="meta"))
    assert attention._scores_are_many(queries, torch.empty(2, most // 64 + 1, 1, device="meta"))
    assert not attention._scores_are_many(queries[:, :, :1], torch.empty(2, most, 1, device="meta"))
    attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj)  # whose call is more than a product
    assert not attention._absorbing_is_cheaper(1, 100)


@torch.no_grad()
def test_a_prompt_is_expanded_and_a_step_absorbed(monkeypatch):
    model, taken = build("m"), []
    for name in ("_expanded", "_absorbed"):
        form = getattr(layers_kimi_k3.KimiK3MLAttention, name)
        spy = lambda self, *args, name=name, form=form, **kw: taken.append(name) or form(self, *args, **kw)  # noqa: E731
        monkeypatch.setattr(layers_kimi_k3.KimiK3MLAttention, name, spy)
    ids, cache = torch.arange(3, 43)[None], HybridCache(model.config)
    for start, end in ((0, 30), (30, 31), (31, 40)):
        model(ids[:, start:end], **{CACHE_ARGUMENT: cache})
    assert taken == ["_expanded", "_absorbed", "_absorbed"]


def delta_attention(layer, config, xs):
    """The recurrence of the Kimi K3 report, equation 1, with either gate."""
    heads, size, width = 5, 8, 4
    bound, softplus = config.gate_lower_bound, torch.nn.functional.softplus

    def convolved(name, t):
        taps, total = getattr(layer, f"{name}_conv1d").weight, 0
        for j in range(width):
            source = t - (width - 1) + j
            if source >= 0:
                total = total + taps[:, 0, j] * (getattr(layer, f"{name}_proj").weight @ xs[source])
        return total * torch.sigmoid(total)

    states, results = [torch.zeros(size, size) for _ in range(heads)], []
    for t, x in enumerate(xs):
        q, k, v = (convolved(name, t) for name in "qkv")
        decay = layer.f_b_proj.weight @ (layer.f_a_proj.weight @ x) + layer.dt_bias
        beta = torch.sigmoid(layer.b_proj.weight @ x)
        if layer.full_rank_gate:
            gate = layer.g_proj.weight @ x
        else:
            gate = layer.g_b_proj.weight @ (layer.g_a_proj.weight @ x)
        out = []
        for h in range(heads):
            at = slice(h * size, (h + 1) * size)
            rate = torch.exp(layer.A_log[h])
            log_decay = -rate * softplus(decay[at]) if bound is None else bound * torch.sigmoid(rate * decay[at])
            key, query = (u[at] / torch.sqrt((u[at] ** 2).sum() + 1e-6) for u in (k, q))
            state = torch.exp(log_decay)[:, None] * states[h]
            states[h] = state + beta[h] * torch.outer(key, v[at] - state.T @ key)
            read = states[h].T @ (query / math.sqrt(size))
            out.append(normed(read, layer.o_norm.weight, config.rms_norm_eps) * torch.sigmoid(gate[at]))
        results.append(layer.o_proj.weight @ torch.cat(out))
    return torch.stack(results)


@pytest.mark.parametrize("family", ["k3", "kimi-linear"])
@torch.no_grad()
def test_delta_attention(family):
    model = build("k", **(tiny.KIMI_LINEAR if family == "kimi-linear" else {}))
    layer = model.model.layers[0].self_attn
    for size in (1.0, 1e-2):
        xs = torch.randn(TOKENS, 56) * size
        torch.testing.assert_close(layer(xs[None])[0], delta_attention(layer, model.config, xs), rtol=1e-8, atol=1e-12)


def chosen_experts(scores, bias, config):
    """(numbers, weights): of the groups whose two best score highest together, then of their experts."""
    count, groups, kept = config.num_experts, config.num_expert_group, config.topk_group
    choice = [score + offset for score, offset in zip(scores, bias.tolist(), strict=True)]
    size = count // groups
    of_group = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    eligible = sorted(range(groups), key=lambda g: of_group[g])[-kept:]
    experts = sorted((e for e in range(count) if e // size in eligible), key=lambda e: choice[e])
    experts = experts[-config.num_experts_per_token :]
    total = sum(scores[e] for e in experts) if config.moe_renormalize else 1
    return experts, [scores[e] / total * config.routed_scaling_factor for e in experts]


def experts_and_shared(block, config, xs):
    results, size, width = [], config.routed_expert_hidden_size, config.moe_intermediate_size
    for x in xs:
        logits = block.gate.weight @ x
        scores = softmax(logits.tolist())
        if config.moe_router_activation_func == "sigmoid":
            scores = torch.sigmoid(logits).tolist()
        latent = x if size is None else block.routed_expert_down_proj.weight @ x
        routed = torch.zeros_like(latent)
        for e, weight in zip(*chosen_experts(scores, block.gate.e_score_correction_bias, config), strict=True):
            gate_up = block.experts.gate_up_proj[e] @ latent
            hidden = gated(config, gate_up[:width], gate_up[width:])
            routed = routed + weight * (block.experts.down_proj[e] @ hidden)
        if config.latent_moe_use_norm:
            routed = normed(routed, block.routed_expert_norm.weight, config.rms_norm_eps)
        if size is not None:
            routed = block.routed_expert_up_proj.weight @ routed
        shared = block.shared_experts
        hidden = gated(config, shared.gate_proj.weight @ x, shared.up_proj.weight @ x)
        results.append(routed + shared.down_proj.weight @ hidden)
    return torch.stack(results)


ROUTING = {
    "k3": {},
    "kimi-linear": tiny.KIMI_LINEAR | {"routed_scaling_factor": 2.5},
    "without the latent norm": {"latent_moe_use_norm": False},
    "two groups of three": {"num_expert_group": 3, "topk_group": 2},
    "one group of three": {"num_expert_group": 3, "topk_group": 1},
    "weights as they are": {"moe_renormalize": False, "routed_scaling_factor": 0.7},
    "softmax": {"moe_router_activation_func": "softmax", "routed_scaling_factor": 2.5},
    "softmax, weights as they are, groups": {
        "moe_router_activation_func": "softmax",
        "moe_renormalize": False,
        "num_expert_group": 3,
        "topk_group": 2,
    },
}


@pytest.mark.parametrize("routing", ROUTING)
@torch.no_grad()
def test_experts(routing):
    """Grouped choice too: which groups are kept, by their two best experts, decides for most of the tokens."""
    model = build("kk", **ROUTING[routing])
    block = model.model.layers[1].block_sparse_moe
    for size in (1.0, 1e-3):
        xs = torch.randn(4 * TOKENS, 56) * size
        got, logits, _ = block(xs[None])
        torch.testing.assert_close(got[0], experts_and_shared(block, model.config, xs), rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(logits, xs @ block.gate.weight.T)


def mixed(sources, norm, query, eps):
    """softmax over depth of <normed source, query>, of the sources as they are."""
    weights = softmax([(normed(source, norm.weight, eps) @ query.weight[0]).item() for source in sources])
    return sum(weight * source for weight, source in zip(weights, sources, strict=True))


def whole_model(model, ids):
    """Hidden states [T, hidden] of a model, layer by layer from the functions above."""
    config, text = model.config, model.model
    partial, blocks = text.embed_tokens.weight[ids], []
    depth, eps = config.attn_res_block_size, config.rms_norm_eps

    def reads(norm, query, layernorm):
        if depth is None:
            stream = partial
        else:
            stream = torch.stack([mixed(s, norm, query, eps) for s in zip(*blocks, partial, strict=True)])
        return torch.stack([normed(x, layernorm.weight, layernorm.eps) for x in stream])

    for index, layer in enumerate(text.layers):
        residual = (layer.self_attention_res_norm, layer.self_attention_res_proj) if depth else (None, None)
        attention = delta_attention if config.layer_types[index] == "linear_attention" else latent_attention
        attended = attention(layer.self_attn, config, reads(*residual, layer.input_layernorm))
        if depth and index % depth == 0:
            blocks, partial = [*blocks, partial], attended
        else:
            partial = partial + attended
        residual = (layer.mlp_res_norm, layer.mlp_res_proj) if depth else (None, None)
        xs = reads(*residual, layer.post_attention_layernorm)
        if hasattr(layer, "mlp"):
            up = [gated(config, layer.mlp.gate_proj.weight @ x, layer.mlp.up_proj.weight @ x) for x in xs]
            partial = partial + torch.stack([layer.mlp.down_proj.weight @ x for x in up])
        else:
            partial = partial + experts_and_shared(layer.block_sparse_moe, config, xs)
    if depth:
        norm, query = text.output_attn_res_norm, text.output_attn_res_proj
        partial = torch.stack([mixed(s, norm, query, eps) for s in zip(*blocks, partial, strict=True)])
    return torch.stack([normed(x, text.norm.weight, eps) for x in partial])


@pytest.mark.parametrize("family", ["k3", "kimi-linear", "dense"])
@torch.no_grad()
def test_a_whole_model(family):
    """Five layers in blocks of two, the first one dense."""
    changes = {"k3": {}, "kimi-linear": tiny.KIMI_LINEAR, "dense": tiny.DENSE}[family]
    model = build("kmkkm", **changes)
    ids = torch.randint(tiny.VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    hidden = whole_model(model, ids)
    got = model(ids[None], output_hidden_states=True)
    torch.testing.assert_close(got.hidden_states[-1][0], hidden, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(got.logits[0], hidden @ model.lm_head.weight.T, rtol=1e-8, atol=1e-9)
