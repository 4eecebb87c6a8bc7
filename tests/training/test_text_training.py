"""`kimi-k3 train`: packed local text, chunked cross entropy, killed runs, input that cannot work."""

import json
import math
import shutil
import signal
import subprocess
import sys

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from byte_model import byte_tokenizer
from kimi_k3 import KimiK3ForCausalLM, KimiK3TextConfig, files_kimi_k3
from kimi_k3 import __main__ as cli
from kimi_k3.kernels.cross_entropy import chunked_cross_entropy
from kimi_k3.runs_kimi_k3 import lock
from kimi_k3.training import text_run
from kimi_k3.training.text_data import DataError, PackedRows
from waiting import PATIENCE, sending

WORDS = "the cat sat on a mat and the dog ran to the big red barn by the old mill".split()
VOCABULARY = 257
END_OF_TEXT = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}


def document(seed, words=6):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (words,), generator=generator))


TEXTS = [document(seed, 3 + seed % 5) for seed in range(40)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random MoE model of one KDA and one MLA layer, with a tokenizer of bytes."""
    model = tiny.model("km", vocab_size=VOCABULARY, max_position_embeddings=256, **END_OF_TEXT)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same documents as jsonl and as parquet."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(str(folder / "text.parquet"))
    return folder


# --- packed rows -----------------------------------------------------------------------------------------------------


def rows_of(file, count, context=64, seed=0, split_long=False):
    stream = PackedRows([file], byte_tokenizer(), context, VOCABULARY, seed, split_long)
    return stream, [stream.next_row() for _ in range(count)]


def documents_of(row):
    """Text of every document of a row."""
    ids, starts = row["input_ids"][0], (row["position_ids"][0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], len(ids)]
    return [byte_tokenizer().decode(ids[start:end]) for start, end in zip(starts, ends, strict=True)]


@pytest.mark.one_release
@pytest.mark.parametrize("name", ["text.jsonl", "text.parquet"])
def test_an_epoch_has_every_document_once(data, name, monkeypatch):
    # `datasets` waits five seconds for its threads at the end of every epoch of parquet
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1, raising=False)
    _, rows = rows_of(data / name, 30)
    seen = [text for row in rows for text in documents_of(row)]
    assert sorted(seen[: len(TEXTS)]) == sorted(f"{text}<|end|>" for text in TEXTS)
    assert seen[: len(TEXTS)] != seen[len(TEXTS) : 2 * len(TEXTS)], "the next epoch has another order"
    assert all(row["input_ids"].shape[1] <= 64 for row in rows)


def test_targets_stay_within_a_document(data):
    _, rows = rows_of(data / "text.jsonl", 5)
    for row in rows:
        ids, positions, targets = row["input_ids"][0], row["position_ids"][0], row["targets"]
        last = torch.cat([positions[1:] == 0, torch.tensor([True])])
        assert (targets[last] == -100).all()
        assert torch.equal(targets[~last], ids[1:][~last[:-1]])


def test_a_row_costs_what_its_documents_cost_alone(checkpoint, data):
    """Exact isolation: the loss of a packed row is the sum of its documents', each in a forward of its own."""
    model = KimiK3ForCausalLM.from_pretrained(checkpoint)
    _, rows = rows_of(data / "text.jsonl", 3)
    for row in rows:
        with torch.no_grad():
            hidden = model.model(row["input_ids"], position_ids=row["position_ids"], use_cache=False)[0][0]
            packed = chunked_cross_entropy(hidden, model.lm_head.weight, row["targets"])
            starts = (row["position_ids"][0] == 0).nonzero().flatten().tolist()
            alone = 0.0
            for start, end in zip(starts, [*starts[1:], row["input_ids"].shape[1]], strict=True):
                ids = row["input_ids"][:, start:end]
                alone += model(ids, labels=ids, use_cache=False).loss * (end - start - 1)
        assert len(starts) > 1
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)


@pytest.mark.one_release
def test_the_stream_continues_where_it_was(data):
    stream, _ = rows_of(data / "text.jsonl", 17)
    state = json.loads(json.dumps(stream.state_dict()))
    again, _ = rows_of(data / "text.jsonl", 0)
    again.load_state_dict(state)
    for _ in range(20):
        ours, theirs = stream.next_row(), again.next_row()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.one_release
