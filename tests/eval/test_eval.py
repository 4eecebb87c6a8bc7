"""Evaluations: any model, any batch, killed and continued, refused where they cannot be right; pictures and servers."""

import base64
import contextlib
import http.server
import json
import random
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import kimi_k3
from kimi_k3 import __main__ as cli
from kimi_k3.eval import (
    TASKS,
    EndpointReader,
    EvalError,
    ModelReader,
    Plan,
    Tokens,
    evaluate,
    open_haystack,
    parse_length,
    run,
    summary,
)
from kimi_k3.eval.reader import rows_at_once
from kimi_k3.eval.suite import Unit, answer_room
from kimi_k3.files_kimi_k3 import unsealed
from kimi_k3.runs_kimi_k3 import lock
from waiting import PATIENCE

SMALL = Path(kimi_k3.__file__).parent / "checkpoints" / "small"


def letter_tokenizer():
    """One token for each character of ASCII, so that ids stay below the 160 of the tiny models; 2 ends a text."""
    letters = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol.isascii()]
    vocabulary = ["<unk>", "<pad>", "<|end|>", "Ċ", "Ġ", *sorted(letters)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


LETTERS = Tokens(letter_tokenizer())
NOISE = open_haystack(["noise"], LETTERS)


class Oracle:
    """A reader that knows the answers, two texts at once; it can be told to die after some calls."""

    def __init__(self, name="oracle", dies_after=None):
        self.name, self.calls, self.dies_after = name, 0, dies_after

    def fingerprint(self):
        return self.name

    def units_at_once(self, length, questions):
        return 2

    def answers(self, task, units):
        if self.calls == self.dies_after:
            raise KeyboardInterrupt
        self.calls += 1
        return [[" ".join(prompt.question.answers) for prompt in prompts] for prompts in units]


def refusal(capsys, argv) -> str:
    """The sentence that the command refuses `argv` with; asserts exit code 2 and nothing on stdout."""
    try:
        code = cli.main([str(argument) for argument in argv])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    return err.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def checkpoint(data_dir, tmp_path_factory):
    """Folder of a tiny dense K3 model with random weights, and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("model") / "dense"
    shutil.copytree(data_dir / "k3_dense_flat", folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def random_model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


# --- what a model is asked -------------------------------------------------------------------------------------------


def native_kimi_linear(data_dir):
    from transformers.models.kimi_linear import KimiLinearForCausalLM

    return KimiLinearForCausalLM.from_pretrained(data_dir / "kimi_linear_flat", dtype=torch.float32).eval()


def tiny_llama(data_dir):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=160, num_key_value_heads=2, **sizes)).eval()


def tiny_k3(data_dir):
    return AutoModelForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32).eval()


@pytest.mark.one_release
@pytest.mark.parametrize("make, batch", [(tiny_k3, 1), (tiny_k3, 8), (native_kimi_linear, 8), (tiny_llama, 1)])
def test_answers_are_those_of_generate_on_the_whole_prompt(make, batch, data_dir):
    """Faults 31 and 127: sharing the text, chunks and batches change nothing, whatever the model's class."""
    model = make(data_dir)
    reader = ModelReader(model, LETTERS, chunk=192, batch=batch)
    units = [Unit("stack", 700, None, sample).prompts(0, NOISE, LETTERS) for sample in range(2)]
    answers = reader.answers(TASKS["stack"], units)
    for prompts, texts in zip(units, answers, strict=True):
        for prompt, text in zip(prompts, texts, strict=True):
            ids = torch.tensor([prompt.ids])
            room = answer_room(prompt, TASKS["stack"], LETTERS)
            whole = model.generate(ids, max_new_tokens=room, do_sample=False, eos_token_id=2, pad_token_id=2)
            wanted = LETTERS.text([token for token in whole[0, len(prompt.ids) :].tolist() if token != 2])
            assert text == wanted


def test_models_that_cannot_go_on_from_a_cache_are_refused(data_dir, monkeypatch):
    model = tiny_llama(data_dir)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: forward(**{**given, kimi_k3.CACHE_ARGUMENT: None}))
    with pytest.raises(EvalError, match="the cache of LlamaForCausalLM forgets what was read"):
        ModelReader(model, LETTERS)
    monkeypatch.setattr(model, "forward", lambda **given: forward(**{**given, "use_cache": False}))
    with pytest.raises(EvalError, match="LlamaForCausalLM returns no"):
        ModelReader(model, LETTERS)


