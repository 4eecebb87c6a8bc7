"""Trains a DSpark-style draft for the small checkpoint (or another one) on text that the target itself writes.

    python -m kimi_k3.speculative.training --model checkpoints/small --text .data/train.txt --out draft

The target continues windows of the text, half of them greedily and half by sampling at temperature 1, because that is
what a draft has to foresee. It is frozen: its hidden states are computed once for all windows, its distributions are
soft labels. A step takes blocks behind random places of every window; the loss is the cross-entropy of the target's
distribution, and the confidence head learns the probability sum min(p, q) that a drafted token is accepted. The same
command continues a killed run (from `windows.pt` and `training.pt` beside the result, which a finished run removes).
"""

import argparse
import hashlib
import json
import math
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm

from ..cli.common import Parser, UsageError, add_debug, broken, explained, load_tokenizer, number, run_or_explain
from ..files_kimi_k3 import DamagedFile, load_state, remove_state, save_state
from ..fingerprint_kimi_k3 import model_fingerprint
from ..modeling_kimi_k3 import KimiK3ForCausalLM
from ..runs_kimi_k3 import changes, keeping, lock, tokenizer_digest
from ..training.muon import PerHeadMuon
from .draft import DSparkConfig, DSparkDraft

SEPARATOR = "\n\f\n"  # of documents: a line that holds a form feed
WINDOW, PROMPT = 256, 64  # tokens of a window, and how many of them are text
ROWS, BLOCKS = 16, 16  # windows of a step, and blocks in each of them
CONTINUED = 256  # windows that the target continues at once
SAVED_EVERY = 200  # steps
ADAMW = 4.0  # its rate, relative to Muon's: the tables of the Markov head start at zero and see each token rarely


