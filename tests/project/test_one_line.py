"""Whatever ends a command early is one line: damaged files of every kind, errors that nobody foresaw, signals."""

import itertools
import json
import os
import pkgutil
import shutil
import signal
import socket
import sys
import threading

import pytest
import uvicorn
from safetensors.torch import load_file, save_file

from byte_model import save_checkpoint
from kimi_k3 import __main__ as cli
from kimi_k3.cli import common
from waiting import sending

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save_checkpoint(folder / "model", num_experts=None)
    (folder / "text.txt").write_text("The old house stood. " * 20)
    assert cli.main(["trace", str(folder / "trace.jsonl"), "--sessions", "2"]) == 0
    return folder


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


CONFIGURATIONS = {
    "a list": "[]", "a number": "5", "nothing": "", "null": "null", "bytes": b"\xff\xfe\x00", "deep": DEEP,
    "deep objects": '{"a":' * 100_000, "text size": {"hidden_size": "64"},
    "list for a size": {"hidden_size": [64]}, "infinite size": '{"hidden_size": 1e999}',
    "null size": {"hidden_size": None}, "number for layers": {"linear_attn_config": 5},
    "odd layers": {"linear_attn_config": {"kda_layers": 5}},
    "odd quantization": {"quantization_config": "x"}, "list of quantization": {"quantization_config": ["x"]},
    "a folder": None,
}  # fmt: skip
INDEXES = {
    "a list": "[]", "deep": DEEP, "no map": "{}", "number for the map": {"weight_map": 5},
    "number for a file": {"weight_map": {"lm_head.weight": 5}},
    "list for a file": {"weight_map": {"lm_head.weight": []}},
    "no JSON": "{", "bytes": b"\xff\xfe", "missing file": {"weight_map": {"lm_head.weight": "model-1.safetensors"}},
}  # fmt: skip
WEIGHTS = {
    "nothing": b"", "short": b"\x08", "huge header": b"\xff" * 16, "deep header": header(DEEP), "list": header("[]"),
    "number for a tensor": header('{"lm_head.weight": 5}'), "no JSON": header("{"), "a folder": None,
    "odd dtype": header('{"lm_head.weight": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}') + b"1234",
    "text for a shape": header('{"lm_head.weight": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}') + b"1234",
    "past the end": header('{"lm_head.weight": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'),
}  # fmt: skip
TOKENIZERS = {"a list": "[]", "nothing": "", "deep": DEEP, "odd model": {"model": 5}, "bytes": b"\xff\xfe"}

READ_CONFIG = ("generate", "train", "eval", "eval-cost", "cost", "inspect", "convert", "verify", "replay", "serve")
READ_WEIGHTS = ("generate", "train", "eval", "inspect", "convert", "verify", "replay", "serve")
READ_TOKENIZER = ("generate", "train", "eval", "serve")


def arguments(command, model, folder, out):
    """Of a command on the checkpoint folder `model`; data lies in `folder`, and what it would write goes to `out`."""
    more = {
        "generate": ["--prompt", "a", "--max-new-tokens", "1"],
        "train": [folder / "text.txt", "--out", out, "--steps", "1", "--context", "32", "--split-long"],
        "eval": ["--tasks", "single", "--lengths", "600", "--samples", "1", "--depths", "1", "--out", out],
        "eval-cost": ["--lengths", "8", "--out", out],
        "convert": [out],
        "verify": [folder / "model"],
        "serve": ["--port", 0],
    }.get(command, [])
    if command == "replay":
        return [command, folder / "trace.jsonl", "--model", model, "--scale", "4096"]
    return [command, model, *more]


def damage(file, content):
    if content is None:
        file.unlink(missing_ok=True)
        file.mkdir()
    elif isinstance(content, dict):
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | content))
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def cases():
    """(file, name of the damage, content, command): commands take turns, `EACH` of them with every damage."""
    for file, damages, commands in (
        ("config.json", CONFIGURATIONS, READ_CONFIG),
        ("model.safetensors.index.json", INDEXES, READ_WEIGHTS),
        ("model.safetensors", WEIGHTS, READ_WEIGHTS),
        ("tokenizer.json", TOKENIZERS, READ_TOKENIZER),
    ):
        turns = itertools.cycle(commands)
        for name, content in damages.items():
            for command in commands if EACH else [next(turns)]:
                yield file, name, content, command