def test_models_that_cannot_read_a_text_are_refused():
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 100}
    with pytest.raises(EvalError, match=r"makes the id \d+ and the model knows 80: they do not belong together"):
        ModelReader(GPT2LMHeadModel(GPT2Config(vocab_size=80, bos_token_id=2, eos_token_id=2, **sizes)), LETTERS)
    reader = ModelReader(GPT2LMHeadModel(GPT2Config(vocab_size=160, bos_token_id=2, eos_token_id=2, **sizes)), LETTERS)
    with pytest.raises(EvalError, match="GPT2LMHeadModel cannot read 256 tokens"):
        reader.answers(TASKS["fact"], [Unit("fact", 256, 0.5, 0).prompts(0, NOISE, LETTERS)])


@pytest.mark.one_release
def test_one_forward_reads_what_the_questions_share_and_none_more_than_a_chunk(random_model, monkeypatch):
    """Fault 34: one text is read once, in chunks, with the logits of one position; nothing is kept between texts."""
    fed, kept, forward = [], [], type(random_model).forward

    def watch(self, *args, **kwargs):
        fed.append(tuple(kwargs["input_ids"].shape))
        output = forward(self, *args, **kwargs)
        kept.append(output.logits.shape[1])
        return output

    reader = ModelReader(random_model, LETTERS, chunk=256, batch=1)
    monkeypatch.setattr(type(random_model), "forward", watch)
    prompts = Unit("associative", 2048, None, 0).prompts(0, NOISE, LETTERS)
    reader.answers(TASKS["associative"], [prompts])
    assert len(prompts) == 8 and set(kept) == {1}
    assert max(columns for _, columns in fed) == 256
    assert sum(rows * columns for rows, columns in fed if columns > 1) < 2048 + 8 * 128
    assert rows_at_once(None, 1024) == 32 and rows_at_once(None, 2**20) == 1 and rows_at_once(3, 2**20) == 3


@pytest.mark.one_release
def test_scores_are_equal_at_any_batch_and_the_file_too(tmp_path):
    """Fault 31: the trained checkpoint, so that answers are right and wrong ones."""
    tokens = Tokens(AutoTokenizer.from_pretrained(SMALL))
    model = AutoModelForCausalLM.from_pretrained(SMALL, dtype=torch.float32).eval()
    haystack = open_haystack([str(SMALL / "sample.txt")], tokens)
    plan = Plan(("fact", "multivalue"), (420,), depths=2, samples=1)
    files = []
    for batch in (1, None):
        lines = evaluate(ModelReader(model, tokens, batch=batch), tokens, haystack, plan, tmp_path / str(batch))
        files.append((tmp_path / str(batch) / "results.jsonl").read_bytes())
    assert files[0] == files[1]
    scores = {cell["task"]: cell["score"] for cell in summary(lines)}
    assert scores["fact"] == 1 and 0 < scores["multivalue"] < 1


@pytest.mark.one_release
def test_a_random_model_is_at_chance(random_model, tmp_path):
    lines = evaluate(
        ModelReader(random_model, LETTERS, batch=16), LETTERS, NOISE, Plan(tuple(TASKS), (1024,), 1, 1), tmp_path
    )
    cells = summary(lines)
    assert [cell["task"] for cell in cells] == list(TASKS)
    for cell in cells:
        assert cell["low"] <= cell["chance"] <= cell["high"] and cell["score"] <= cell["chance"] + 0.05, cell
    assert any(line["output"] for line in lines)


