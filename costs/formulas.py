"""Parameters, FLOPs and bytes of a model from its configuration, by formulas that a reader can check.

Conventions: a multiply-add is 2 FLOPs. Matrix products and the recurrence are counted; norms, activations, gates and
the mix over depth are elementwise and are not. Attention is counted over the causal pairs of a query and a key, which
is what a fused kernel computes. Bytes are those of weights, latents, keys, values and states, each read once (and
states written once); activations stay on chip in this model. The tests check every count against
`torch.utils.flop_counter` and the tensors of small models, and the totals against published ones.
"""

import dataclasses
import math
import operator
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ..configuration_kimi_k3 import MXFP4_GROUP, KimiK3TextConfig

CHUNK = 64  # of the chunked recurrence, as `kernels/kda.py` runs it
MXFP4_BYTES = 0.5 + 1 / MXFP4_GROUP  # a 4-bit value, and the share of a scale byte


def causal_pairs(tokens: int, past: int) -> int:
    """Pairs of a query and a key it reads: T past + T (T + 1) / 2, for T new tokens behind `past` others."""
    return tokens * past + tokens * (tokens + 1) // 2


class Layer:
    """What a kind of layer has unless it says otherwise: weights of one dtype, all of which act on every token.

    `matrices` are the matrix parameters that act on a token, `others` what is no matrix.
    """

    others = 0
    grows = True  # its cache, with every token of a long context

    @property
    def weight_bytes(self) -> float:
        return (self.matrices + self.others) * self.dtype_bytes

    @property
    def parts(self) -> dict[str, tuple[int, int, float]]:
        """Name -> (parameters, those that act on a token, bytes)."""
        count = self.matrices + self.others
        return {self.kind: (count, count, self.weight_bytes)}

    def read_bytes(self, tokens: int) -> float:
        """Bytes of weights that a forward of `tokens` tokens reads."""
        return self.weight_bytes

    def decode_bytes(self, context: int) -> int:
        """A decoding step reads the cache once; of absorbed MLA every latent for all heads."""
        return self.cache_bytes(context)


@dataclass(frozen=True)
class KDA(Layer):
    """One KDA layer: `heads` matrices of D x D (`head_dim`), short convolutions of `width` taps (Kimi K3 report, p. 4).

    `stored_bytes` are those of an element of convolution weights and output norm, `dtype_bytes` of all other elements.
    """

    hidden: int
    heads: int
    head_dim: int
    width: int
    full_rank_gate: bool
    dtype_bytes: int
    stored_bytes: int

    kind, grows = "KDA", False

    @property
    def matrices(self) -> int:
        """q, k, v, o: 4 d P with P = H D; decay d D + D P; beta d H; output gate d P, or d D + D P as a pair."""
        d, inner, size = self.hidden, self.heads * self.head_dim, self.head_dim
        pair = d * size + size * inner
        return 4 * d * inner + pair + d * self.heads + (d * inner if self.full_rank_gate else pair)

    @property
    def others(self) -> int:
        """Convolutions 3 P W, A_log H, dt_bias P, output norm D."""
        inner = self.heads * self.head_dim
        return 3 * inner * self.width + self.heads + inner + self.head_dim

    @property
    def weight_bytes(self) -> int:
        """A_log and dt_bias are float32, whatever the dtype."""
        gate = self.heads * (1 + self.head_dim)
        return self.matrices * self.dtype_bytes + 4 * gate + (self.others - gate) * self.stored_bytes

    def cache_bytes(self, tokens: int) -> int:
        """4 H D^2 of float32 state and the last W - 1 inputs of three convolutions, whatever the context."""
        tails = 3 * (self.width - 1) * self.heads * self.head_dim * self.dtype_bytes
        return 4 * self.heads * self.head_dim**2 + tails if tokens else 0

    def attention_flops(self, tokens: int, past: int) -> int:
        """One token: 7 D^2 a head (decay D^2, S^T k 2 D^2, k u^T 2 D^2, S^T q 2 D^2). More: O(T D^2), by chunks of C:

        6 D^2 (w S, q S and k^T u) + 2 C D (A u) + 2 C D (both triangles) + 2 C D (triangular solve) a token and head.
        Kernels that invert the triangle explicitly need 12 C^2 + 8 C D + 6 D^2. Convolutions add 2 W for 3 P channels.
        """
        size, convolution = self.head_dim, 6 * self.width * self.heads * self.head_dim
        head = 7 * size**2 if tokens == 1 else 6 * size**2 + 6 * CHUNK * size
        return tokens * (self.heads * head + convolution)

    def copies(self, gpus: int) -> int:
        """One: heads are split, and their states with them."""
        return 1

    def decode_bytes(self, context: int) -> int:
        """8 D^2 a head: the float32 state is read and written once."""
        return 8 * self.heads * self.head_dim**2


