"""Trains the small checkpoint: a K3-shaped model of 11 MB that writes prose and recalls facts from a long text.

    python training/corpus.py --out .data                            # the text
    python training/tokenizer.py --data .data                        # the tokenizer
    python training/train_small.py --data .data --out checkpoints/small --time-limit 1200

What happens in a run:

* Half of the windows are plain text, the others ask for facts hidden in text (see small_data.py).
* AdamW, cosine schedule, float32 master weights, bfloat16 compute on a GPU. Router balance by Quantile Balancing.
* Windows have 256 tokens for the first 40% of the steps, 1024 after that and 2048 for the last 15%, always as many
  tokens in a step: recall is learned where facts are near and stretched from there.
* For the last 40% of the steps routed experts are rounded to MXFP4 in the forward pass.
* State is saved every minute into `--run`. The same command continues a run that was stopped, on the same curve.
* At the end the experts are packed to MXFP4, the rest is rounded to bfloat16, the folder is saved, loaded again and
  measured, and training_report.json, loss.png and sample.txt (held-out text) are written beside it.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.conversion.plan import MXFP4_SECTION
from kimi_k3.training.balancing import QuantileBalancer
from kimi_k3.training.corpus import SEPARATOR
from kimi_k3.training.small_data import ANSWER_WEIGHT, RECALL_SHARE, Corpus, StepBatches
from kimi_k3.training.small_eval import RECALL_TASKS, autocast, evaluate
from kimi_k3.training.small_model import (
    experts_rounded,
    master_state,
    packed_state,
    parameter_groups,
    round_experts,
    rounding_once,
    small_config,
)
from kimi_k3.training.tokenizer import save_tokenizer

ROUNDED_FROM = 0.6  # share of the steps after which experts are rounded to MXFP4
BRIEF_UNTIL = 0.4  # share of the steps until which windows are a quarter as long: recall is learned from near facts
LONG_FROM = 0.85  # share of the steps after which windows are LONG_FACTOR times as long
LONG_FACTOR = 2
WARMUP = 0.02
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
SECONDS_BETWEEN_SAVES = 60
LONGEST_SAMPLE = 36_000  # characters


class Plan:
    """What is done at which step; everything follows from the number of steps."""

    def __init__(self, steps, context, peak_rate):
        self.steps, self.context, self.peak_rate = steps, context, peak_rate
        self.brief_until, self.rounded_from, self.long_from = (
            int(share * steps) for share in (BRIEF_UNTIL, ROUNDED_FROM, LONG_FROM)
        )

    def context_of(self, step):
        if step < self.brief_until:
            return self.context // 4
        return self.context * (LONG_FACTOR if step >= self.long_from else 1)

    def rate(self, step):
        """Linear warmup, then a cosine to a hundredth of the peak."""
        warmup = max(int(WARMUP * self.steps), 1)
        progress = (step + 1 - warmup) / max(self.steps - warmup, 1)
        cosine = 0.5 * (1 + math.cos(math.pi * max(progress, 0.0)))
        return self.peak_rate * min((step + 1) / warmup, 0.01 + 0.99 * cosine)


def optimizer_for(model, options):
    groups = parameter_groups(model, options.weight_decay)
    return torch.optim.AdamW(groups, lr=options.rate, betas=BETAS, fused=options.device.type == "cuda")


def train_step(model, optimizer, balancer, batch, rate, options):
    """One optimizer step on `batch` (see StepBatches); returns the metrics of the step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    batch = {name: tensor.to(options.device, non_blocking=True) for name, tensor in batch.items()}
    rows = max(options.micro_tokens // batch["input_ids"].shape[1], 1)
    total_weight = batch["weights"].sum()
    loss = text_loss = answer_loss = 0.0
    for ids, labels, weights in zip(*(tensor.split(rows) for tensor in batch.values()), strict=True):
        with rounding_once(model):
            with autocast(options.device):
                logits = model(input_ids=ids, use_cache=False).logits
            losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
            weighted = (losses * weights.flatten()).sum() / total_weight
            weighted.backward()
        is_answer = weights.flatten() == ANSWER_WEIGHT
        loss += weighted.detach()
        answer_loss += losses.detach()[is_answer].sum()
        text_loss += losses.detach()[~is_answer].sum()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    answers = (batch["weights"] == ANSWER_WEIGHT).sum().item()
    metrics = {
        "loss": float(loss),
        "text_loss": float(text_loss) / (batch["weights"].numel() - answers),
        "answer_loss": float(answer_loss) / answers if answers else None,  # a batch without a question
        "grad_norm": float(norm),
    }
    if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
        raise FloatingPointError(f"the loss or its gradient is not finite: {metrics}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    metrics["worst_load"] = balancer.step().max().item()
    return metrics


def seconds_per_step(options, tokenizer, corpus):
    """(short, long and rounded): seconds of the two dearest kinds of step, on a throw-away model."""
    seconds = []
    for factor in (1, LONG_FACTOR):
        model = new_model(options, tokenizer)
        if factor > 1:
            round_experts(model)
        optimizer, balancer = optimizer_for(model, options), QuantileBalancer(model)
        batches = StepBatches(corpus, options.seed, options.tokens, lambda _, f=factor: f * options.context)
        times = []
        for step in range(10):
            batch = batches[step]
            started = time.monotonic()
            train_step(model, optimizer, balancer, batch, 0.0, options)
            times.append(time.monotonic() - started)
        seconds.append(statistics.median(times[4:]))
    return seconds


def steps_within(seconds_left, short, long):
    """Steps that fit, with a tenth kept for measuring, saving and the unforeseen."""
    mean = (LONG_FROM - 0.2 * BRIEF_UNTIL) * short + (1 - LONG_FROM) * long + (LONG_FROM - ROUNDED_FROM) * 0.1 * short
    return max(int((0.9 * seconds_left - 40) / mean), 50)


def new_model(options, tokenizer):
    torch.manual_seed(options.seed)
    model = KimiK3ForCausalLM(small_config(tokenizer, **options.config)).to(options.device)
    if options.device.type == "cuda":
        model.set_experts_implementation("padded_bmm")
    return model.train()


def save_state(path, model, optimizer, progress):
    state = {
        "model": master_state(model),
        "optimizer": optimizer.state_dict(),
        "progress": progress,
        "random": torch.get_rng_state(),
    }
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)  # a kill while writing leaves the last state whole


def train(options, tokenizer, corpus, held_out):
    """Runs or continues the training; returns (model, progress), or None if it was stopped before the end."""
    started = options.started
    options.run.mkdir(parents=True, exist_ok=True)
    path, log = options.run / "state.pt", options.run / "metrics.jsonl"
    model = new_model(options, tokenizer)
    optimizer, balancer = optimizer_for(model, options), QuantileBalancer(model)
    if path.exists():
        state = torch.load(path, map_location=options.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"].cpu())
        progress = state["progress"]
        # Lines that were logged after the state was saved are about to be logged again.
        lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] < progress["step"]]
    else:
        steps = options.steps
        if steps is None:
            short, long = seconds_per_step(options, tokenizer, corpus)
            steps = steps_within(options.time_limit - (time.monotonic() - started), short, long)
            print(f"{short:.3f} s for a short step, {long:.3f} s for a long one: {steps} steps", flush=True)
        progress = {"step": 0, "steps": steps, "seconds": 0.0, "tokens": 0, "starts": 0}
        lines = []
    log.write_text("".join(f"{line}\n" for line in lines))
    spent_before = progress["seconds"]
    progress["starts"] += 1
    plan = Plan(progress["steps"], options.context, options.rate)
    batches = StepBatches(corpus, options.seed, options.tokens, plan.context_of)
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=range(progress["step"], plan.steps),
        num_workers=options.workers,
        pin_memory=options.device.type == "cuda",
        prefetch_factor=4 if options.workers else None,
    )
    every = max(plan.steps // options.evaluations, 1)
    bar = tqdm(total=plan.steps, initial=progress["step"], desc="train", unit="step", mininterval=1.0)
    last_save = time.monotonic()
    with log.open("a") as stream:
        for step, batch in zip(range(progress["step"], plan.steps), loader, strict=True):
            if step >= plan.rounded_from and not experts_rounded(model):
                round_experts(model)
            metrics = train_step(model, optimizer, balancer, batch, plan.rate(step), options)
            progress["step"] = step + 1
            progress["tokens"] += batch["labels"].numel()
            progress["seconds"] = spent_before + time.monotonic() - started
            metrics |= {
                "step": step,
                "rate": plan.rate(step),
                "context": plan.context_of(step),
                "tokens": progress["tokens"],
                "seconds": round(progress["seconds"], 2),
            }
            if (step + 1) % every == 0 or step + 1 == plan.steps:
                metrics["evaluation"] = evaluate(
                    model, held_out, [options.context], options.questions, options.context, most_windows=8
                )
            stream.write(json.dumps(metrics) + "\n")
            stream.flush()
            bar.update()
            bar.set_postfix(loss=metrics["loss"], answer=metrics["answer_loss"], refresh=False)
            here = time.monotonic() - started
            stop_now = options.stop_after is not None and here > options.stop_after
            out_of_time = options.time_limit is not None and progress["seconds"] > 0.95 * options.time_limit - 20
            last = stop_now or out_of_time or step + 1 == plan.steps
            if last or time.monotonic() - last_save > SECONDS_BETWEEN_SAVES:
                save_state(path, model, optimizer, progress)
                last_save = time.monotonic()
            if stop_now and step + 1 < plan.steps:
                bar.close()
                print(f"stopped after {here:.0f} s at step {step + 1} of {plan.steps}; run again to continue")
                return None
            if out_of_time and step + 1 < plan.steps:
                print(f"out of time at step {step + 1} of {plan.steps}; saving what there is")
                break
    bar.close()
    return model, progress


def export(model, tokenizer, options):
    """Saves the packed checkpoint into `options.out` and returns it as loaded again from there."""
    config = small_config(tokenizer, **options.config, quantization_config=MXFP4_SECTION)
    packed = KimiK3ForCausalLM.from_pretrained(
        None, config=config, state_dict=packed_state(model), dtype=torch.bfloat16
    )
    packed._a_log_file_shape = None  # A_log is written padded, as released, and not in the shape it had in memory
    packed.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    options.out.mkdir(parents=True, exist_ok=True)
    # The plain method: the folder ships inside the package, so it needs no copy of the package's code.
    PreTrainedModel.save_pretrained(packed, options.out)
    save_tokenizer(tokenizer, options.out)
    return KimiK3ForCausalLM.from_pretrained(options.out, dtype="auto").to(options.device)


def write_sample(options):
    """Held-out text for the demo: the longest held-out chapter of a novel."""
    sources = json.loads((options.data / "corpus.json").read_text())["sources"]
    documents = (options.data / "valid.txt").read_text(encoding="utf-8").split(SEPARATOR)
    novels = documents[sources[0]["valid_documents"] :]
    sample = max(novels, key=len)[:LONGEST_SAMPLE].strip()
    (options.out / "sample.txt").write_text(sample + "\n", encoding="utf-8")


def draw_curves(log, plan, path):
    """Loss and recall over the steps, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = [json.loads(line) for line in log.read_text().splitlines()]
    measured = [entry for entry in entries if "evaluation" in entry]
    blue, orange, green = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito: told apart by colour-blind readers
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    for key, label, colour in (("text_loss", "text", blue), ("answer_loss", "answers", orange)):
        steps, values = zip(*[(entry["step"], entry[key]) for entry in entries if entry[key] is not None], strict=True)
        smooth = list(itertools.accumulate(values, lambda mean, value: 0.9 * mean + 0.1 * value))
        top.plot(steps, values, color=colour, alpha=0.2, linewidth=0.7)
        top.plot(steps, smooth, color=colour, linewidth=1.8, linestyle="-" if key == "text_loss" else "--", label=label)
    top.set_ylabel("training loss (nats per token)")
    bits = [entry["evaluation"]["bits_per_byte"]["all"] for entry in measured]
    accuracy = {
        task: [entry["evaluation"][task][str(plan.context)]["accuracy"] for entry in measured] for task in RECALL_TASKS
    }
    measured_at = [entry["step"] for entry in measured]
    bottom.plot(measured_at, bits, color=blue, marker="o", markersize=4, label="bits per byte")
    for (task, values), colour, style in zip(accuracy.items(), (green, orange), ("--", ":"), strict=True):
        label = f"{task.replace('_', ' ')}, {plan.context} tokens"
        bottom.plot(measured_at, values, color=colour, marker="s", markersize=4, linestyle=style, label=label)
    bottom.set_ylabel("held-out text: bits per byte, share right")
    bottom.set_xlabel("optimizer step")
    bottom.set_ylim(bottom=0)
    for axes in (top, bottom):
        axes.axvline(plan.brief_until, color="0.4", linewidth=1, linestyle="--")
        axes.axvline(plan.rounded_from, color="0.4", linewidth=1, linestyle=":")
        axes.axvline(plan.long_from, color="0.4", linewidth=1, linestyle="-.")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    title = "dashed: windows 4 times as long from here; dotted: experts rounded to MXFP4; dash-dotted: windows doubled"
    top.set_title(title, fontsize=9)
    figure.savefig(path, dpi=90)


def finish(model, progress, options, tokenizer, held_out):
    """Saves the checkpoint, measures what was trained and what was saved, and writes the report."""
    trained = evaluate(model, held_out, [options.context], options.questions, options.context)
    saved_model = export(model, tokenizer, options)
    contexts = [options.context * factor for factor in options.factors]
    saved = evaluate(saved_model, held_out, contexts, options.questions, options.context)
    write_sample(options)
    plan = Plan(progress["steps"], options.context, options.rate)
    draw_curves(options.run / "metrics.jsonl", plan, options.out / "loss.png")
    sizes = {path.name: path.stat().st_size for path in sorted(options.out.iterdir()) if path.is_file()}
    device = torch.cuda.get_device_name() if options.device.type == "cuda" else platform.processor() or "CPU"
    report = {
        "saved_checkpoint": saved,
        "before_packing": trained,
        "training": {
            **progress,
            "seconds": round(progress["seconds"], 1),
            "device": device,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "seed": options.seed,
            "tokens_per_step": options.tokens,
            "context": options.context,
            "long_context": LONG_FACTOR * options.context,
            "peak_learning_rate": options.rate,
            "weight_decay": options.weight_decay,
            "recall_share": RECALL_SHARE,
            "rounded_from_step": plan.rounded_from,
            "brief_until_step": plan.brief_until,
            "long_from_step": plan.long_from,
        },
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "corpus": json.loads((options.data / "corpus.json").read_text()),
        "bytes": sizes,
    }
    (options.out / "training_report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"saved_checkpoint": saved, "before_packing": trained, "bytes": sum(sizes.values())}, indent=1))


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Train the small checkpoint.")
    parser.add_argument("--data", type=Path, required=True, help="folder of corpus.py and tokenizer.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished checkpoint")
    parser.add_argument("--run", type=Path, default=Path(".run/small"), help="folder for state (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="optimizer steps; or give --time-limit")
    parser.add_argument("--time-limit", type=float, help="seconds for everything, over all starts of the run")
    parser.add_argument("--stop-after", type=float, help="save and stop after so many seconds; run again to continue")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens in a step (default: %(default)s)")
    parser.add_argument("--micro-tokens", type=int, default=65_536, help="tokens in a forward pass; less saves memory")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="processes that build batches")
    parser.add_argument("--evaluations", type=int, default=20, help="how often to measure during the training")
    parser.add_argument("--questions", type=int, default=100, help="recall questions at each length")
    parser.add_argument("--factors", type=int, nargs="*", default=[1, 2, 4, 8], help="lengths of the last measurement")
    parser.add_argument("--config", type=json.loads, default={}, help="changed config keys, as JSON")
    options = parser.parse_args(argv)
    options.started = time.monotonic()
    if options.steps is None and options.time_limit is None:
        parser.error("give --steps or --time-limit")
    return options


def main(argv=None):
    options = parse_arguments(argv)
    # Workers tokenize with a thread pool of their own otherwise, which warns and deadlocks after a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.data / "tokenizer")
    corpus, held_out = (Corpus(options.data, split, tokenizer) for split in ("train", "valid"))
    result = train(options, tokenizer, corpus, held_out)
    if result is not None:
        finish(*result, options, tokenizer, held_out)


if __name__ == "__main__":
    main()