def test_files_that_lost_documents_are_not_continued(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    stream, _ = rows_of(file, 10)
    file.write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    again, _ = rows_of(file, 0)
    again.load_state_dict(stream.state_dict())
    with pytest.raises(DataError, match=f"have changed: the run has read {stream.taken}"):
        for _ in range(5):
            again.next_row()


@pytest.mark.one_release
def test_long_documents_are_cut_on_request(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(document(0, 200))
    _, rows = rows_of(file, 20, split_long=True)
    pieces = [byte_tokenizer().decode(row["input_ids"][0]) for row in rows]
    assert "".join(pieces[: -(-(len(file.read_text()) + 1) // 64)]) == file.read_text() + "<|end|>"


# --- runs ------------------------------------------------------------------------------------------------------------


FROM_SCRATCH = ["--from-scratch", "--steps", "18", "--rate", "1e-2"]


def arguments(checkpoint, file, out, *more):
    return ["train", str(checkpoint), str(file), "--out", str(out), "--context", "64", "--rows", "2", *more]


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(checkpoint, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main(arguments(checkpoint, data / "text.jsonl", out, *FROM_SCRATCH, "--save-every", "4")) == 0
    return out


@pytest.mark.one_release
def test_the_rate_rises_and_falls_to_a_hundredth():
    run = text_run.TextRun(["a.txt"], 400, 8, 1, 2.0, 0, False)
    assert [run.rate_at(step) for step in (0, 1, 3)] == [0.5, 1.0, 2.0]  # a hundredth of the steps
    assert run.rate_at(201) == pytest.approx(2.0 * (0.01 + 0.99 / 2))
    assert run.rate_at(399) == pytest.approx(0.02)
    rates = [run.rate_at(step) for step in range(400)]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    short = text_run.TextRun(["a.txt"], 2, 8, 1, 2.0, 0, False)
    assert [short.rate_at(0), short.rate_at(1)] == [2.0, pytest.approx(0.02)]


def test_a_run_from_scratch(finished):
    curve = losses(finished)
    assert abs(curve[0] - math.log(VOCABULARY)) < 0.1
    assert curve[-1] < 0.6 * curve[0]
    assert (finished / "curve.png").stat().st_size > 1000
    entry = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"step", "loss", "grad_norm", "rate", "tokens", "router_max_load", "largest_attention_logit"} <= set(entry)


def test_the_saved_model_is_the_trained_one(finished, data, checkpoint):
    trained = KimiK3ForCausalLM.from_pretrained(finished / "model")
    state = torch.load(finished / "state.pt", weights_only=True)["model"]
    assert all(torch.equal(value, state[name]) for name, value in trained.state_dict().items())
    assert any(layer.block_sparse_moe.gate.e_score_correction_bias.any() for layer in list(trained.model.layers)[1:])
    assert cli.main(["generate", str(finished / "model"), "--prompt", "the", "--max-new-tokens", "3"]) == 0


@pytest.mark.one_release
def test_two_runs_are_equal(finished, checkpoint, data, tmp_path):
    argv = arguments(checkpoint, data / "text.jsonl", tmp_path / "run", *FROM_SCRATCH, "--gradient-checkpointing")
    assert cli.main(argv) == 0
    assert losses(tmp_path / "run") == losses(finished)


# The command in processes that are killed, which do not get to its end: they wait behind step 15. What is imported
# before the fork is there already.
KILLED = """
import os, signal, sys, threading
from pathlib import Path
from kimi_k3 import __main__ as cli
from kimi_k3.training.text_run import TextTraining
from waiting import until

one_step = TextTraining._one_step
def step_or_wait(training):
    if training.step == 15:
        threading.Event().wait()
    return one_step(training)
TextTraining._one_step = step_or_wait

log = Path(sys.argv.pop(1))
for lines in (6, 11):
    child = os.fork()
    if child == 0:
        os._exit(cli.main())
    until(lambda: log.exists() and log.read_text().count("\\n") >= lines or os.waitpid(child, os.WNOHANG)[0])
    os.kill(child, signal.SIGKILL)  # raises if it was no longer at work
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


@pytest.mark.one_release
def test_a_killed_run_continues_on_the_same_curve(finished, checkpoint, data, tmp_path):
    """SIGKILL at whatever step it is at, twice; then to the end."""
    command = arguments(checkpoint, data / "text.jsonl", tmp_path / "run", *FROM_SCRATCH, "--save-every", "4")
    log = tmp_path / "run" / "metrics.jsonl"
    script = [sys.executable, "-P", "-c", KILLED, log, *command]
    assert subprocess.run(script, env=tiny.environment(), timeout=PATIENCE).returncode == 0
    assert cli.main(command) == 0
    assert losses(tmp_path / "run") == losses(finished)


@pytest.mark.one_release
def test_a_damaged_state_or_log_ends_in_the_same_model(finished, checkpoint, data, tmp_path, caplog):
    """One flipped bit in the newest state: the run goes on from the one before, on the same curve."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("model"))
    state, log = bytearray((run / "state.pt").read_bytes()), (run / "metrics.jsonl").read_bytes().split(b"\n")
    state[len(state) // 2] ^= 64
    (run / "state.pt").write_bytes(state)
    log[2] = log[2][:-1] + b"\xff"
    (run / "metrics.jsonl").write_bytes(b"\n".join(log))
    assert cli.main(arguments(checkpoint, data / "text.jsonl", run, *FROM_SCRATCH, "--save-every", "4")) == 0
    assert "state.pt is damaged or gone: the run goes on from the state before it" in caplog.text
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (finished / weights).read_bytes()
    assert same(files_kimi_k3.load_state(run / "state.pt"), files_kimi_k3.load_state(finished / "state.pt"))
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    assert lines[2] == log[2]
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], *lines[3:]]))
    assert losses(run) == [*losses(finished)[:2], *losses(finished)[3:]]


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def refusal(capsys, *argv):
    assert cli.main([str(argument) for argument in argv]) == 2
    return capsys.readouterr().err


@pytest.mark.one_release
def test_data_that_cannot_work_is_refused(checkpoint, data, tmp_path, capsys):
    empty, long, other = tmp_path / "empty.txt", tmp_path / "long.txt", tmp_path / "other.jsonl"
    empty.touch()
    long.write_text("x" * 100)
    other.write_text('{"body": "no text here"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "broken.parquet").write_text("not parquet")
    for file, message in (
        (empty, "empty.txt is empty"),
        (tmp_path / "absent.txt", "there is no file"),
        (tmp_path / "data.csv", "all be of one kind"),
        (long, "has 101 tokens, the context 64"),
        (other, "has no `text`, only body"),
        (tmp_path / "broken.jsonl", "cannot be read: "),
        (tmp_path / "broken.parquet", "cannot be read: "),
    ):
        argv = arguments(checkpoint, file, tmp_path / "run", "--steps", "2")
        assert message in refusal(capsys, *argv)


@pytest.mark.one_release
def test_settings_that_cannot_work_are_refused(checkpoint, data, tmp_path, capsys):
    argv = arguments(checkpoint, data / "text.jsonl", tmp_path / "run", "--steps", "2", "--context", "1")
    assert "must be at least 2" in refusal(capsys, *argv)
    config = KimiK3TextConfig.from_pretrained(checkpoint)
    config.num_experts_per_token = config.num_experts
    config.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    argv = arguments(tmp_path / "model", data / "text.jsonl", tmp_path / "run", "--steps", "2", "--from-scratch")
    assert "nothing to balance" in refusal(capsys, *argv)


@pytest.mark.one_release
def test_token_ids_out_of_range_are_refused(checkpoint, data, tmp_path, capsys):
    config = KimiK3TextConfig.from_pretrained(checkpoint)
    config.vocab_size = 100
    config.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    argv = arguments(tmp_path / "model", data / "text.jsonl", tmp_path / "run", "--steps", "2", "--from-scratch")
    assert "vocab_size is 100" in refusal(capsys, *argv)


@pytest.mark.one_release
def test_a_loss_that_is_not_finite_loses_no_state(checkpoint, data, tmp_path, capsys, monkeypatch):
    argv = arguments(checkpoint, data / "text.jsonl", tmp_path / "run", "--steps", "6", "--save-every", "2")
    exact, calls = text_run.chunked_cross_entropy, []

    def breaks(*args):
        calls.append(1)
        return exact(*args) * (float("nan") if len(calls) > 6 else 1)  # two rows a step: in step 4

    monkeypatch.setattr(text_run, "chunked_cross_entropy", breaks)
    assert "step 4: the loss is nan" in refusal(capsys, *argv)
    monkeypatch.setattr(text_run, "chunked_cross_entropy", exact)
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["step"] == 2
    assert cli.main(argv) == 0
    assert len(losses(tmp_path / "run")) == 6


@pytest.mark.one_release
def test_a_run_that_meets_a_long_document_goes_on_when_it_may_be_cut(checkpoint, tmp_path, capsys):
    file, run = tmp_path / "text.jsonl", tmp_path / "run"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "x" * 100]))
    argv = arguments(checkpoint, file, run, "--steps", "8", "--save-every", "1")
    assert "cut long documents with --split-long" in refusal(capsys, *argv)
    before = losses(run)
    assert 0 < len(before) < 8
    assert cli.main([*argv, "--split-long"]) == 0
    assert losses(run)[: len(before)] == before and len(losses(run)) == 8
    assert "split_long was True, is False" in refusal(capsys, *argv)


