"""Training of a model on local text, with everything on disk that a killed run needs to continue on the same curve.

The optimizer is per-head Muon with QK-clip, the experts are balanced by Quantile Balancing, the learning rate warms up
over 1 % of the steps and falls along a cosine (Kimi K3 report, p. 10-11). A run folder holds

    state.pt         model, optimizer, position in the data: replaced as a whole, so a kill while writing loses nothing
    state.before.pt  the one before it, from which a run goes on whose newest state was damaged
    metrics.jsonl    a line for every step
    curve.png        loss and load over the steps, where matplotlib is installed
    model/           the trained model and its tokenizer, once the run is finished
"""

import contextlib
import dataclasses
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from .. import KimiK3ForCausalLM
from ..files_kimi_k3 import DamagedFile, file_digest, load_state, save_state, tensors_sum, written_whole
from ..fingerprint_kimi_k3 import computation_of
from ..kernels.cross_entropy import IGNORED, chunked_cross_entropy
from ..packing_kimi_k3 import Packing
from ..runs_kimi_k3 import changes, lock, postponed_stop, step_of, tokenizer_digest
from .balancing import QuantileBalancer
from .captured import CapturedStep
from .muon import PerHeadMuon, QKClip, muon_groups
from .text_data import DataError, PackedRows, filled_row

WARMUP = 0.01
MAX_GRAD_NORM = 1.0


