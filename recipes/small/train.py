"""Trains the small checkpoint: a K3-shaped model that writes prose and recalls facts from a long text.

    python recipes/small/corpus.py --out .data                            # the text
    python recipes/small/tokenizer.py --data .data                        # the tokenizer
    python recipes/small/train.py --data .data --out checkpoints/small --time-limit 370

What happens in a run:

* A third of the windows is plain text, the others are recall episodes (episodes.py): only answers count there.
* Windows grow from 256 to 8192 tokens in the stages of `STAGES`, with the same number of tokens in every step: binding
  is learned where facts and questions are dense and near, and stretched from there.
* Per-head Muon, a constant rate that then falls linearly, float32 weights and bfloat16 compute on a GPU. Router balance
  by Quantile Balancing. From `ROUNDED_FROM` on routed experts are rounded to MXFP4 in the forward pass.
* Everything follows from the share of the run that is done: of `--steps`, or of the seconds that `--time-limit` leaves
  between the start and the last measurements. So every stage is reached, however fast the machine is.
* State is saved every minute into `--run`. The same command continues a run that was stopped: with `--steps` on the
  same curve, with `--time-limit` for the training seconds that were left.
* At the end the experts are packed to MXFP4, the rest is rounded to bfloat16, the folder is saved, loaded again and
  measured, and training_report.json, loss.png and sample.txt (held-out text) are written beside it.
"""

import itertools
import json
import math
import os
import platform
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3.cli.common import Parser, UsageError, add_debug, broken, choose_device, run_or_explain
from kimi_k3.conversion.plan import MXFP4_SECTION
from kimi_k3.files_kimi_k3 import load_state, save_state, written_whole
from kimi_k3.recipes.small.corpus import SEPARATOR
from kimi_k3.recipes.small.data import RECALL_SHARE, Corpus, StepBatches
from kimi_k3.recipes.small.episodes import ANSWER_WEIGHT
from kimi_k3.recipes.small.measure import evaluate, evaluate_suite
from kimi_k3.recipes.small.model import MixedPrecision, packed_state, small_config
from kimi_k3.recipes.small.tokenizer import save_tokenizer
from kimi_k3.runs_kimi_k3 import lock, step_of
from kimi_k3.training.balancing import QuantileBalancer
from kimi_k3.training.muon import PerHeadMuon, muon_groups

# (share of the run from which on, tokens in a window, share of the lists whose keys and values are single tokens)
STAGES = ((0.0, 256, 0.6), (0.12, 256, 0.2), (0.3, 1024, 0.1), (0.55, 4096, 0.1), (0.8, 8192, 0.1))
ROUNDED_FROM = 0.7  # share of the run after which experts are rounded to MXFP4
WARMUP, CONSTANT_UNTIL, LAST_RATE = 0.02, 0.4, 0.02
MAX_GRAD_NORM = 1.0
SECONDS_BETWEEN_SAVES = 60
ENDLESS = 10**9
LONGEST_SAMPLE = 36_000  # characters


def rate_at(done, peak):
    """Linear warmup, the peak, then a line to LAST_RATE of it; `done` is the share of the run."""
    falling = (1 - done) / (1 - CONSTANT_UNTIL)
    return peak * min((done + 1e-3) / WARMUP, 1.0, LAST_RATE + (1 - LAST_RATE) * max(falling, 0.0))


def stage_at(done, longest):
    """(index, tokens in a window, easy share) of the stage in which `done` of the run lies."""
    index = max(i for i, (start, *_) in enumerate(STAGES) if done >= start)
    return index, min(STAGES[index][1], longest), STAGES[index][2]