@pytest.mark.one_release
def test_a_damaged_state_or_a_file_for_a_folder_is_one_sentence(checkpoint, data, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.pt").write_text("not a state")
    argv = arguments(checkpoint, data / "text.jsonl", tmp_path / "run", "--steps", "2")
    assert "state.pt is damaged: remove it" in refusal(capsys, *argv)
    argv = arguments(checkpoint, data / "text.jsonl", tmp_path / "run" / "state.pt", "--steps", "2")
    assert "is a file: name a folder" in refusal(capsys, *argv)
    with pytest.raises(SystemExit):
        cli.main([*argv, "--seed", "-5"])


@pytest.mark.one_release
def test_a_run_of_other_settings_is_not_continued(finished, checkpoint, data, capsys):
    argv = arguments(checkpoint, data / "text.jsonl", finished, "--steps", "40", "--from-scratch")
    assert "steps was 18, is 40" in refusal(capsys, *argv)


# --- stopped runs ----------------------------------------------------------------------------------------------------


@pytest.mark.one_release
def test_a_stopped_run_saves_first_and_continues_on_the_same_curve(
    finished, checkpoint, data, tmp_path, monkeypatch, capfd
):
    """Wherever in a step the signal comes: the step is finished, and its state is saved."""
    run = tmp_path / "run"
    argv = arguments(checkpoint, data / "text.jsonl", run, *FROM_SCRATCH, "--save-every", "20")
    for number, code, step, owner, name, call in (
        (signal.SIGINT, 130, 3, text_run, "chunked_cross_entropy", 5),
        (signal.SIGTERM, 143, 9, text_run.PerHeadMuon, "step", 6),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, sending(number, getattr(owner, name), call))
            assert cli.main(argv) == code
        lines = capfd.readouterr().err.splitlines()
        assert any("the state is saved behind this step" in line for line in lines)
        kept = f"{run} keeps the state after step {step} of 18, and the same command goes on from there"
        assert lines[-1] == f"kimi-k3 train: interrupted; {kept}"
        assert torch.load(run / "state.pt", weights_only=True)["step"] == step == len(losses(run))
    assert cli.main(argv) == 0
    assert losses(run) == losses(finished)


@pytest.mark.one_release
def test_a_second_signal_stops_a_run_at_once(checkpoint, data, tmp_path, monkeypatch, capfd):
    run = tmp_path / "run"
    argv = arguments(checkpoint, data / "text.jsonl", run, "--steps", "9", "--save-every", "2")
    twice = sending(signal.SIGINT, sending(signal.SIGTERM, text_run.chunked_cross_entropy, 7), 7)  # in the fourth step
    monkeypatch.setattr(text_run, "chunked_cross_entropy", twice)
    assert cli.main(argv) == 143
    assert "interrupted; " + f"{run} keeps the state after step 2 of 9" in capfd.readouterr().err.splitlines()[-1]
    assert torch.load(run / "state.pt", weights_only=True)["step"] == 2


@pytest.mark.one_release
def test_two_processes_do_not_work_in_one_folder(checkpoint, data, tmp_path, capsys):
    """Nor is a run continued in whose log two have written."""
    run = tmp_path / "run"
    argv = arguments(checkpoint, data / "text.jsonl", run, "--steps", "2")
    with lock(run, DataError):
        assert f"another process is working in {run}" in refusal(capsys, *argv)
    assert [file.name for file in run.iterdir()] == ["lock"]
    assert cli.main(argv) == 0
    log = run / "metrics.jsonl"
    first, second = log.read_text().splitlines(keepends=True)
    log.write_text(first + first + second)
    assert "has 3 lines of 2 steps: two runs have written it" in refusal(capsys, *argv)
    assert log.read_text() == first + first + second
    log.write_text(first + second + '{"step"')
    assert cli.main(argv) == 0 and log.read_text() == first + second


@pytest.mark.one_release
@pytest.mark.parametrize("file", ["state.pt", "metrics.jsonl", "model"])
def test_a_disk_that_fills_leaves_the_last_state(file, checkpoint, data, tmp_path, monkeypatch, capsys):
    """At the second state, at a line of the log, at the trained model; with room again the run goes on."""
    resource = pytest.importorskip("resource")
    usual, run = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "run"
    argv = arguments(checkpoint, data / "text.jsonl", run, "--steps", "6", "--save-every", "2")
    owner, name, call, room, kept = {
        "state.pt": (text_run, "save_state", 2, 10_000, 2),
        "metrics.jsonl": (text_run.TextTraining, "_one_step", 5, 200, 4),
        "model": (KimiK3ForCausalLM, "save_pretrained", 1, 1000, 6),
    }[file]
    exact, calls = getattr(owner, name), []

    def full(*args, **options):
        calls.append(1)
        if len(calls) == call:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, usual[1]))
        return exact(*args, **options)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            line = refusal(capsys, *argv).splitlines()[-1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    keeps = f"{run} keeps the state after step {kept} of 6, and the same command goes on from there"
    assert line == f"kimi-k3 train: {run / file} cannot be written (File too large): {keeps}"
    assert torch.load(run / "state.pt", weights_only=True)["step"] == kept
    assert cli.main(argv) == 0
    assert len(losses(run)) == 6 and (run / "model" / "model.safetensors").exists()


@pytest.mark.one_release
def test_a_run_goes_on_with_the_same_content_only(checkpoint, data, tmp_path, capsys):
    """Places of files do not matter; another text, tokenizer, configuration or weight is named, and nothing changes."""
    run, model, file = tmp_path / "run", tmp_path / "model", tmp_path / "moved.jsonl"
    argv = arguments(model, file, run, "--steps", "2", "--save-every", "1")
    shutil.copytree(checkpoint, model)
    shutil.copyfile(data / "text.jsonl", file)
    started = arguments(checkpoint, data / "text.jsonl", run, "--steps", "2", "--save-every", "1")
    assert cli.main(started) == 0 and cli.main(argv) == 0
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}

    def with_another_weight(path):
        weights = load_file(path)
        weights["lm_head.weight"][3, 5] += 1e-3
        save_file(weights, path, metadata={"format": "pt"})

    def replaced(path, old, new):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    for path, damage, said in (
        (file, lambda path: replaced(path, "cat", "dog"), f"the content of {file} is another"),
        (model / "tokenizer.json", lambda path: replaced(path, '"normalizer": null', '"normalizer": {"type": "NFC"}'),
         "the tokenizer is another"),
        (model / "config.json", lambda path: replaced(path, '"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'),
         "rms_norm_eps was 1e-05, is 1e-06"),
        (model / "model.safetensors", with_another_weight, "the weights that it began with were others"),
    ):  # fmt: skip
        whole = path.read_bytes()
        damage(path)
        assert said in refusal(capsys, *argv)
        path.write_bytes(whole)
    assert "1 data files were given, now 2" in refusal(capsys, *argv[:3], file, *argv[3:])
    assert "from_scratch was False, is True" in refusal(capsys, *argv, "--from-scratch")
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert cli.main(argv) == 0