def sizes(config) -> DSparkConfig:
    """A draft of one layer for a model of that size; it taps four layers spread over the depth."""
    names = ("vocab_size", "hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
             "v_head_dim")  # fmt: skip
    layers = config.num_hidden_layers
    return DSparkConfig(
        **{name: getattr(config, name) for name in names},
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=1,
        q_lora_rank=config.q_lora_rank or config.hidden_size // 2,
        target_layer_ids=tuple(sorted({layers // 4, layers // 2, 3 * layers // 4, layers - 1})),
        mask_token_id=config.pad_token_id or 0,
        markov_rank=64,
        block_size=5,
    )


def rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warmup, then a line down to a fiftieth of the peak."""
    return peak * min(1.0, (step + 1) / 50) * max(1 - step / steps, 0.02)


def prompts(tokenizer, text: str, count: int, seed: int) -> torch.Tensor:
    """[count or fewer, PROMPT]: beginnings of windows of the documents in the text, drawn without repetition."""
    ids = [tokenizer(document, verbose=False).input_ids for document in text.split(SEPARATOR)]
    starts = [row[at : at + PROMPT] for row in ids for at in range(0, len(row) - PROMPT + 1, WINDOW)]
    if len(starts) < ROWS:
        raise UsageError(f"the text has {sum(map(len, ids)):,} tokens, a draft needs at least {ROWS * WINDOW:,}")
    return torch.tensor(random.Random(seed).sample(starts, min(count, len(starts))))


def continued(model, starts: torch.Tensor, length: int) -> torch.Tensor:
    """[n, length]: prompts [n, T] and what the target writes behind them, greedily in the first half of the rows."""
    new = length - starts.shape[1]
    asked = {"max_new_tokens": new, "min_new_tokens": new}
    choices = {"do_sample": False}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    parts = [(part, choice) for part, choice in zip(starts.tensor_split(2), choices, strict=True) if len(part)]
    return torch.cat([model.generate(x, attention_mask=torch.ones_like(x), **asked, **choice) for x, choice in parts])


@torch.no_grad()
def observe(model, draft, windows):
    """(taps [n, T, taps * hidden], what the target's head reads [n, T, hidden]), in bfloat16."""
    taps, outputs = [], []
    for rows in tqdm(windows.split(8), desc="observe", unit="batch"):
        states = model.model(rows, output_hidden_states=True, use_cache=False).hidden_states
        taps.append(draft.taps(states).bfloat16())
        outputs.append(states[-1].bfloat16())
    return torch.cat(taps), torch.cat(outputs)


def block_loss(draft, lm_head, ids, taps, outputs, anchors):
    """Loss and mean acceptance of blocks behind `anchors` [n]; ids [B, T], taps and outputs [B, T, ...] of `observe`.

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
    log_q = F.log_softmax(logits.float(), dim=-1)
    with torch.no_grad():
        p = torch.softmax(lm_head(outputs[:, positions]).float(), dim=-1)
        accepted = torch.minimum(p, log_q.exp()).sum(-1)
    confidence = draft.confidence(hidden.detach(), before)
    loss = -(p * log_q).sum(-1).mean() + F.binary_cross_entropy_with_logits(confidence, accepted)
    return loss, accepted.mean().item()


def groups(draft) -> list[dict]:
    """For `PerHeadMuon`: whole matrices of the layers by Muon, the heads, embeddings and norms by AdamW."""
    matrices = [p for part in (draft.context_proj, *draft.layers) for p in part.parameters() if p.ndim == 2]
    taken = set(map(id, matrices))
    others = [p for p in draft.parameters() if p.requires_grad and id(p) not in taken]
    kinds = {"muon": matrices, "adamw": others}
    return [{"params": p, "algorithm": kind, "blocks": None, "weight_decay": 0.01} for kind, p in kinds.items()]


def resumed(file: Path, settings: dict) -> dict | None:
    """The state that an earlier run with the same settings saved."""
    with explained(DamagedFile):
        saved = load_state(file)
    if saved is not None and (changed := changes(saved["settings"], settings)):
        raise UsageError(
            f"{file} belongs to a run with other settings ({'; '.join(changed)}): remove it or finish that run"
        )
    return saved


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m kimi_k3.speculative.training", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("checkpoints/small"))
    parser.add_argument(
        "--text", type=Path, required=True, help="UTF-8 file, a line that holds a form feed between its documents"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4096, help=f"of {WINDOW} tokens")
    parser.add_argument("--steps", type=int, default=4000)
    rate = number(float, lambda rate: 0 < rate < float("inf"), "must be a number above 0")
    parser.add_argument("--rate", type=rate, default=1e-2, help="of Muon, at most")
    parser.add_argument("--seed", type=int, default=0)
    add_debug(parser)
    options = parser.parse_args(argv)
    if options.windows < 1 or options.steps < 1:
        parser.error("--windows and --steps are at least 1")
    if not options.text.is_file():
        parser.error(f"{options.text} is no file; recipes/small/corpus.py writes the text of the small checkpoint")
    return run_or_explain(parser.prog, run, options)


def run(options: argparse.Namespace) -> None:
    """Train a draft in the folder `out`, from where an earlier call ended."""
    kept = f"{options.out} keeps windows and the state after every {SAVED_EVERY} steps"
    with lock(options.out, UsageError), keeping(f"{kept}, and the same command goes on from there"):
        with explained(FloatingPointError):
            train(options)
        (options.out / "lock").unlink()


def train(options: argparse.Namespace) -> None:
    with broken(f"the model in {options.model} cannot be loaded"):
        model = KimiK3ForCausalLM.from_pretrained(options.model, dtype=torch.float32, dequantize=True).eval()
    tokenizer = load_tokenizer(options.model)
    with broken(f"the text in {options.text} cannot be used"):
        text = options.text.read_text(encoding="utf-8")
    chosen = {
        "weights_sha256": model_fingerprint(model, with_head=True),
        "tokenizer_sha256": tokenizer_digest(tokenizer),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "windows": options.windows,
        "seed": options.seed,
    }
    starts = prompts(tokenizer, text, options.windows, options.seed)
    file = options.out / "windows.pt"
    windows = (resumed(file, chosen) or {"windows": []})["windows"]
    batches = starts.split(CONTINUED)
    for i in tqdm(range(len(windows), len(batches)), "continue", len(batches), initial=len(windows), unit="batch"):
        torch.manual_seed(options.seed + i)
        windows.append(continued(model, batches[i], WINDOW))
        save_state({"settings": chosen, "windows": windows}, file)
    windows = torch.cat(windows)
    chosen |= {"steps": options.steps, "rate": options.rate}
    torch.manual_seed(options.seed)
    draft = DSparkDraft(sizes(model.config))
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        draft.markov_head.markov_w2.weight.zero_()
    draft.embed_tokens.requires_grad_(False)
    lm_head = model.get_output_embeddings().requires_grad_(False)
    optimizer = PerHeadMuon(groups(draft))
    state, shares = options.out / "training.pt", []  # mean acceptance of every step
    if saved := resumed(state, chosen):
        draft.load_state_dict(saved["draft"])
        optimizer.load_state_dict(saved["optimizer"])
        shares = saved["shares"]
    taps, outputs = observe(model, draft, windows)
    bar = tqdm(range(len(shares), options.steps), initial=len(shares), total=options.steps, unit="step")
    for step in bar:
        draw = torch.Generator().manual_seed(options.seed + step)
        rows = torch.randint(len(windows), (ROWS,), generator=draw)
        anchors = torch.randint(1, WINDOW - draft.config.block_size, (BLOCKS,), generator=draw)
        loss, share = block_loss(draft, lm_head, windows[rows], taps[rows].float(), outputs[rows].float(), anchors)
        rate = rate_at(step, options.steps, options.rate)
        for group in optimizer.param_groups:
            group["lr"] = rate if group["algorithm"] == "muon" else ADAMW * rate
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        if not math.isfinite(loss.item() + norm.item()):
            raise FloatingPointError(
                f"step {step + 1}: the loss is {loss.item()} and the gradient's norm {norm.item()}; the last saved "
                "state is untouched"
            )
        optimizer.step()
        shares.append(share)
        bar.set_postfix(loss=f"{loss.item():.3f}", accepted=f"{share:.3f}")
        if (step + 1) % SAVED_EVERY == 0:
            saved = {"settings": chosen, "shares": shares, "draft": draft.state_dict()}
            save_state({**saved, "optimizer": optimizer.state_dict()}, state)
    draft.to(torch.bfloat16).save(options.out)
    last = shares[-100:]
    report = {
        "command": " ".join(["python -m kimi_k3.speculative.training", *sys.argv[1:]]),
        "model": str(options.model),
        "settings": chosen,
        "parameters": sum(p.numel() for p in draft.parameters()),
        "accepted_in_the_last_steps": round(sum(last) / len(last), 4),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (options.out / "training_report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    remove_state(file)
    remove_state(state)


if __name__ == "__main__":
    sys.exit(main())
