"""Trains a DSpark-style draft for the small checkpoint (or another one) on plain text.

    python training/dspark.py --model checkpoints/small --text FILE... --out checkpoints/small_draft

The target is frozen: its hidden states, and its distributions as soft labels, are computed once for all windows. A step
takes blocks behind random places of every window; the loss is the cross-entropy of the target's distribution, and the
confidence head learns the probability sum min(p, q) that a drafted token is accepted. State is saved every 200 steps
beside the result (`training.pt`); the same command goes on from there.
"""

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoTokenizer

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.serving.dspark import DSparkConfig, DSparkDraft

WINDOW, ROWS, BLOCKS = 256, 16, 16


def sizes(config) -> DSparkConfig:
    """A draft of two layers for a model of that size; it taps four layers spread over the depth."""
    layers = config.num_hidden_layers
    return DSparkConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank or config.hidden_size // 2,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        target_layer_ids=tuple(sorted({layers // 4, layers // 2, 3 * layers // 4, layers - 1})),
        mask_token_id=config.pad_token_id or 0,
        markov_rank=64,
        block_size=6,
    )


@torch.no_grad()
def observe(model, draft, windows):
    """(taps [n, T, taps * hidden], logits [n, T, V]) of the target, in bfloat16."""
    taps, logits = [], []
    for rows in tqdm(windows.split(8), desc="target", unit="batch"):
        out = model(rows, output_hidden_states=True)
        taps.append(draft.taps(out.hidden_states).bfloat16())
        logits.append(out.logits.bfloat16())
    return torch.cat(taps), torch.cat(logits)


def block_loss(draft, lm_head, ids, taps, target, anchors):
    """Loss and mean acceptance of blocks behind `anchors` [n]; ids [B, T], taps [B, T, ...], target [B, T, V] logits.

    The block at anchor a reads the context before a and itself; slot i is compared with the target behind token a + i.
    """
    size, length, device = draft.config.block_size, ids.shape[1], ids.device
    positions = (anchors[:, None] + torch.arange(size, device=device)).flatten()
    block = torch.arange(len(anchors), device=device).repeat_interleave(size)
    sees_context = torch.arange(length, device=device) < anchors[block][:, None]
    mask = torch.cat([sees_context, block[:, None] == block], dim=1)
    hidden = draft.block(ids[:, anchors], positions, draft.context(taps, 0), mask)
    before = ids[:, positions]
    logits = lm_head(hidden) + draft.bias(before)
    p, log_q = torch.softmax(target[:, positions].float(), dim=-1), F.log_softmax(logits.float(), dim=-1)
    with torch.no_grad():
        accepted = torch.minimum(p, log_q.exp()).sum(-1)
    confidence = draft.confidence(hidden.detach(), before)
    loss = -(p * log_q).sum(-1).mean() + F.binary_cross_entropy_with_logits(confidence, accepted)
    return loss, accepted.mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("checkpoints/small"))
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=512, help=f"of {WINDOW} tokens")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=2e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = KimiK3ForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = [i for file in options.text for i in tokenizer(file.read_text(encoding="utf-8"), verbose=False).input_ids]
    rows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if len(rows) < ROWS:
        raise SystemExit(f"the text has {len(ids):,} tokens, a draft needs at least {ROWS * WINDOW:,}")
    random.Random(0).shuffle(rows)
    windows = torch.tensor(rows[: options.windows])
    draft = DSparkDraft(sizes(model.config))
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        draft.markov_head.markov_w2.weight.zero_()
    draft.embed_tokens.requires_grad_(False)
    lm_head = model.get_output_embeddings().requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], weight_decay=0.01)
    state, start = options.out / "training.pt", 0
    if state.exists():
        saved = torch.load(state)
        draft.load_state_dict(saved["draft"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    taps, target = observe(model, draft, windows)
    options.out.mkdir(parents=True, exist_ok=True)
    bar = tqdm(range(start, options.steps), initial=start, total=options.steps, unit="step")
    for step in bar:
        draw = torch.Generator().manual_seed(step)
        chosen = torch.randint(len(windows), (ROWS,), generator=draw)
        anchors = torch.randint(1, WINDOW - draft.config.block_size, (BLOCKS,), generator=draw)
        loss, accepted = block_loss(draft, lm_head, windows[chosen], taps[chosen].float(), target[chosen], anchors)
        rate = options.rate * min(1.0, (step + 1) / 50) * max(1 - step / options.steps, 0.02)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", accepted=f"{accepted:.3f}")
        if (step + 1) % 200 == 0:
            done = {"draft": draft.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(done, state.with_suffix(".new"))
            state.with_suffix(".new").replace(state)
    draft.to(torch.bfloat16).save(options.out)
    state.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