EACH = False  # which takes a minute


def test_damaged_files_are_named_in_one_line(whole, tmp_path, capsys, monkeypatch):
    def started(*args, **options):
        raise AssertionError("the server was started")

    monkeypatch.setattr(uvicorn.Server, "run", started)
    wrong = []
    for number, (file, name, content, command) in enumerate(cases()):
        model = tmp_path / f"{number}"
        shutil.copytree(whole / "model", model)
        if file.endswith("index.json"):
            (model / "model.safetensors").unlink()
        damage(model / file, content)
        argv = [str(part) for part in arguments(command, model, whole, tmp_path / f"out{number}")]
        code = cli.main(argv)
        out, err = capsys.readouterr()
        if command == "inspect" and code == 0 and "missing: 0" not in out:  # it lists what an incomplete folder lacks
            continue
        lines = err.splitlines()
        said = [line for line in lines if line.startswith(f"kimi-k3 {command}: ")]
        if code != 2 or len(said) != 1 or lines[-1] != said[0] or not (str(model) in said[0] or file in said[0]):
            wrong.append(f"{file}, {name}, {command}: {code}, {lines[-3:]}")
    assert not wrong, "\n".join(wrong)


def changed_model(whole, folder, name, **config):
    """The path of a copy of the model, or of one with other sizes under the same tokenizer."""
    shutil.copytree(whole / "model", folder / name)
    if config:
        save_checkpoint(folder / name, num_experts=None, **config)
    return folder / name