@dataclasses.dataclass
class TextRun:
    """The parameters of a run, which can only be continued with the same ones, or with `split_long` added.

    Attributes:
        files: the training data (see `PackedRows`).
        steps: optimizer steps.
        context: tokens in a packed row, at most.
        rows: packed rows in a step.
        rate: peak learning rate.
        seed: of the weights of a new model and of the order of the data.
        split_long: cut documents that are longer than the context.
        from_scratch: the weights of the model are new.
    """

    files: list[str]
    steps: int
    context: int
    rows: int
    rate: float
    seed: int
    split_long: bool
    from_scratch: bool = False

    def rate_at(self, step: int) -> float:
        """Linear warmup, then a cosine to a hundredth of the peak."""
        warmup = max(round(WARMUP * self.steps), 1)
        progress = max(step + 1 - warmup, 0) / max(self.steps - warmup, 1)
        return self.rate * min((step + 1) / warmup, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


class TextTraining:
    """A run on one device: `train()` does the remaining steps.

    Args:
        model: float32 parameters; bfloat16 compute on a GPU.
        tokenizer: of transformers.
        run: its parameters.
        folder: the run folder; a state in it is continued.
        save_every: steps between two saved states.
        captured: on a GPU, replay forward and backward as CUDA graphs (`CapturedStep`), on rows that are filled up to a
            few lengths.
    """

    def __init__(
        self, model: KimiK3ForCausalLM, tokenizer, run: TextRun, folder: Path, save_every: int, captured: bool = False
    ):
        self.model, self.tokenizer, self.run, self.folder, self.save_every = model, tokenizer, run, folder, save_every
        files = [Path(file) for file in run.files]
        self.data = PackedRows(files, tokenizer, run.context, model.config.vocab_size, run.seed, run.split_long)
        self.inputs = inputs_of(run, model, tokenizer)
        self.optimizer = PerHeadMuon(muon_groups(model), lr=run.rate)
        try:
            self.balancer = QuantileBalancer(model) if model.config.num_experts else None
        except ValueError as error:  # a kind of routing that cannot be balanced
            raise DataError(str(error)) from error
        self.clip = QKClip(model) if "full_attention" in model.config.layer_types else None
        self.captured = CapturedStep(model, functools.partial(forward_and_backward, model)) if captured else None
        self.step = self.tokens = self.saved_step = 0
        self.state_file, self.log_file = folder / "state.pt", folder / "metrics.jsonl"
        self._lock = lock(folder, DataError)  # until `train` has returned, or nobody holds this object
        self._load()
        # Steps after the saved state will write their lines again; the kill may have cut off the last line.
        with self._writing(self.log_file), written_whole(self.log_file) as aside:
            aside.write_bytes(b"".join(_lines_until(self.log_file, self.step)))

    def kept(self) -> str:
        """What an interruption leaves, and how to go on."""
        saved = f"{self.folder} keeps the state after step {self.saved_step} of {self.run.steps}"
        return f"{saved if self.saved_step else 'no step was saved yet'}, and the same command goes on from there"

    @contextlib.contextmanager
    def _writing(self, file: Path):
        """Around the writing of a file: a disk that is full, for example, ends the run with a sentence."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, OSError):  # torch's writer fails because of one
                reason = reason.__context__
            said = error if reason is None else reason.strerror or reason
            raise DataError(f"{file} cannot be written ({said}): {self.kept()}") from error

    def train(self) -> None:
        """Do the remaining steps, then save the model.

        Raises:
            FloatingPointError: for a loss or gradient that is not finite; the last saved state stays as it is.
            DataError: for data that cannot be read on, and a folder that cannot be written any more, where the last
                saved state stays too.
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once the step under way is done and its state is saved; at once
                after a second one, which leaves the last saved state.
        """
        with self._lock:
            self._steps()
            with self._writing(self.folder / "model"):
                self.model.save_pretrained(self.folder / "model")
                self.tokenizer.save_pretrained(self.folder / "model")
            draw_curve(self.log_file, self.folder / "curve.png")

    def _steps(self):
        self.model.train()
        bar = tqdm(total=self.run.steps, initial=self.step, desc="train", unit="step", mininterval=1.0)
        notice = "the state is saved behind this step; Ctrl-C again stops at once"
        with bar, postponed_stop(notice) as stops:
            while self.step < self.run.steps:
                metrics = self._one_step()
                with self._writing(self.log_file), self.log_file.open("a") as log:
                    log.write(json.dumps(metrics) + "\n")
                bar.update()
                bar.set_postfix(loss=f"{metrics['loss']:.3f}", refresh=False)
                if self.step % self.save_every == 0 or self.step == self.run.steps or stops:
                    self._save()
                if stops:
                    raise stops[0]

    def _one_step(self):
        started = time.perf_counter()
        rate = self.run.rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = [self.data.next_row() for _ in range(self.run.rows)]
        counted = sum((row["targets"] != IGNORED).sum() for row in rows)
        parts = [self._part(row | {"counted": counted}) for row in rows]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # Read behind the step, so that the device has work while the host waits.
        *parts, norm = torch.stack([*parts, norm]).tolist()
        loss = sum(parts)
        if not math.isfinite(loss + norm):
            raise FloatingPointError(
                f"step {self.step + 1}: the loss is {loss} and the gradient's norm {norm}; the last saved state is "
                "untouched"
            )
        self.step += 1
        self.tokens += sum(row["input_ids"].numel() for row in rows)
        metrics = {"step": self.step, "loss": loss, "grad_norm": norm, "rate": rate, "tokens": self.tokens}
        if self.balancer is not None:
            metrics["router_max_load"] = self.balancer.step().max().item()
        if self.clip is not None:
            metrics["largest_attention_logit"] = self.clip.step().max().item()
        metrics["seconds"] = round(time.perf_counter() - started, 3)
        return metrics

    def _part(self, row):
        """A row's part of the loss [], detached, whose gradients are added to the model's."""
        if self.captured is not None and self.captured.has_graphs:
            return self.captured(**filled_row(row, self.run.context))
        row = {name: tensor.to(self.model.device) for name, tensor in row.items()}
        return forward_and_backward(self.model, **row).detach()

    def _save(self):
        state = {
            "run": dataclasses.asdict(self.run),
            "inputs": self.inputs,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.data.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
        }
        with self._writing(self.state_file):
            save_state(state, self.state_file)
        self.saved_step = self.step

    def _changes(self, state) -> list[str]:
        """What is not as it was when the run began."""
        before, now = dict(state["run"]), dataclasses.asdict(self.run)
        if self.run.split_long:  # a run that stopped at a long document may go on: it has met none before
            before["split_long"] = True
        names = now.pop("files")
        changed = changes(before, now)
        before, now = state["inputs"], self.inputs
        if len(before["data"]) != len(names):
            changed.append(f"{len(before['data'])} data files were given, now {len(names)}")
        elif before["data"] != now["data"]:
            pairs = zip(before["data"], now["data"], strict=True)
            others = [name for name, (was, content) in zip(names, pairs, strict=True) if was != content]
            changed.append(f"the content of {', '.join(others)} is another")
        if before["tokenizer"] != now["tokenizer"]:
            changed.append("the tokenizer is another")
        changed += changes(before["configuration"], now["configuration"])
        if before["weights"] != now["weights"]:
            changed.append("the weights that it began with were others")
        return changed

    def _load(self):
        try:
            state = load_state(self.state_file, self.model.device)
        except DamagedFile as error:
            raise DataError(str(error)) from error
        if state is None:
            return
        if changed := self._changes(state):
            raise DataError(f"{self.folder} holds a run of other settings ({'; '.join(changed)}): choose a new folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.data.load_state_dict(state["data"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.saved_step = self.step


def forward_and_backward(model, input_ids, targets, counted, position_ids=None, **packing) -> torch.Tensor:
    """A row's part of the loss [], whose gradients it adds to the model's; of a filled row there is its packing."""
    where = {"packing": Packing(None, **packing)} if packing else {"position_ids": position_ids}
    device = input_ids.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        hidden = model.model(input_ids, use_cache=False, **where)[0]
        part = chunked_cross_entropy(hidden[0], model.lm_head.weight, targets) / counted
    part.backward()
    return part


def inputs_of(run: TextRun, model: KimiK3ForCausalLM, tokenizer) -> dict[str, Any]:
    """What a run depends on beside its parameters, by content: names and places of files do not count."""
    weights = {} if run.from_scratch else model.state_dict()  # new ones follow from configuration and seed
    return {
        "data": [f"{Path(file).suffix} {file_digest(Path(file))}" for file in run.files],
        "tokenizer": tokenizer_digest(tokenizer),
        "weights": tensors_sum("", weights),
        "configuration": computation_of(model.config),
    }


def _lines_until(log: Path, step: int) -> list[bytes]:
    """The lines of a log up to that of a step, without what a kill cut off; damaged ones stay in their place.

    Raises:
        DataError: for a log in which two runs have written.
    """
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    steps = [step_of(line) for line in lines]
    known = [number for number in steps if number is not None]
    if known and len(known) > max(known):
        raise DataError(
            f"{log} has {len(known)} lines of {max(known)} steps: two runs have written it, so move it away"
        )
    later = (place for place, number in enumerate(steps) if number is not None and number > step)
    return [line + b"\n" for line in lines[: next(later, None)]]


def draw_curve(log: Path, picture: Path) -> None:
    """Loss over the steps and, with experts, the load of the fullest one; nothing where matplotlib is missing.

    Lines that were damaged are left out.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    points: list[tuple[float, float]] = []
    loads: list[tuple[float, float]] = []
    for line in log.read_bytes().splitlines():
        with contextlib.suppress(ValueError, LookupError, TypeError):
            entry = json.loads(line)
            points.append((float(entry["step"]), float(entry["loss"])))
            loads.append((points[-1][0], float(entry["router_max_load"])))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), color="#0072B2")
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.25)
    if loads:
        load = axes.twinx()
        load.plot(*zip(*loads, strict=True), color="#D55E00", linewidth=0.8, linestyle="--")
        load.set_ylabel("fullest expert / mean load (dashed)")
    figure.savefig(picture, dpi=90)