@dataclass(frozen=True)
class MLA(Layer):
    """One MLA layer: keys and values of all heads from a latent of `rank`, and `rope` shared key channels.

    `q_rank` 0 is a full query projection. DeepSeek-V2, arXiv 2405.04434, section 2.1; the output gate is K3's.
    """

    hidden: int
    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    q_rank: int
    gate: bool
    dtype_bytes: int

    kind = "MLA"

    @property
    def matrices(self) -> int:
        """q: d r + r H (n + p), or d H (n + p); latent d (R + p); keys and values R H (n + v); gate, o: d H v each."""
        d, heads, query = self.hidden, self.heads, self.heads * (self.nope + self.rope)
        q = (d + query) * self.q_rank if self.q_rank else d * query
        kv = d * (self.rank + self.rope) + self.rank * heads * (self.nope + self.value)
        return q + kv + (2 if self.gate else 1) * d * heads * self.value

    @property
    def others(self) -> int:
        """Norms of the two latents."""
        return self.rank + self.q_rank

    def cache_bytes(self, tokens: int) -> int:
        """R + p values a token, for all heads together."""
        return (self.rank + self.rope) * self.dtype_bytes * tokens

    def expanded_flops(self, pairs: int, tokens: int, keys: int) -> int:
        """2 H (n + p + v) a pair. Keys and values of the S - T cached tokens are expanded again, 2 R H (n + v) each;
        those of the new ones are in the projections."""
        again = 2 * self.rank * self.heads * (self.nope + self.value) * (keys - tokens)
        return 2 * self.heads * (self.nope + self.rope + self.value) * pairs + again

    def absorbed_flops(self, pairs: int, tokens: int) -> int:
        """2 H (2 R + p) a pair. Folding the key half into the query and the value half into the output costs as much
        a token as expanding it, so the projections' count stands."""
        return 2 * self.heads * (2 * self.rank + self.rope) * pairs

    def attention_flops(self, tokens: int, past: int) -> int:
        """The cheaper of the two forms, which is what the layer chooses."""
        pairs = causal_pairs(tokens, past)
        expanded = self.expanded_flops(pairs, tokens, tokens + past)
        return min(expanded, self.absorbed_flops(pairs, tokens)) if past else expanded

    def copies(self, gpus: int) -> int:
        """All heads read the one latent, so GPUs that split the heads each keep a copy of it."""
        return gpus


