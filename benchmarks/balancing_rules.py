"""Router balance and loss under four rules: none, an auxiliary loss, sign updates and Quantile Balancing.

    python benchmarks/balancing_rules.py [--steps 50]

Each rule trains the same small model (hidden 64, 2 MoE layers of 16 experts, top 4) on the same skewed data: a random
walk over 512 tokens of unequal frequency. Writes docs/balancing.png and the table in docs/training.md.
"""

import argparse
import datetime
from pathlib import Path

import matplotlib
import torch
from tqdm import tqdm

from kimi_k3 import KimiK3ForCausalLM, KimiK3TextConfig
from kimi_k3.training.balancing import BINS, QuantileBalancer, RouterRecorder

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- written by benchmarks/balancing_rules.py -->\n", "<!-- end -->\n"
VOCABULARY, ROWS, LENGTH = 512, 512, 32
AUXILIARY_WEIGHT = 0.01  # as usual for Switch-style losses
SIGN_RATE = 0.001  # as published for DeepSeek-V3


class LoadRecorder(RouterRecorder):
    """Counts how often every expert is chosen; moves nothing."""

    rate = 0.0

    def __init__(self, model):
        super().__init__(model)
        self.loads = torch.zeros(len(self.routers), self.num_experts)

    def record(self, index, scores, counted):
        scores = scores if counted is None else scores[counted]
        chosen = (scores + self.routers[index].e_score_correction_bias).topk(self.top_k, dim=-1).indices
        self.loads[index] += torch.bincount(chosen.flatten(), minlength=self.num_experts)

    @torch.no_grad()
    def step(self):
        mean = self.loads.mean(-1, keepdim=True)
        for router, load in zip(self.routers, mean - self.loads, strict=True):
            router.e_score_correction_bias += self.rate * load.sign()
        worst = self.loads.amax(-1) / mean[:, 0]
        self.loads.zero_()
        return worst


class SignBalancer(LoadRecorder):
    """Auxiliary-loss-free balancing (arXiv 2408.15664): a fixed step towards the mean load."""

    rate = SIGN_RATE


def auxiliary_loss(router_logits, top_k):
    """E sum_j f_j P_j, the mean over layers; f_j is the share of the routes to j, P_j its mean normalised score."""
    losses = []
    for logits in router_logits:
        scores = torch.sigmoid(logits)
        shares = scores / scores.sum(-1, keepdim=True)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(top_k, dim=-1).indices, 1 / top_k)
        losses.append(scores.shape[-1] * (chosen.mean(0) * shares.mean(0)).sum())
    return torch.stack(losses).mean()


# rule -> (what records and moves the biases, weight of the auxiliary loss)
RULES = {
    "none": (LoadRecorder, 0.0),
    "auxiliary loss": (LoadRecorder, AUXILIARY_WEIGHT),
    "sign updates": (SignBalancer, 0.0),
    "Quantile Balancing": (QuantileBalancer, 0.0),
}


def new_model():
    torch.manual_seed(0)
    config = KimiK3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        linear_attn_config={
            "full_attn_layers": [3],
            "kda_layers": [1, 2],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        attn_res_block_size=2,
        initializer_range=0.1,
        num_experts=16,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = KimiK3ForCausalLM(config).train()
    with torch.no_grad():  # tokens share a direction, as they do in trained models, so routers prefer some experts
        model.model.embed_tokens.weight += config.initializer_range * torch.randn(config.hidden_size)
    return model


class Walk:
    """Sequences in which each token is followed by one of eight others of its own; frequent ones are likelier."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)
        frequency = 1 / (20.0 + torch.arange(VOCABULARY))
        self.next = torch.multinomial(frequency.expand(VOCABULARY, -1), 8, generator=self.generator)

    def batch(self):
        """[ROWS, LENGTH] token ids."""
        token = torch.randint(VOCABULARY, (ROWS,), generator=self.generator)
        tokens = [token]
        for _ in range(LENGTH - 1):
            token = self.next[token, torch.randint(8, (ROWS,), generator=self.generator)]
            tokens.append(token)
        return torch.stack(tokens, dim=1)


def train(rule, steps):
    """[steps] loss on the tokens, and [steps] load of the fullest expert over the mean in the worst layer."""
    recorder_class, weight = RULES[rule]
    model, walk = new_model(), Walk()
    recorder = recorder_class(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses, loads = [], []
    for _ in tqdm(range(steps), desc=rule, unit="step"):
        ids = walk.batch()
        out = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
        loss = out.loss + weight * auxiliary_loss(out.router_logits, model.config.num_experts_per_token)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(out.loss.item())
        loads.append(recorder.step().max().item())
    return losses, loads


def draw(results):
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colours = ("0.4", "#D55E00", "#0072B2", "#009E73")  # told apart by colour-blind readers
    for (rule, (losses, loads)), colour, style in zip(results.items(), colours, (":", "--", "-.", "-"), strict=True):
        left.plot(loads, color=colour, linestyle=style, label=rule)
        right.plot(losses, color=colour, linestyle=style, label=rule)
    left.axhline(1, color="0.8", linewidth=1)
    left.set(xlabel="optimizer step", ylabel="fullest expert / mean load, worst layer", yscale="log")
    left.set_yticks([1, 1.1, 1.5, 2, 3, 4], ["1", "1.1", "1.5", "2", "3", "4"])
    left.minorticks_off()
    right.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(DOCS / "balancing.png", dpi=90)


def table(results, steps):
    lines = [
        f"| rule | load at step 1 | step 10 | step {steps // 2} | step {steps} | loss of the last 10 steps |\n",
        "|---|---|---|---|---|---|\n",
    ]
    for rule, (losses, loads) in results.items():
        columns = [loads[0], loads[9], loads[steps // 2 - 1], loads[-1]]
        lines.append(f"| {rule} | {' | '.join(f'{x:.2f}' for x in columns)} | {sum(losses[-10:]) / 10:.3f} |\n")
    setting = (
        f"\nLoad: the fullest expert over the mean, in the worst layer. {steps} steps of {ROWS * LENGTH:,} tokens, "
        f"learning rate along a cosine from 1e-3, {BINS} bins, auxiliary weight {AUXILIARY_WEIGHT}, sign rate "
        f"{SIGN_RATE}; CPU, torch {torch.__version__.partition('+')[0]}, {datetime.date.today()}, "
        "`python benchmarks/balancing_rules.py`.\n"
    )
    return "".join(lines) + setting


def main():
    parser = argparse.ArgumentParser(description="Compare rules of router balance.")
    parser.add_argument("--steps", type=int, default=50, help="at least 10 (default: %(default)s)")
    steps = parser.parse_args().steps
    if steps < 10:
        parser.error("--steps must be at least 10")
    results = {rule: train(rule, steps) for rule in RULES}
    draw(results)
    page = DOCS / "training.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(before + BEGIN + "\n" + table(results, steps) + "\n" + END + after)
    print(table(results, steps))


if __name__ == "__main__":
    main()