def test_odd_values_are_named_in_one_line(whole, tmp_path, capsys):
    """Whatever would be a wrong text, an open door or a traceback; nothing is written."""
    small = changed_model(whole, tmp_path, "small", vocab_size=100)
    ends, nan = (changed_model(whole, tmp_path, name) for name in ("ends", "nan"))
    (ends / "generation_config.json").write_text('{"eos_token_id": "abc"}')
    tensors = load_file(nan / "model.safetensors")
    tensors["lm_head.weight"][5, 3] = float("nan")
    save_file(tensors, nan / "model.safetensors", metadata={"format": "pt"})
    deep = tmp_path / "deep.jsonl"
    deep.write_text(DEEP)
    many, model, out = "9" * 5000, whole / "model", tmp_path / "out"
    evaluation = ["eval", model, "--tasks", "single", "--out", out, "--lengths"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = [
            (["generate", small, "--prompt", "\x80"], "and the model knows 100: they do not belong together"),
            (["serve", ends, "--port", 0], "ends/generation_config.json is no token id: abc"),
            *(
                (arguments(command, nan, whole, out), "lm_head.weight has 1 values that are not finite")
                for command in ("generate", "train", "eval", "replay", "serve")
            ),
            (["serve", model, "--api-key", ""], "--api-key is empty"),
            (["serve", model, "--port", port], f"cannot listen at 127.0.0.1, port {port}: Address already in use"),
            (["serve", model, "--host", "192.0.2.1"], "cannot listen at 192.0.2.1, port 8000: Cannot assign"),
            (["verify", model, model, "--tolerance", "nan"], "must be a number of at least 0, not 'nan'"),
            (["convert", model, out, "--shard-size", many], "must be a size like 5GB"),
            (["convert", model, out, "--layers", many], "invalid layer_range value"),
            ([*evaluation, many], "is no length"),
            ([*evaluation, "600", "--endpoint", "http://[::1"], "cannot be reached: Invalid IPv6 URL"),
            (["replay", deep, "--model", model], "deep.jsonl, line 1 is no session"),
        ]
        for argv, said in wrong:
            try:
                code = cli.main([str(part) for part in argv])
            except SystemExit as ended:  # argparse's
                code = ended.code
            line = capsys.readouterr().err.splitlines()[-1]
            assert code == 2 and said in line and len(line) < 1200, (argv, code, line)
    assert not (out / "results.jsonl").read_text() and not (out / "model").exists()


def test_an_error_that_nobody_foresaw_is_one_line_with_its_type(whole, tmp_path, capsys, monkeypatch):
    """Exit code 1; `--debug` shows the traceback before the line."""

    def breaks(*args, **options):
        raise LookupError("of two\n lines")

    monkeypatch.setattr("kimi_k3.costs.report.read_cost", breaks)
    assert cli.main(["cost", str(whole / "model")]) == 1
    assert capsys.readouterr().err == "kimi-k3 cost: LookupError: of two lines (--debug shows where)\n"
    assert cli.main(["cost", str(whole / "model"), "--debug"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and "in breaks" in "".join(lines)
    assert lines[-1] == "kimi-k3 cost: LookupError: of two lines (--debug shows where)"
    with pytest.raises(common.UsageError, match=r"^broken: .{1000} \.\.\.$"), common.broken("broken"):
        raise ValueError("x" * 2000)


def test_a_reader_that_leaves_ends_a_command_without_a_word(whole, capsys, monkeypatch):
    """As in `kimi-k3 cost ... | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert cli.main(["cost", str(whole / "model")]) == 141
    assert capsys.readouterr().err == ""


# --- Ctrl-C and SIGTERM ----------------------------------------------------------------------------------------------


SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize(("number", "code"), SIGNALS.items())
def test_interrupted_commands_say_what_is_kept_and_how_to_go_on(number, code, whole, tmp_path, capsys, monkeypatch):
    """Each at a place in the middle of its work."""
    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    run = tmp_path / "run"
    for command, place, at, said in (
        ("generate", "kimi_k3.modeling_kimi_k3.KimiK3ForCausalLM.forward", 4, "3 new tokens are printed above: to go"),
        ("generate", "kimi_k3.cli.generate.load_model", 1, "nothing was generated"),
        ("eval", "kimi_k3.eval.reader.ModelReader.answers", 2, "results.jsonl keeps 1 results, and the same command"),
        ("eval", "kimi_k3.eval.commands.eval_reader", 1, "run is as it was, and the same command goes on"),
        ("eval-cost", "kimi_k3.eval.cost._both", 3, "cost.jsonl keeps 2 results, and the same command goes on"),
        ("replay", "kimi_k3.serving.replay.replay", 2, "what was finished; to go on, ask for --concurrency 2 3"),
        ("replay", "kimi_k3.serving.replay.replay", 1, "nothing was finished"),
        ("train", "kimi_k3.training.commands.trained_model", 1, "run is as it was, and the same command goes on"),
        ("cost", "kimi_k3.costs.report.read_cost", 1, ""),
    ):
        argv = [str(part) for part in arguments(command, whole / "model", whole, run)]
        argv += {
            "generate": ["--max-new-tokens", "20"],
            "eval": ["--samples", "2", "--batch", "1"],
            "eval-cost": ["--lengths", "8,16", "--steps", "1"],
            "replay": ["--concurrency", "1", "2", "3", "--turns", "2"],
        }.get(command, [])
        with monkeypatch.context() as patch:
            patch.setattr(place, sending(number, pkgutil.resolve_name(place), at))
            assert cli.main(argv) == code, command
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"kimi-k3 {command}: interrupted; " if said else f"kimi-k3 {command}: interrupted"), line
        assert said in line
    assert {each: signal.getsignal(each) for each in SIGNALS} == handlers


def test_outside_the_main_thread_signals_are_left_alone(whole, capsys):
    codes = []
    argv = ["generate", str(whole / "model"), "--prompt", "a", "--max-new-tokens", "2"]
    thread = threading.Thread(target=lambda: codes.append(cli.main(argv)))
    thread.start()
    thread.join()
    assert codes == [0]
