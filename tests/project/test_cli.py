"""The command line and the demo: refusals are one sentence and exit code 2, results are those of `generate()`."""

import argparse
import io
import os
import re
import shutil
import sys

import pytest
import torch

import tiny
from byte_model import POSITIONS, byte_tokenizer, save_checkpoint
from kimi_k3 import CACHE_ARGUMENT, HybridCache, KimiK3ForCausalLM, KimiK3TextConfig, demo
from kimi_k3 import __main__ as cli
from kimi_k3.cli import common, generate


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a dense float32 model."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_experts=None)


@pytest.fixture(scope="module")
def packed_checkpoint(tmp_path_factory):
    """Folder of a float32 model whose routed experts are packed MXFP4."""
    return save_checkpoint(tmp_path_factory.mktemp("packed"), **tiny.PACKED)


@pytest.fixture
def without_weights(checkpoint, tmp_path):
    """The checkpoint without its weights: what is refused here is refused before they are read."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def refusal(capsys, program, argv) -> str:
    """The sentence that `program` refuses `argv` with; asserts exit code 2, one line, nothing on stdout."""
    try:
        code = program([str(argument) for argument in argv])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.endswith("\n") and err.count("\n") == 1, err
    return err.strip()


# What a command does about an option that is left out; one that is not named here is off or decided later.
DEFAULTS = {
    "generate": {"--max-new-tokens": 128, "--temperature": 0.0, "--top-p": 1.0, "--seed": 0, "--device": "auto",
                 "--dtype": "auto"},
    "train": {"--context": 1024, "--rows": 16, "--rate": 1e-3, "--save-every": 100, "--seed": 0, "--device": "auto"},
    "convert": {"--layout": "released", "--shard-size": "5GB"},
    "verify": {"--tolerance": 0.0, "--seed": 0},
    "inspect": {},
    "eval": {"--haystack": ["repeat"], "--depths": 5, "--samples": 10, "--seed": 0, "--chunk": 4096, "--device": "auto",
             "--timeout": 600},
    "eval-cost": {"--rows": 1, "--steps": 32, "--chunk": 4096, "--device": "auto"},
    "cost": {"--gpu": "b300", "--gpus": 8, "--context": 131072},
    "trace": {"--sessions": 300, "--seed": 0},
    "replay": {"--concurrency": [1, 4, 16, 64], "--host-bytes": 0, "--disk-bytes": 0, "--device-bytes": 10**9,
               "--scale": 256, "--turns": 200, "--device": "auto", "--gpu": "b300", "--gpus": 8, "--minutes": 40},
    "serve": {"--host": "127.0.0.1", "--port": 8000, "--device": "auto", "--dtype": "auto", "--device-bytes": 10**9,
              "--host-bytes": 0, "--disk-bytes": 10**10, "--max-new-tokens": 4096, "--max-seconds": 300,
              "--max-waiting": 256, "--max-connections": 512, "--max-running": 64,
              "--evicted-bytes": 0},
    "cache": {},
    "warmup": {"--batch-size": [1], "--prompt": [1024]},
}  # fmt: skip


@pytest.mark.parametrize("command", DEFAULTS)
def test_options_that_are_left_out(command):
    """The values are these, and what the help says of one is true of it."""
    assert DEFAULTS.keys() == cli.COMMANDS.keys()
    parser = common.Parser()
    cli.COMMANDS[command][1](parser)
    actions = {action.option_strings[-1]: action for action in parser._actions if action.option_strings}
    given = {name: action.default for name, action in actions.items() if name != "--help"}
    assert {name: value for name, value in given.items() if value is not None and value is not False} == (
        DEFAULTS[command]
    )
    for name, action in actions.items():
        text = (action.help or "") % {"default": action.default}
        if said := re.search(r"default: (\d+(?:\.\d+)?)(G?)\)?$", text):
            value = action.default[0] if isinstance(action.default, list) else action.default
            assert value == float(said[1]) * (10**9 if said[2] else 1), name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param([], "COMMAND", id="no command"),
        pytest.param(["translate"], "invalid choice: 'translate'", id="unknown command"),
        pytest.param(["generate"], "required: MODEL", id="no model"),
        pytest.param(["generate", "MODEL"], "one of the arguments --prompt --prompt-file is required", id="no prompt"),
        pytest.param(
            ["generate", "MODEL", "--prompt", "a", "--prompt-file", "b"], "not allowed with", id="two prompts"
        ),
        pytest.param(["generate", "MODEL", "--prompt", ""], "the prompt is empty", id="empty prompt"),
        pytest.param(["generate", "MODEL", "--prompt", " \n"], "the prompt is empty", id="blank prompt"),
        pytest.param(["generate", "MODEL", "--prompt-file", "gone.txt"], "cannot read gone.txt", id="no prompt file"),
        pytest.param(["generate", "MODEL", "--prompt", "a", "--dtype", "int3"], "invalid choice: 'int3'", id="dtype"),
        pytest.param(["generate", "MODEL", "--prompt", "a", "--device", "tpu"], "invalid choice: 'tpu'", id="device"),
        pytest.param(
            ["generate", "MODEL", "--prompt", "a", "--max-new-tokens", "0"],
            "argument --max-new-tokens: must be a whole number of at least 1, not '0'",
            id="no new tokens",
        ),
        pytest.param(
            ["generate", "MODEL", "--prompt", "a", "--temperature", "-1"],
            "argument --temperature: must be a number of at least 0, not '-1'",
            id="negative temperature",
        ),
        pytest.param(
            ["generate", "MODEL", "--prompt", "a", "--temperature", "nan"], "--temperature", id="temperature nan"
        ),
        pytest.param(
            ["generate", "MODEL", "--prompt", "a", "--top-p", "1.5"],
            "argument --top-p: must be a number above 0 and at most 1, not '1.5'",
            id="top-p above one",
        ),
        pytest.param(
            ["generate", "MODEL", "--prompt", "a", "--top-p", "0.9"], "--top-p needs a --temperature", id="greedy top-p"
        ),
        pytest.param(["generate", "MODEL", "--prompt", "a", "--seed", "-1"], "argument --seed", id="negative seed"),
        pytest.param(
            ["generate", "MODEL", "--prompt", "a" * POSITIONS, "--max-new-tokens", "1"],
            f"the prompt has {POSITIONS} tokens and 1 new ones are asked for, "
            f"but the model's max_position_embeddings is {POSITIONS}",
            id="prompt too long",
        ),
    ],
)
def test_refusals(arguments, sentence, without_weights, capsys):
    arguments = [without_weights if argument == "MODEL" else argument for argument in arguments]
    assert sentence in refusal(capsys, cli.main, arguments)


def test_refuses_a_folder_that_is_no_checkpoint(checkpoint, without_weights, tmp_path, capsys):
    command = ["generate", tmp_path / "nowhere", "--prompt", "a"]
    assert f"there is no checkpoint folder {tmp_path / 'nowhere'}" in refusal(capsys, cli.main, command)

    command[1] = tmp_path
    assert "has no config.json" in refusal(capsys, cli.main, command)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    for refused in (command, ["inspect", tmp_path]):
        sentence = refusal(capsys, cli.main, refused)
        assert f"{tmp_path} holds an adapter of some/base and no model" in sentence and "merge_and_unload" in sentence

    command[1] = without_weights
    (without_weights / "tokenizer.json").unlink()
    assert f"no tokenizer can be loaded from {without_weights}" in refusal(capsys, cli.main, command)

    shutil.copyfile(checkpoint / "tokenizer.json", without_weights / "tokenizer.json")
    assert f"the weights in {without_weights} cannot be loaded" in refusal(capsys, cli.main, command)

    (without_weights / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert "linear_attn_config is missing" in refusal(capsys, cli.main, command)


def test_refuses_a_prompt_file_that_is_not_text(without_weights, tmp_path, capsys):
    path = tmp_path / "prompt.bin"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(capsys, cli.main, ["generate", without_weights, "--prompt-file", path])
    half = os.fsdecode(b"caf\xe9")  # how Python passes on such an argument
    assert "the prompt is not UTF-8 text" in refusal(capsys, cli.main, ["generate", without_weights, "--prompt", half])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_refuses_cuda_without_a_gpu(without_weights, capsys):
    command = ["generate", without_weights, "--prompt", "a", "--device", "cuda"]
    assert "--device cuda needs a CUDA GPU" in refusal(capsys, cli.main, command)


def test_refuses_to_dequantize_what_is_not_packed(without_weights, capsys):
    command = ["generate", without_weights, "--prompt", "a", "--dequantize"]
    assert "--dequantize" in refusal(capsys, cli.main, command)


def continuation(capsys, checkpoint, *arguments) -> tuple[str, str]:
    """(stdout, stderr) of a `kimi-k3 generate` that succeeds."""
    assert cli.main(["generate", str(checkpoint), "--device", "cpu", *map(str, arguments)]) == 0
    return capsys.readouterr()


def test_generate_streams_what_the_model_generates(checkpoint, capsys):
    prompt, new = "The old house", 12
    out, err = continuation(capsys, checkpoint, "--prompt", prompt, "--max-new-tokens", new)

    tokenizer = byte_tokenizer()
    model = KimiK3ForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    expected = expected[0, len(prompt) :]
    assert out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"

    assert re.search(rf"prefill +{len(prompt)} tokens in [\d.]+ s: [\d.,]+ tokens/s", err)
    assert re.search(rf"decode +{len(expected) - 1} tokens in [\d.]+ s: [\d.,]+ tokens/s", err)
    # The last token is never fed back, so the cache does not hold it.
    assert re.search(rf"cache +[\d,]+ bytes for {len(prompt) + len(expected) - 1} tokens", err)


def test_generate_reads_the_prompt_from_a_file(checkpoint, tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_bytes("Überall, 北京\r\n".encode())
    from_file, _ = continuation(capsys, checkpoint, "--prompt-file", path, "--max-new-tokens", 8)
    given, _ = continuation(capsys, checkpoint, "--prompt", "Überall, 北京\r\n", "--max-new-tokens", 8)
    assert from_file == given


def test_a_terminal_without_the_characters_of_a_text_shows_their_numbers(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert common.run_or_explain("a command", lambda args: print("北 a"), argparse.Namespace(debug=False)) == 0
    assert written.getvalue() == b"\\u5317 a\n"


def test_seed_decides_the_sample(checkpoint, capsys):
    def sample(seed):
        options = ("--max-new-tokens", 16, "--temperature", 1.5, "--top-p", 0.95, "--seed", seed)
        return continuation(capsys, checkpoint, "--prompt", "Once", *options)[0]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantized_experts_say_the_same(packed_checkpoint, dtype, capsys):
    command = ("--prompt", "An expert", "--max-new-tokens", 12, "--dtype", dtype)
    packed, _ = continuation(capsys, packed_checkpoint, *command)
    dequantized, _ = continuation(capsys, packed_checkpoint, *command, "--dequantize")
    assert dequantized == packed

    model = common.load_model(packed_checkpoint, torch.device("cpu"), dtype, dequantize=True)
    assert {p.dtype for name, p in model.named_parameters() if ".experts." in name} == {getattr(torch, dtype)}


def test_dtype_is_that_of_the_checkpoint_unless_named(checkpoint):
    cpu = torch.device("cpu")
    assert common.load_model(checkpoint, cpu).dtype == torch.float32
    assert common.load_model(checkpoint, cpu, "bfloat16").dtype == torch.bfloat16


def test_full_attention_bytes_of_the_released_model():
    # 93 layers, 96 heads, keys of 128 + 64, values of 128, two bytes: 5,713,920 bytes a token.
    assert generate.full_attention_bytes(KimiK3TextConfig(), 1, torch.bfloat16) == 93 * 96 * (192 + 128) * 2
    assert generate.full_attention_bytes(KimiK3TextConfig(), 1000, torch.float32) == 93 * 96 * (192 + 128) * 1000 * 4


def test_generate_continues_a_cache_in_place(checkpoint):
    tokenizer = byte_tokenizer()
    model = common.load_model(checkpoint, torch.device("cpu"))
    ids = tokenizer("A document. A question", return_tensors="pt").input_ids
    whole = generate.generate_text(model, tokenizer, ids, max_new_tokens=8, stream=False)

    cache = HybridCache(model.config)
    with torch.no_grad():
        model(ids[:, :11], use_cache=True, **{CACHE_ARGUMENT: cache})
    continued = generate.generate_text(model, tokenizer, ids, max_new_tokens=8, cache=cache, stream=False)
    assert continued.text == whole.text
    assert continued.prompt_tokens == ids.shape[1] - 11
    assert continued.cache is cache
    assert cache.get_seq_length() == ids.shape[1] + continued.new_tokens - 1


SENTENCES = "".join(f"This is sentence number {i}. " for i in range(10))


@pytest.mark.parametrize("depth, before", [(0.0, "number 0. "), (0.55, "number 5. "), (1.0, "number 9. ")])
def test_a_fact_stands_between_sentences_at_its_depth(depth, before):
    text = demo.insert_fact(SENTENCES, "A FACT.", depth)
    assert f"{before}A FACT." in text
    assert text.replace("A FACT. ", "").replace("A FACT.", "").strip() == SENTENCES.strip()


def test_demo_runs_on_any_checkpoint_with_a_sample(checkpoint, without_weights, capsys):
    shutil.copyfile(checkpoint / "model.safetensors", without_weights / "model.safetensors")
    assert "sample.txt is missing" in refusal(capsys, demo.main, [without_weights])

    (without_weights / "sample.txt").write_text(SENTENCES, encoding="utf-8")
    assert demo.main([str(without_weights), "--tokens", "200"]) == 0
    out, _ = capsys.readouterr()
    assert demo.OPENING in out
    for name in demo.NAMES:
        assert re.search(rf"{name} .*expected \d{{5}} +answered .*(right|wrong)", out)
    assert "full-attention K/V cache" in out


def test_demo_refuses_a_document_longer_than_the_model(without_weights, capsys):
    (without_weights / "sample.txt").write_text(SENTENCES * 10, encoding="utf-8")
    sentence = refusal(capsys, demo.main, [without_weights, "--tokens", "1000"])
    assert f"max_position_embeddings is {POSITIONS}" in sentence