# --- killed, continued, mixed up -------------------------------------------------------------------------------------

PLAN = Plan(("fact", "stack", "multikey"), (1024, 1280), depths=2, samples=2, seed=5)


def results(folder):
    return (folder / "results.jsonl").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    lines = evaluate(Oracle(), LETTERS, NOISE, PLAN, folder)
    assert len(lines) == len(results(folder).splitlines()) == 2 * (4 + 4 * 4 + 4 * 4)
    assert {line["score"] for line in lines} == {1.0}
    return folder


@pytest.mark.one_release
@pytest.mark.parametrize("calls", [0, 1, 3, 6])
def test_a_killed_run_continues_byte_for_byte(calls, uninterrupted, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        evaluate(Oracle(dies_after=calls), LETTERS, NOISE, PLAN, tmp_path)
    before = results(tmp_path)
    assert results(uninterrupted).startswith(before) and before != results(uninterrupted)
    evaluate(Oracle(), LETTERS, NOISE, PLAN, tmp_path)
    assert results(tmp_path) == results(uninterrupted)


@pytest.mark.one_release
@pytest.mark.parametrize("share", [0.01, 0.3, 0.52, 0.9])
def test_a_kill_in_the_middle_of_a_line_or_of_a_text(share, uninterrupted, tmp_path):
    whole = results(uninterrupted)
    (tmp_path / "results.jsonl").write_bytes(whole[: int(share * len(whole))])
    lines = evaluate(Oracle(), LETTERS, NOISE, PLAN, tmp_path)
    assert results(tmp_path) == whole
    assert lines == [unsealed(json.loads(line)) for line in whole.splitlines()]


@pytest.mark.one_release
def test_damaged_results_are_asked_again(uninterrupted, tmp_path, caplog):
    """A random byte of every few lines: the right lines stay, no wrong one is believed."""
    lines, draw = results(uninterrupted).splitlines(keepends=True), random.Random(0)
    hit = draw.sample(range(len(lines)), 9)
    damaged = [bytearray(line) for line in lines]
    for number in hit:
        damaged[number][draw.randrange(len(lines[number]) - 1)] ^= 1 << draw.randrange(7)
    (tmp_path / "results.jsonl").write_bytes(b"".join(damaged))
    with pytest.raises(EvalError, match="holds results of another run"):
        evaluate(Oracle("another"), LETTERS, NOISE, PLAN, tmp_path)
    assert results(tmp_path) == b"".join(damaged)
    evaluate(Oracle(), LETTERS, NOISE, PLAN, tmp_path)
    assert sorted(results(tmp_path).splitlines(keepends=True)) == sorted(lines)
    assert "results.jsonl: 9 damaged lines are taken out and asked again" in caplog.text


@pytest.mark.one_release
@pytest.mark.parametrize("count", [1, 2])
def test_a_file_in_which_every_line_is_damaged_is_set_aside(count, uninterrupted, tmp_path, caplog):
    lines = results(uninterrupted).splitlines(keepends=True)[:count]
    damaged = b"".join(line.replace(b'"score"', b'"scare"') for line in lines)
    (tmp_path / "results.jsonl").write_bytes(damaged)
    evaluate(Oracle(), LETTERS, NOISE, PLAN, tmp_path)
    assert results(tmp_path) == results(uninterrupted)
    assert (tmp_path / "results.damaged.jsonl").read_bytes() == damaged
    assert "results.jsonl: every line is damaged; they are kept as results.damaged.jsonl" in caplog.text


@pytest.mark.one_release
def test_a_full_disk_keeps_what_was_answered(uninterrupted, tmp_path):
    resource = pytest.importorskip("resource")
    usual, room = resource.getrlimit(resource.RLIMIT_FSIZE), len(results(uninterrupted)) // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, usual[1]))
    try:
        with pytest.raises(
            EvalError, match=r"results.jsonl cannot be written any more \(File too large\): it keeps \d\d"
        ):
            evaluate(Oracle(), LETTERS, NOISE, PLAN, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert len(results(tmp_path)) == room
    evaluate(Oracle(), LETTERS, NOISE, PLAN, tmp_path)
    assert results(tmp_path) == results(uninterrupted)


@pytest.mark.one_release
def test_nothing_is_asked_twice_and_more_may_be_asked(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run")
    again = Oracle()
    evaluate(again, LETTERS, NOISE, PLAN, tmp_path / "run")
    assert again.calls == 0 and results(tmp_path / "run") == results(uninterrupted)
    more = Plan(PLAN.tasks, (1024, 1536), PLAN.depths, PLAN.samples, PLAN.seed)
    lines = evaluate(again, LETTERS, NOISE, more, tmp_path / "run")
    assert {line["length"] for line in lines} == {1024, 1536}
    assert results(tmp_path / "run").startswith(results(uninterrupted))


@pytest.mark.one_release
def test_two_processes_do_not_work_in_one_folder(uninterrupted, tmp_path):
    """Nor is a file continued that two have written."""
    reader = Oracle()
    with lock(tmp_path, EvalError), pytest.raises(EvalError, match="another process is working in"):
        evaluate(reader, LETTERS, NOISE, PLAN, tmp_path)
    assert reader.calls == 0 and {file.name for file in tmp_path.iterdir()} == {"lock"}
    first, rest = results(uninterrupted).split(b"\n", 1)
    twice = first + b"\n" + first + b"\n" + rest
    (tmp_path / "results.jsonl").write_bytes(twice)
    with pytest.raises(EvalError, match="more than once: two processes wrote it"):
        evaluate(reader, LETTERS, NOISE, PLAN, tmp_path)
    assert results(tmp_path) == twice


@pytest.mark.one_release
def test_another_model_seed_or_haystack_is_not_mixed_in(uninterrupted):
    before = results(uninterrupted)
    other = Plan(PLAN.tasks, PLAN.lengths, PLAN.depths, PLAN.samples, seed=6)
    for reader, haystack, plan, word in (
        (Oracle("another"), NOISE, PLAN, "model"),
        (Oracle(), open_haystack(["repeat"], LETTERS), PLAN, "haystack"),
        (Oracle(), NOISE, other, "seed"),
    ):
        with pytest.raises(EvalError, match=f"holds results of another run .*{word} .*choose a new folder"):
            evaluate(reader, LETTERS, haystack, plan, uninterrupted)
    assert results(uninterrupted) == before


def test_the_fingerprint_sees_every_weight_and_the_output_layer(random_model):
    reader = ModelReader(random_model, LETTERS)
    before = reader.fingerprint()
    assert before == reader.fingerprint()
    for weight in (random_model.lm_head.weight, random_model.model.layers[0].self_attn.q_proj.weight):
        kept = weight.data.clone()
        weight.data.view(-1)[7] += 1e-3
        assert reader.fingerprint() != before
        weight.data.copy_(kept)
    assert reader.fingerprint() == before


@pytest.mark.one_release
def test_interval_is_wilsons():
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        mean, lower, upper = run.interval([1.0] * right + [0.0] * (count - right))
        assert mean == right / count
        assert (lower, upper) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.one_release
def test_lengths():
    assert [parse_length(text) for text in ("4096", "4k", "1M")] == [4096, 4096, 2**20]
    for text in ("", "k", "-1", "4.5k", "4g", "0"):
        with pytest.raises(EvalError, match="is no length"):
            parse_length(text)


# --- the command and its pictures ------------------------------------------------------------------------------------


def test_the_command_writes_results_pictures_and_one_page(checkpoint, tmp_path, capsys):
    out = tmp_path / "run"
    command = ["eval", str(checkpoint), "--tasks", "fact,associative", "--lengths", "512,1k", "--haystack", "noise"]
    command += ["--depths", "3", "--samples", "1", "--device", "cpu", "--out", str(out)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert re.search(r"fact +512 +0\.0% ", printed) and str(out / "report.html") in printed
    assert len((out / "results.jsonl").read_text().splitlines()) == 2 * (3 + 3 * 8)
    page = (out / "report.html").read_text()
    pictures = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    assert pictures == [(out / "by_length.png").read_bytes(), (out / "by_depth.png").read_bytes()]
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 10_000 for picture in pictures)
    assert "http" not in page.replace("http-equiv", ""), "nothing is fetched"
    assert page.count("<tr>") == 1 + 4
    cells = json.loads((out / "summary.json").read_text())
    assert [(cell["task"], cell["length"], cell["questions"]) for cell in cells] == [
        ("fact", 512, 3),
        ("associative", 512, 24),
        ("fact", 1024, 3),
        ("associative", 1024, 24),
    ]


@pytest.mark.one_release
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"--tasks": "needle"}, "there is no task 'needle'"),
        ({"--lengths": "4x"}, "'4x' is no length: write 4096, 4k or 1m"),
        ({"--lengths": "100"}, r"the task fact needs at least \d+ tokens"),
        ({"--lengths": "512,512"}, "one of the lengths is given twice"),
        ({"--haystack": "gone.txt"}, "the haystack gone.txt cannot be read"),
        ({"--batch": "0"}, "argument --batch: must be a whole number of at least 1"),
        ({"--endpoint": "localhost:1"}, "is no address: write http://localhost:8000/v1"),
        ({"--endpoint": "http://localhost:1/v1"}, "the endpoint http://localhost:1/v1/completions cannot be reached"),
        ({"MODEL": "/nowhere"}, "there is no checkpoint folder /nowhere"),
        ({}, "the model in .* cannot be loaded"),
    ],
)
def test_refusals(changes, sentence, checkpoint, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    arguments = {"--tasks": "fact", "--lengths": "512", "--out": str(tmp_path / "run"), "--device": "cpu"}
    arguments |= {name: value for name, value in changes.items() if name != "MODEL"}
    pairs = [part for pair in arguments.items() for part in pair]
    assert re.search(sentence, refusal(capsys, ["eval", changes.get("MODEL", folder), *pairs]))


@pytest.mark.one_release
def test_refuses_a_folder_that_cannot_be_written_and_a_tokenizer_without_an_end(checkpoint, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    empty = tmp_path / "without weights"
    shutil.copytree(checkpoint, empty, ignore=shutil.ignore_patterns("*.safetensors"))
    command = ["eval", empty, "--tasks", "fact", "--lengths", "512", "--device", "cpu", "--out"]
    assert "cannot be written" in refusal(capsys, [*command, tmp_path / "file" / "run"])
    command[1] = checkpoint
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.jsonl").write_text("a table of results\n")
    assert "is not a file of results" in refusal(capsys, [*command, tmp_path / "run"])
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    tokenizer = letter_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    command[1] = folder
    assert "the tokenizer has no EOS token to end an answer" in refusal(capsys, [*command, tmp_path / "new"])


# --- a completion server ---------------------------------------------------------------------------------------------


class Server(http.server.BaseHTTPRequestHandler):
    """Answers from the text alone, or misbehaves as `mood` says; who waits for it has `gone` when the test is over."""

    mood = "good"
    gone = threading.Event()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mood = type(self).mood
        if mood == "slow":
            self.gone.wait(PATIENCE)
        if mood == "error":
            return self.send_error(503, "overloaded")
        if mood == "drip":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not self.gone.wait(0.1):
                    self.wfile.write(b" ")
            return None
        if mood in ("header drip", "flood"):
            part = b"a" if mood == "header drip" else b"a" * (1 << 20)
            if mood == "flood":
                self.send_response(200)
                self.end_headers()
            with contextlib.suppress(OSError):
                while not self.gone.wait(0.1 if mood == "header drip" else 0):
                    self.wfile.write(part)
            return None
        found = re.search(r"secret number of \w+ is (\d+)", asked["prompt"])
        reply = {"choices": [{"text": f" {found.group(1)}." if found else "?"}]}
        reply["usage"] = {"prompt_tokens": len(asked["prompt"]) + (7 if mood == "other tokenizer" else 0)}
        if mood == "cuts":
            reply["usage"]["prompt_tokens"] = min(len(asked["prompt"]), 200)
        forms = {
            "text": b"welcome",
            "empty": b'{"choices": []}',
            "number": b'{"choices": [3]}',
            "no list": b'{"choices": {}}',
            "deep": b"[" * 100_000,
        }
        body = forms.get(mood, json.dumps(reply).encode())
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    Server.mood = "good"
    Server.gone.clear()
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    running.handle_error = lambda *_: None  # who asked a slow server has gone when it answers
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/v1"
    Server.gone.set()
    running.shutdown()
    running.server_close()


ONE_FACT = Plan(("fact",), (256,), depths=3, samples=2)


@pytest.mark.one_release
def test_a_server_is_asked_and_what_it_answered_survives_its_failure(server, tmp_path):
    reader = EndpointReader(server, "model", LETTERS, timeout=PATIENCE)
    lines = evaluate(reader, LETTERS, NOISE, ONE_FACT, tmp_path / "good")
    assert [line["score"] for line in lines] == [1.0] * 6

    answers = reader.answers

    def fails_at_the_third(task, units):
        if len(results(tmp_path / "bad").splitlines()) == 2:
            Server.mood = "error"
        return answers(task, units)

    reader.answers = fails_at_the_third
    with pytest.raises(EvalError, match=r"answered 503 overloaded"):
        evaluate(reader, LETTERS, NOISE, ONE_FACT, tmp_path / "bad")
    assert len(results(tmp_path / "bad").splitlines()) == 2
    Server.mood, reader.answers = "good", answers
    evaluate(reader, LETTERS, NOISE, ONE_FACT, tmp_path / "bad")
    assert results(tmp_path / "bad") == results(tmp_path / "good")


@pytest.mark.one_release
def test_a_server_that_cuts_prompts_gets_no_score(server, tmp_path):
    reader = EndpointReader(server, "model", LETTERS, timeout=PATIENCE)
    Server.mood = "cuts"
    with pytest.raises(EvalError, match="read 200 tokens of a prompt of 256: it cuts long prompts"):
        evaluate(reader, LETTERS, NOISE, ONE_FACT, tmp_path)
    assert not results(tmp_path)


@pytest.mark.one_release
@pytest.mark.parametrize(
    ("mood", "sentence"),
    [
        ("slow", "gave no answer within 0.5 seconds"),
        ("drip", "gave no answer within 0.5 seconds"),
        ("header drip", "gave no answer within 0.5 seconds"),
        ("flood", "answered with more than 16,777,216 bytes"),
        ("deep", "did not answer in JSON"),
        ("error", "answered 503 overloaded"),
        ("text", "did not answer in JSON"),
        ("empty", r"answered without choices\[0\].text"),
        ("number", r"answered without choices\[0\].text"),
        ("no list", r"answered without choices\[0\].text"),
        ("other tokenizer", "counts 26 tokens in 'The grass is green.' and the tokenizer of MODEL 19"),
    ],
)
def test_servers_that_are_refused_at_the_start(mood, sentence, server):
    Server.mood = mood
    with pytest.raises(EvalError, match=sentence):
        EndpointReader(server, "model", LETTERS, timeout=0.5 if mood in ("slow", "drip", "header drip") else PATIENCE)