class Trainee:
    """A model with what trains it."""

    def __init__(self, options, tokenizer):
        torch.manual_seed(options.seed)
        master = KimiK3ForCausalLM(small_config(tokenizer, **options.config)).to(options.device)
        self.options = options
        self.weights = MixedPrecision(master, torch.bfloat16 if options.device.type == "cuda" else torch.float32)
        self.model = self.weights.model.train()
        self.optimizer = PerHeadMuon(muon_groups(master, options.weight_decay), lr=options.rate)
        self.balancer = QuantileBalancer(self.model)

    def step(self, batch, rate):
        """One optimizer step on `batch` (see StepBatches); returns the metrics of the step."""
        options = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = {name: tensor.to(options.device, non_blocking=True) for name, tensor in batch.items()}
        rows = max(options.micro_tokens // batch["input_ids"].shape[1], 1)
        total_weight = batch["weights"].sum()
        sums = torch.zeros(6, device=options.device)  # loss; of text and answers: loss, tokens; answer tokens right
        for ids, labels, weights in zip(*(tensor.split(rows) for tensor in batch.values()), strict=True):
            logits = self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            labels, weights = labels.flatten(), weights.flatten()
            losses = F.cross_entropy(logits.float(), labels, reduction="none")
            weighted = (losses * weights).sum() / total_weight
            weighted.backward()
            with torch.no_grad():
                text, answers = weights == 1.0, weights == ANSWER_WEIGHT
                right = logits.argmax(-1) == labels
                counts = text.sum(), (losses * answers).sum(), answers.sum(), (right & answers).sum()
                sums += torch.stack([weighted, (losses * text).sum(), *counts])
            self.weights.take_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.masters, MAX_GRAD_NORM)
        loss, text_loss, texts, answer_loss, answers, right, norm = torch.cat([sums, norm[None]]).tolist()
        if not math.isfinite(loss + norm):
            raise FloatingPointError(f"the loss ({loss}) or its gradient ({norm}) is not finite")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.weights.give_weights()
        return {
            "loss": loss,
            "text_loss": text_loss / texts if texts else None,
            "answer_loss": answer_loss / answers if answers else None,  # of a batch without a question
            "answer_accuracy": right / answers if answers else None,
            "grad_norm": norm,
            "worst_load": self.balancer.step().max().item(),
        }

    def round_experts(self):
        if not self.weights.rounded:
            self.weights.rounded = True
            self.weights.give_weights()

    def save(self, path, progress):
        state = {"model": self.weights.state(), "optimizer": self.optimizer.state_dict(), "progress": progress}
        save_state(state, path)

    def load(self, path):
        """What `save` was given as progress; None without a saved state."""
        state = load_state(path, self.options.device)
        if state is None:
            return None
        self.weights.master.load_state_dict(state["model"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["progress"]


def warm_up(options, tokenizer, corpus):
    """Compiles the kernels of every kind of step on a throw-away model, so that the run's clock does not count it."""
    trainee = Trainee(options, tokenizer)
    for context in sorted({min(context, options.longest) for _, context, _ in STAGES}):
        batches = StepBatches(corpus, options.seed, options.tokens, context, 0.5)
        started = time.monotonic()
        trainee.step(batches[0], 0.0)
        compiled = time.monotonic() - started
        trainee.step(batches[1], 0.0)
        again = time.monotonic() - started - compiled
        print(f"windows of {context}: {compiled:.1f} s for the first step, {again:.3f} s for the second", flush=True)


def lines_before(log, step):
    """The lines of a log about earlier steps, without what a kill or a disk has damaged."""
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    return [line + b"\n" for line in lines if (number := step_of(line)) is not None and number < step]


class Run:
    """The training from its start or from a saved state to its end."""

    def __init__(self, options, tokenizer, corpus, held_out):
        self.options, self.corpus, self.held_out = options, corpus, held_out
        self.path, self.log = options.run / "state.pt", options.run / "metrics.jsonl"
        self.trainee = Trainee(options, tokenizer)
        lines = []
        self.progress = self.trainee.load(self.path)
        if self.progress is not None:
            # Steps after the saved state will log their lines again.
            lines = lines_before(self.log, self.step)
        else:
            if options.device.type == "cuda":
                warm_up(options, tokenizer, corpus)
            budget = None
            if options.steps is None:
                spent = time.monotonic() - options.started
                budget = options.time_limit - options.reserve - spent
                if budget <= 0:
                    raise UsageError(
                        f"--time-limit {options.time_limit:.0f} leaves no second to train: the start took {spent:.0f}, "
                        f"{options.reserve:.0f} are kept for the end (--reserve)"
                    )
            counters = {"step": 0, "trained": 0.0, "tokens": 0, "starts": 0}
            self.progress = {"steps": options.steps, "budget": budget, **counters}
        self.progress["starts"] += 1
        with written_whole(self.log) as aside:
            aside.write_bytes(b"".join(lines))
        self.began, self.before = time.monotonic(), self.progress["trained"]

    @property
    def step(self):
        return self.progress["step"]

    def seconds(self):
        return self.before + time.monotonic() - self.began

    def done(self):
        """The share of the run that is done."""
        if self.progress["steps"] is not None:
            return self.step / self.progress["steps"]
        return self.seconds() / self.progress["budget"]

    def batches(self, context, easy_share):
        """The batches from this step on; workers build them ahead."""
        options = self.options
        return iter(
            DataLoader(
                StepBatches(self.corpus, options.seed, options.tokens, context, easy_share),
                batch_size=None,
                sampler=range(self.step, ENDLESS),
                num_workers=options.workers,
                pin_memory=options.device.type == "cuda",
                prefetch_factor=4 if options.workers else None,
            )
        )

    def train(self):
        """Trains to the end and returns True, or False if `--stop-after` came before it."""
        options, trainee, stage, batches = self.options, self.trainee, None, None
        last_save, measured = time.monotonic(), math.floor(self.done() * options.evaluations)
        bar = tqdm(total=self.progress["steps"], initial=self.step, desc="train", unit="step", mininterval=1.0)
        with bar, self.log.open("a") as stream:
            while (done := self.done()) < 1:
                now, context, easy_share = stage_at(done, options.longest)
                if now != stage:
                    stage, batches = now, self.batches(context, easy_share)
                if done >= ROUNDED_FROM:
                    trainee.round_experts()
                rate, batch = rate_at(done, options.rate), next(batches)
                metrics = trainee.step(batch, rate)
                self.progress["step"] += 1
                self.progress["tokens"] += batch["labels"].numel()
                metrics |= {"step": self.step - 1, "done": round(done, 5), "rate": rate, "context": context}
                metrics["seconds"] = round(self.seconds(), 2)
                if math.floor(self.done() * options.evaluations) > measured:
                    measured += 1
                    length = min(1024, options.longest)
                    metrics["evaluation"] = evaluate(trainee.model, self.held_out, [length], 8, length, most_windows=8)
                stream.write(json.dumps(metrics) + "\n")
                stream.flush()
                bar.update()
                bar.set_postfix(done=done, loss=metrics["loss"], right=metrics["answer_accuracy"], refresh=False)
                self.progress["trained"] = self.seconds()
                here = time.monotonic() - options.started
                stop = options.stop_after is not None and here > options.stop_after and self.done() < 1
                if stop or self.done() >= 1 or time.monotonic() - last_save > SECONDS_BETWEEN_SAVES:
                    trainee.save(self.path, self.progress)
                    last_save = time.monotonic()
                if stop:
                    print(f"stopped after {here:.0f} s at step {self.step}; run again to continue")
                    return False
        return True


def export(state, tokenizer, options):
    """Saves the packed checkpoint into `options.out` and returns it as loaded again from there."""
    config = small_config(tokenizer, **options.config, quantization_config=MXFP4_SECTION)
    packed = KimiK3ForCausalLM.from_pretrained(
        None, config=config, state_dict=packed_state(state), dtype=torch.bfloat16
    )
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


def draw_curves(log, path):
    """Loss and recall over the steps, as a picture."""
    from matplotlib.figure import Figure

    entries = [json.loads(line) for line in log.read_text().splitlines()]
    blue, orange, green, purple = "#0072B2", "#D55E00", "#009E73", "#CC79A7"  # Okabe and Ito
    figure = Figure(figsize=(8, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)

    def curve(axes, key, label, colour, style):
        steps, values = zip(*((entry["step"], entry[key]) for entry in entries if entry[key] is not None), strict=True)
        smooth = list(itertools.accumulate(values, lambda mean, value: 0.9 * mean + 0.1 * value))
        axes.plot(steps, values, color=colour, alpha=0.2, linewidth=0.7)
        axes.plot(steps, smooth, color=colour, linewidth=1.8, linestyle=style, label=label)

    curve(top, "text_loss", "text", blue, "-")
    curve(top, "answer_loss", "answers", orange, "--")
    curve(bottom, "answer_accuracy", "training: tokens of answers right", orange, "--")
    top.set_ylabel("training loss (nats per token)")
    measured = [(entry["step"], entry["evaluation"]) for entry in entries if "evaluation" in entry]
    if measured:
        steps, results = zip(*measured, strict=True)
        bits = [result["bits_per_byte"]["all"] for result in results]
        bottom.plot(steps, bits, color=blue, marker="o", markersize=4, label="held-out text: bits per byte")
        ((length, by_keys),) = results[0]["recall_by_keys"].items()
        for keys, colour, style in zip(by_keys, (green, purple), ("-.", ":"), strict=False):
            exact = [result["recall_by_keys"][length][keys]["exact"] for result in results]
            label = f"held out: whole answers right, {keys} key{'s' * (keys != '1')} in {length} tokens"
            bottom.plot(steps, exact, color=colour, marker="s", markersize=4, linestyle=style, label=label)
    bottom.set_ylabel("bits per byte, share right")
    bottom.set_xlabel("optimizer step")
    bottom.set_ylim(bottom=0)
    longer = [later["step"] for entry, later in itertools.pairwise(entries) if later["context"] != entry["context"]]
    rounded = next((entry["step"] for entry in entries if entry["done"] >= ROUNDED_FROM), None)
    for axes in (top, bottom):
        for step in longer:
            axes.axvline(step, color="0.4", linewidth=1, linestyle="--")
        if rounded is not None:
            axes.axvline(rounded, color="0.4", linewidth=1, linestyle=":")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    contexts = list(dict.fromkeys(entry["context"] for entry in entries))
    top.set_title(f"dashed: windows grow through {contexts}; dotted: experts rounded to MXFP4", fontsize=9)
    figure.savefig(path, dpi=90)


def finish(run, options, tokenizer, held_out):
    """Saves the checkpoint, then measures the trained model and the saved one; writes the report after each part."""
    saved_model = export(run.trainee.weights.state(), tokenizer, options)
    write_sample(options)
    device = torch.cuda.get_device_name() if options.device.type == "cuda" else platform.processor() or "CPU"
    report = {
        "training": {
            **run.progress,
            "seconds": round(time.monotonic() - options.started, 1),
            "device": device,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "seed": options.seed,
            "tokens_per_step": options.tokens,
            "stages": [list(stage) for stage in STAGES],
            "longest": options.longest,
            "peak_learning_rate": options.rate,
            "weight_decay": options.weight_decay,
            "recall_share": RECALL_SHARE,
            "rounded_from": ROUNDED_FROM,
        },
        "parameters": sum(parameter.numel() for parameter in run.trainee.weights.masters),
        "corpus": json.loads((options.data / "corpus.json").read_text()),
    }

    def add(name, results):
        report[name] = results
        (options.out / "training_report.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"{time.monotonic() - options.started:.0f} s, {name}: {json.dumps(results)}", flush=True)

    context = min(1024, options.longest)
    add("saved_checkpoint", evaluate(saved_model, held_out, options.lengths, options.texts, context))
    add("before_packing", evaluate(run.trainee.model, held_out, [context], options.texts, context))
    add("by_generation", evaluate_suite(saved_model, held_out, options.suite_lengths, options.texts))
    draw_curves(run.log, options.out / "loss.png")
    files = (path for path in sorted(options.out.iterdir()) if path.name != "training_report.json")
    add("bytes", {path.name: path.stat().st_size for path in files})


def parse_arguments(argv=None):
    parser = Parser(description="Train the small checkpoint.")
    parser.add_argument("--data", type=Path, required=True, help="folder of corpus.py and tokenizer.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished checkpoint")
    parser.add_argument("--run", type=Path, default=Path(".run/small"), help="folder for state (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="optimizer steps; or give --time-limit")
    parser.add_argument("--time-limit", type=float, help="seconds for everything, where nothing stops the run")
    parser.add_argument("--reserve", type=float, default=90, help="seconds of it for the end (default: %(default)s)")
    parser.add_argument("--stop-after", type=float, help="seconds after which to save and stop; run again to continue")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--longest", type=int, default=8192, help="tokens in a window, at most (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens in a step (default: %(default)s)")
    parser.add_argument("--micro-tokens", type=int, default=65_536, help="tokens in a forward pass; less saves memory")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="processes that build batches")
    parser.add_argument("--evaluations", type=int, default=10, help="how often to measure during the training")
    parser.add_argument("--texts", type=int, default=20, help="texts for each number of the last measurement")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384, 32768], help="of the last measurement"
    )
    parser.add_argument(
        "--suite-lengths", type=int, nargs="*", default=[1024, 8192], help="of the recall suite's tasks, by generation"
    )
    parser.add_argument("--config", type=json.loads, default={}, help="changed config keys, as JSON")
    add_debug(parser)
    options = parser.parse_args(argv)
    options.prog = parser.prog
    options.started = time.monotonic()
    try:
        options.device = choose_device(options.device)
    except UsageError as error:
        parser.error(str(error))
    if not isinstance(options.config, dict):
        parser.error("--config must be a JSON object")
    if options.steps is None and options.time_limit is None:
        parser.error("give --steps or --time-limit")
    if options.tokens < options.longest:
        parser.error(f"a step of --tokens {options.tokens} holds no window of --longest {options.longest}")
    return options


def main(argv=None):
    options = parse_arguments(argv)
    return run_or_explain(options.prog, run, options)


def run(options):
    # Workers tokenize with a thread pool of their own otherwise, which warns and deadlocks after a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with broken(f"the text and tokenizer in {options.data} cannot be used"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.data / "tokenizer")
        corpus, held_out = (Corpus(options.data, split, tokenizer) for split in ("train", "valid"))
    with lock(options.run, UsageError):
        with broken(f"the run in {options.run} cannot go on"):
            training = Run(options, tokenizer, corpus, held_out)
        if training.train():
            finish(training, options, tokenizer, held_out)


if __name__ == "__main__":
    sys.exit(main())
