"""lm-eval against a running server: what it scores and generates is what its `hf` model gives for the same folder."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from running_server import Running, limits

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")  # of lm-eval's `api` extra
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
DOCS = [
    {"question": "the sea is", "choices": [" blue", " a dog", " x"], "answer": 0},
    {"question": "one and one are", "choices": [" two", " three"], "answer": 0},
    {"question": "q", "choices": [" a longer choice", " b"], "answer": 1},
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS = {
    "served_choice": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "served_text": {
        "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(data_dir, tmp_path_factory):
    """A checkpoint with its code, a tokenizer of letters that has a chat template, and the two tasks."""
    folder = tmp_path_factory.mktemp("served")
    letters = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol.isascii()]
    vocabulary = ["<unk>", "<pad>", "<|end|>", "Ċ", "Ġ", *sorted(letters)]
    letter = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(vocabulary)}, merges=[]))
    letter.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letter.decoder = decoders.ByteLevel()
    model = AutoModelForCausalLM.from_pretrained(data_dir / "k3_dense_flat", dtype=torch.float32)
    model.save_pretrained(folder / "small")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letter, eos_token="<|end|>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "small")
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (folder / "tasks").mkdir()
    for name, task in TASKS.items():
        files = {"dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}}}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps({"task": name, **COMMON, **files, **task}))
    return folder


@pytest.fixture(scope="module")
def running(folder):
    """In float64, as lm-eval's own model below: no rounding decides a token."""
    model = AutoModelForCausalLM.from_pretrained(folder / "small", dtype=torch.float64).eval()
    server = Running(model, limits(), PreTrainedTokenizerFast.from_pretrained(folder / "small"))
    yield server
    assert server.stop()


def responses(folder, model, arguments, tasks, **options):
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    samples = {name: sorted(samples, key=lambda sample: sample["doc_id"]) for name, samples in found["samples"].items()}
    return {name: [sample["resps"] for sample in each] for name, each in samples.items()}


def test_scores_and_texts_are_those_of_the_model(folder, running):
    own = {"pretrained": str(folder / "small"), "trust_remote_code": True, "dtype": "float64"}
    served = {"model": "small", "tokenizer": str(folder / "small"), "tokenizer_backend": "huggingface"}
    tasks = [*TASKS]
    expected = responses(folder, "hf", own, tasks, device="cpu", batch_size=1)
    for batch in (1, 4):
        arguments = {**served, "base_url": running.address + "/v1/completions", "num_concurrent": 3 - batch // 2}
        found = responses(folder, "local-completions", arguments, tasks, batch_size=batch)
        assert found["served_text"] == expected["served_text"]
        scores = [score for doc in found["served_choice"] for (score,) in doc]
        wanted = [score for doc in expected["served_choice"] for (score,) in doc]
        assert len(scores) == 7 and [is_greedy for _, is_greedy in scores] == [is_greedy for _, is_greedy in wanted]
        assert [value for value, _ in scores] == pytest.approx([value for value, _ in wanted], abs=1e-6)
    arguments = {"model": "small", "base_url": running.address + "/v1/chat/completions"}
    chat = {"apply_chat_template": True, "batch_size": 1}
    expected = responses(folder, "hf", own, ["served_text"], device="cpu", **chat)
    assert responses(folder, "local-chat-completions", arguments, ["served_text"], **chat) == expected