@dataclass(frozen=True)
class GQA(Layer):
    """One layer of grouped-query attention (arXiv 2305.13245); `window` limits what a token reads, 0 is no limit."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    dtype_bytes: int

    kind = "GQA"

    @property
    def grows(self) -> bool:
        return not self.window

    def cache_bytes(self, tokens: int) -> int:
        """Keys and values: 2 G D a token, of at most `window` tokens."""
        kept = min(tokens, self.window) if self.window else tokens
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes * kept

    def attention_flops(self, tokens: int, past: int) -> int:
        """4 H D a pair: 2 H D for the scores and the same for the values."""
        pairs, window = causal_pairs(tokens, past), self.window
        if window:  # token i of the context reads min(i, window) keys: the causal pairs less those beyond the window
            beyond = [max(n - window, 0) for n in (tokens + past, past)]
            pairs -= beyond[0] * (beyond[0] + 1) // 2 - beyond[1] * (beyond[1] + 1) // 2
        return 4 * self.heads * self.head_dim * pairs

    def copies(self, gpus: int) -> int:
        """Key heads are split; where there are fewer than GPUs, several GPUs hold the same one."""
        return -(-gpus // self.kv_heads)


@dataclass(frozen=True)
class Dense(Layer):
    """A gated MLP of `width`: 3 d F parameters."""

    hidden: int
    width: int
    dtype_bytes: int

    kind = "dense MLP"

    @property
    def matrices(self) -> int:
        return 3 * self.hidden * self.width


@dataclass(frozen=True)
class Experts:
    """Routed and shared experts. `latent` 0 means that routed experts work in the full width (Kimi K3 report, p. 7-8).

    `expert_bytes` are those of an element of a routed expert, `bias_bytes` of one of the selection bias.
    """

    hidden: int
    experts: int
    chosen: int
    shared: int
    width: int
    latent: int
    latent_norm: bool
    dtype_bytes: int
    expert_bytes: float
    bias_bytes: int

    @property
    def one_expert(self) -> int:
        """3 D m, D the latent width or the full one."""
        return 3 * (self.latent or self.hidden) * self.width

    @property
    def parts(self) -> dict[str, tuple[int, int, float]]:
        """Router d E and its bias E; latent projections 2 d D; shared experts 3 d m s; routed ones 3 D m each."""
        router, bias = self.hidden * self.experts, self.experts
        latent = 2 * self.hidden * self.latent + (self.latent if self.latent_norm else 0)
        shared = 3 * self.hidden * self.width * self.shared
        parts = {
            "router": (router + bias, router + bias, router * self.dtype_bytes + bias * self.bias_bytes),
            "routed experts": (
                self.experts * self.one_expert,
                self.chosen * self.one_expert,
                self.experts * self.one_expert * self.expert_bytes,
            ),
        }
        if latent:
            parts["latent projections"] = latent, latent, latent * self.dtype_bytes
        if shared:
            parts["shared experts"] = shared, shared, shared * self.dtype_bytes
        return parts

    @property
    def matrices(self) -> int:
        """Matrix parameters that act on a token: all but the bias and the norm."""
        active = sum(count for _, count, _ in self.parts.values())
        return active - self.experts - (self.latent if self.latent_norm else 0)

    def read_bytes(self, tokens: int) -> float:
        """Bytes of weights that a forward of `tokens` tokens reads: all but the experts that none of them hits."""
        size = sum(part for _, _, part in self.parts.values())
        missed = self.experts - distinct_experts(self.experts, self.chosen, tokens)
        return size - missed * self.one_expert * self.expert_bytes


@dataclass(frozen=True)
class Counted:
    """All parameters but embedding and head of a model without formulas here, counted on its meta tensors.

    Attributes:
        parameters, matrices: all of them, and the matrix parameters that act on a token.
        bytes, expert_bytes: of the weights, and of the routed experts among them.
        experts, chosen: E and k, or 0.
    """

    parameters: int
    matrices: int
    bytes: float
    expert_bytes: float = 0
    experts: int = 0
    chosen: int = 0

    @property
    def parts(self) -> dict[str, tuple[int, int, float]]:
        return {"layers": (self.parameters, self.matrices, self.bytes)}

    def read_bytes(self, tokens: int) -> float:
        """As `Experts.read_bytes`."""
        if not self.experts:
            return self.bytes
        hit = distinct_experts(self.experts, self.chosen, tokens) / self.experts
        return self.bytes - (1 - hit) * self.expert_bytes


def distinct_experts(experts: int, chosen: int, tokens: int) -> float:
    """Expected number of experts that `tokens` tokens hit when the router is balanced: E (1 - (1 - k / E)^T)."""
    return experts * (1 - (1 - chosen / experts) ** tokens)


@dataclass(frozen=True)
class ModelCost:
    """A text model: one attention and one feed-forward part a layer, embedding and head.

    Attributes:
        feed_forward: `Dense` and `Experts`; or one `Counted`, which holds the parameters of the attention too.
        norms: parameters of layer norms, depth mixes and the final norm.
    """

    name: str
    hidden: int
    vocabulary: int
    tied: bool
    dtype_bytes: int
    attention: tuple
    feed_forward: tuple
    norms: int = 0

    @property
    def weighed(self) -> tuple:
        """The layers that the parameters are counted in."""
        whole = any(isinstance(layer, Counted) for layer in self.feed_forward)
        return self.feed_forward if whole else (*self.attention, *self.feed_forward)

    @cached_property
    def distinct_attention(self) -> list[tuple]:
        """(attention layer, how many of it), because a model has few kinds and many layers."""
        return list(Counter(self.attention).items())

    @cached_property
    def _matrices(self) -> int:
        """Matrix parameters that act on a token, without the head."""
        return sum(layer.matrices for layer in self.weighed)

    def parts(self) -> dict[str, tuple[int, int, float]]:
        """Kind of layer -> (parameters, active ones, bytes). The embedding table acts by a look-up: 0 active."""
        parts: dict[str, tuple] = {}
        for layer in self.weighed:
            for name, counts in layer.parts.items():
                parts[name] = tuple(map(operator.add, parts.get(name, (0, 0, 0)), counts))
        table = self.vocabulary * self.hidden
        if self.norms:
            parts["norms, depth mixes"] = self.norms, self.norms, self.norms * self.dtype_bytes
        if not self.tied:
            parts["embedding"] = table, 0, table * self.dtype_bytes
        parts["head"] = table, table, table * self.dtype_bytes
        return parts

    def totals(self) -> tuple[int, int, float]:
        """(parameters, active parameters a token, bytes of the weights)."""
        return tuple(map(sum, zip(*self.parts().values(), strict=True)))

    def cache_bytes(self, tokens: int) -> int:
        """Keys, values, latents and states of one sequence."""
        return sum(count * layer.cache_bytes(tokens) for layer, count in self.distinct_attention)

    def per_token_bytes(self) -> int:
        """Bytes that one more token adds to the cache (not counting windows, which are constant once they are full)."""
        return sum(count * layer.cache_bytes(1) for layer, count in self.distinct_attention if layer.grows)

    def state_bytes(self) -> int:
        """The constant part: recurrent states and convolution tails."""
        return sum(count * layer.cache_bytes(1) for layer, count in self.distinct_attention if layer.kind == "KDA")

    def flops(self, tokens: int, past: int = 0, heads: int | None = None) -> int:
        """2 FLOPs a token for every active matrix parameter, and the attention.

        Args:
            heads: positions that go through `lm_head`; None is the last one only, as in a prefill.
        """
        attention = sum(count * layer.attention_flops(tokens, past) for layer, count in self.distinct_attention)
        head = 2 * (1 if heads is None else heads) * self.vocabulary * self.hidden
        return 2 * tokens * self._matrices + head + attention

    def read_weight_bytes(self, tokens: int) -> float:
        """Bytes of weights that a forward of `tokens` tokens, all rows together, reads; a few rows of the embedding."""
        table = self.vocabulary * self.hidden + self.norms
        return table * self.dtype_bytes + sum(layer.read_bytes(tokens) for layer in self.weighed)

    def break_even(self, other: "ModelCost") -> float:
        """Context at which this model's cache and the other's are equal: difference of constants over that of slopes.

        inf if it never is.
        """
        slope = other.per_token_bytes() - self.per_token_bytes()
        constant = self.state_bytes() - other.state_bytes()
        return constant / slope if slope and constant / slope >= 0 else math.inf


def text_cost(config: KimiK3TextConfig, name: str = "", dtype_bytes: int = 2) -> ModelCost:
    """The cost model of a Kimi K3 or Kimi-Linear configuration."""
    linear, d = config.linear_attn_config, config.hidden_size
    stored = dtype_bytes if config.has_softplus_gate else 4
    kda = KDA(
        d, linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"],
        linear.get("use_full_rank_gate", False), dtype_bytes, stored,
    )  # fmt: skip
    mla = MLA(
        d, config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
        config.kv_lora_rank, config.q_lora_rank or 0, bool(config.mla_use_output_gate), dtype_bytes,
    )  # fmt: skip
    dense = Dense(d, config.intermediate_size, dtype_bytes)
    expert_bytes = dtype_bytes if config.expert_quantization is None else MXFP4_BYTES
    experts = Experts(
        d, config.num_experts, config.num_experts_per_token, config.num_shared_experts or 0,
        config.moe_intermediate_size, config.routed_expert_hidden_size or 0, bool(config.latent_moe_use_norm),
        dtype_bytes, expert_bytes, stored,
    )  # fmt: skip
    attention = tuple(kda if kind == "linear_attention" else mla for kind in config.layer_types)
    feed_forward = tuple(dense if kind == "dense" else experts for kind in config.mlp_layer_types)
    # two layer norms a layer and the final one; norm and query of two mixes a layer and the output mix
    norms = d * (2 * config.num_hidden_layers + 1)
    if config.attn_res_block_size is not None:
        norms += 2 * d * (2 * config.num_hidden_layers + 1)
    return ModelCost(
        name, d, config.vocab_size, config.tie_word_embeddings, dtype_bytes, attention, feed_forward, norms
    )


def without_recurrence(cost: ModelCost) -> ModelCost:
    """The same model with its KDA layers replaced by its MLA ones: what the hybrid is compared with."""
    mla = next(layer for layer in cost.attention if layer.kind == "MLA")
    return dataclasses.replace(cost, name=f"{cost.name}, all MLA", attention=(mla,) * len(cost.attention))


# --- machines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPU:
    """One GPU from its datasheet: bytes of memory, bytes/s, dense bfloat16 FLOP/s, link bytes/s in one direction."""

    memory: float
    bandwidth: float
    flops: float
    link: float


GPUS = {
    "h100": GPU(80e9, 3.35e12, 989e12, 450e9),
    "h200": GPU(141e9, 4.8e12, 989e12, 450e9),
    "b200": GPU(192e9, 8e12, 2250e12, 900e9),
    "b300": GPU(288e9, 8e12, 2250e12, 900e9),
}
# Measured on one H200 (docs/costs.md): a copy reaches 4.22 of 4.8 TB/s, a large bfloat16 product 693 of 989 TFLOP/s.
BANDWIDTH_REACHED, FLOPS_REACHED = 4.22 / 4.8, 693 / 989


@dataclass(frozen=True)
class Node:
    """`gpus` equal GPUs that share every layer.

    `by_heads` is tensor parallelism: each GPU has its heads and what they read, so a latent lies on all of them
    (`copies` of a layer). Otherwise each GPU holds sequences, or a part of a sequence, of its own.
    """

    gpu: GPU
    gpus: int
    by_heads: bool = True

    def _copies(self, layer) -> int:
        return layer.copies(self.gpus) if self.by_heads else 1

    def held_bytes(self, cost: ModelCost, tokens: int) -> int:
        """Bytes of the cache of one sequence on all GPUs together."""
        return sum(count * self._copies(layer) * layer.cache_bytes(tokens) for layer, count in cost.distinct_attention)

    def cache_capacity(self, cost: ModelCost, session_tokens: int) -> int:
        """Tokens of context that fit beside the weights, in sessions of `session_tokens` that each need a state too:
        (G M - weights) / `held_bytes` of a session, in tokens. Weights are taken as evenly split; activations and
        graphs take nothing here."""
        left = self.gpus * self.gpu.memory - cost.totals()[2]
        return max(int(left / self.held_bytes(cost, session_tokens) * session_tokens), 0)

    def seconds(self, flops: float, read_bytes: float) -> float:
        """Roofline: the slower of computing and reading, at the share of the datasheet that was measured.

        Communication and launches are left out, so this is a lower bound.
        """
        computing = flops / (self.gpus * self.gpu.flops * FLOPS_REACHED)
        return max(computing, read_bytes / (self.gpus * self.gpu.bandwidth * BANDWIDTH_REACHED))

    def prefill_seconds(self, cost: ModelCost, tokens: int, past: int = 0) -> float:
        """The cache is read or written once, states twice."""
        read = self.held_bytes(cost, tokens + past) + cost.state_bytes()
        return self.seconds(cost.flops(tokens, past), cost.read_weight_bytes(tokens) + read)

    def decode_seconds(self, cost: ModelCost, contexts: list[int]) -> float:
        """One step of a batch, a row for every context."""
        flops = sum(cost.flops(1, context) for context in contexts)
        read = sum(
            count * self._copies(layer) * layer.decode_bytes(context)
            for context in contexts
            for layer, count in cost.distinct_attention
        )
        return self.seconds(flops, cost.read_weight_bytes(len(contexts)) + read)

    def kv_throughput(self, cost: ModelCost, tokens: int) -> float:
        """Cache bytes over the time to the first token: what a prefill node hands to a decode node, in bytes/s."""
        return cost.cache_bytes(tokens) / self.prefill_seconds(cost, tokens)


def all_to_all_bytes(tokens: int, layer: Experts, ranks: int, element_bytes: float = 2) -> float:
    """Bytes a rank sends in one dispatch of T tokens over E ranks: (T k / E) (1 - 1 / E) D P, D the experts' width."""
    width = layer.latent or layer.hidden
    return tokens * layer.chosen / ranks * (1 - 1 / ranks) * width * element_bytes


def communication_ratio(layer: Experts, gpu: GPU, ranks: int, element_bytes: float = 2) -> float:
    """T_comm / T_comp of expert parallelism, one direction: P F / (6 m B) (1 - 1 / E).

    A token-expert pair moves D P bytes over the link B and computes 6 D m FLOPs, so the experts' width D cancels: a
    latent lowers both, and the ratio falls only with a larger m.
    """
    return element_bytes * gpu.flops / (6 * layer.width * gpu.link) * (1 - 1 / ranks)
