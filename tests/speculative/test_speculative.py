"""Speculative decoding with a DSpark-style draft: greedy text and the distribution of samples are the target's own."""

import importlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kimi_k3
import tiny
from kimi_k3.runs_kimi_k3 import lock
from kimi_k3.speculative.decoding import accept, probabilities, speculative_generate
from kimi_k3.speculative.draft import DSparkConfig, DSparkDraft, rotary, rotated

pytestmark = pytest.mark.one_release

SMALL = Path(kimi_k3.__file__).parent / "checkpoints" / "small"

# Few tokens, so that each of them is often drawn.
VOCABULARY, HIDDEN = 32, 56
SIZES = DSparkConfig(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=50, num_hidden_layers=2, num_attention_heads=3,
    q_lora_rank=18, kv_lora_rank=20, qk_nope_head_dim=14, qk_rope_head_dim=8, v_head_dim=10, target_layer_ids=(0, 1, 2),
    mask_token_id=31, markov_rank=9, block_size=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """KDA, MLA, KDA in float32, random and far from uniform."""
    settings = {"vocab_size": VOCABULARY, "q_lora_rank": None, "initializer_range": 0.3}
    return tiny.model("kmk", **settings, **tiny.DENSE, **tiny.NO_SPECIAL)


def tokens(length, seed=0):
    return torch.randint(1, 32, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def draft():
    """Random, and so sure of itself that every block has its full length."""
    torch.manual_seed(1)
    draft = DSparkDraft(SIZES).eval()
    draft.confidence_head.proj.bias.data.fill_(20.0)
    return draft


@pytest.mark.parametrize("prompt", [1, 2, 30, 90])
def test_greedy_text_is_that_of_plain_greedy_whatever_the_draft(model, draft, prompt):
    """Fault 36: a random draft changes nothing."""
    ids = torch.tensor([tokens(prompt, prompt)])
    result = speculative_generate(model, draft, ids, 60)
    assert torch.equal(result.ids, model.generate(ids, max_new_tokens=60, do_sample=False))
    assert result.drafted > 2 * result.rounds > 0
    assert result.accepted < result.drafted


def test_an_end_token_ends_it(model, draft):
    ids = torch.tensor([tokens(12)])
    whole = model.generate(ids, max_new_tokens=40, do_sample=False)[0, 12:].tolist()
    end = whole[17]
    result = speculative_generate(model, draft, ids, 40, eos_token_id=end)
    assert result.ids[0, 12:].tolist() == whole[: whole.index(end) + 1]


def test_a_perfect_draft_is_always_accepted(model, draft, monkeypatch):
    """Fault 50: with a drafter that knows the target's choice, acceptance is total, at short and at long context."""
    ids = torch.tensor([tokens(150)])
    known = model.generate(ids, max_new_tokens=100, do_sample=False)[0].tolist()

    def oracle(self, newest, most):
        start = self.tokens + 1
        return known[start : start + min(4, most)], []

    monkeypatch.setattr("kimi_k3.speculative.decoding._Drafting.propose", oracle)
    result = speculative_generate(model, draft, ids, 100)
    assert result.ids[0].tolist() == known
    assert result.accepted == result.drafted and result.rounds <= 21


def test_sampling_through_the_model_is_not_biased(model, draft):
    """The second new token of 250 whole runs, against the exact marginal of the target."""
    ids, temperature, count = torch.tensor([tokens(9)]), 0.4, 250
    with torch.no_grad():
        first = probabilities(model(ids).logits[0, -1], temperature)
        rows = torch.cat([ids.expand(32, -1), torch.arange(32)[:, None]], dim=1)
        second = first @ probabilities(model(rows).logits[:, -1], temperature)
    generator = torch.Generator().manual_seed(3)
    seen = torch.zeros(32)
    for _ in range(count):
        result = speculative_generate(model, draft, ids, 2 + 1, temperature, generator=generator)
        seen[result.ids[0, 10]] += 1
    cells = second * count >= 5
    chi = ((seen - second * count) ** 2 / (second * count))[cells].sum()
    freedom = int(cells.sum())
    assert freedom >= 3 and chi < freedom + 4 * (2 * freedom) ** 0.5


def test_accept_draws_from_what_is_left():
    """One token, p and q known: the result has distribution p."""
    p, q = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]), torch.tensor([[0.1, 0.1, 0.8]])
    generator, counts = torch.Generator().manual_seed(0), [0, 0, 0]
    for _ in range(4000):
        drawn = int(torch.multinomial(q[0], 1, generator=generator))
        kept, following = accept([drawn], q, p, generator)
        counts[drawn if kept else following] += 1
    for count, share in zip(counts, p[0], strict=True):
        assert abs(count / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5


def test_rotary_positions_count_by_their_difference():
    x, y = torch.randn(1, 8), torch.randn(1, 8)
    at = [
        (rotated(x, rotary(torch.tensor([m]), 8, 1e4)) * rotated(y, rotary(torch.tensor([n]), 8, 1e4))).sum()
        for m, n in ((3, 1), (103, 101))
    ]
    torch.testing.assert_close(at[0], at[1], atol=1e-4, rtol=0)


def test_a_block_reads_all_of_itself_and_its_context(draft):
    """Not causal inside the block; a changed context changes every slot."""
    taps = torch.randn(1, 7, 3 * HIDDEN)
    positions = torch.arange(7, 11)
    hidden = draft.block(torch.tensor([[5]]), positions, draft.context(taps, 0))
    mask = torch.ones(4, 11, dtype=torch.bool)
    mask[:, 10] = False  # without the last slot, the first one differs
    other = draft.block(torch.tensor([[5]]), positions, draft.context(taps, 0), mask)
    assert not torch.allclose(hidden[0, 0], other[0, 0])
    taps[0, 0] += 1
    assert (draft.block(torch.tensor([[5]]), positions, draft.context(taps, 0)) - hidden).abs().amax(-1).min() > 0
    parts = [draft.context(taps[:, :3], 0), draft.context(taps[:, 3:], 3)]
    for whole, *split in zip(draft.context(taps, 0), *parts, strict=True):
        torch.testing.assert_close(torch.cat(split, dim=1), whole)


def test_names_and_sizes_are_those_of_the_published_draft():
    """68 tensors and about 3.56 billion parameters at the sizes of the public five-layer draft for Kimi K3."""
    config = DSparkConfig(
        vocab_size=163840, hidden_size=7168, intermediate_size=14336, num_hidden_layers=5, num_attention_heads=64,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        target_layer_ids=(2, 23, 47, 71, 89), mask_token_id=163837, markov_rank=256, block_size=8,
    )  # fmt: skip
    with torch.device("meta"):
        tensors = DSparkDraft(config).state_dict()
    assert len(tensors) == 68
    assert sum(t.numel() for t in tensors.values()) == pytest.approx(3.56e9, rel=0.01)
    assert tensors["context_proj.weight"].shape == (7168, 35840)
    assert (
        tensors["markov_head.markov_w1.weight"].shape == tensors["markov_head.markov_w2.weight"].shape == (163840, 256)
    )
    assert tensors["confidence_head.proj.weight"].shape == (1, 7424)


def test_files(model, draft, tmp_path):
    """Saved and loaded; what does not fit is refused in a sentence."""
    draft.save(tmp_path)
    again = DSparkDraft.load(tmp_path, model)
    ids = torch.tensor([tokens(20)])
    results = [speculative_generate(model, d, ids, 20) for d in (draft, again)]
    assert torch.equal(results[0].ids, results[1].ids) and results[0].accepted == results[1].accepted
    config = (tmp_path / "config.json").read_text()
    for old, new, said in (
        ('"hidden_size": 56', '"hidden_size": 64', "hidden_size 64"),
        ('"rope_theta"', '"rope_scaling": {"type": "yarn"}, "rope_theta"', "rope_scaling"),
        ('"markov_rank": 9', '"markov_rank": 8', "do not fit"),
        ('"markov_rank": 9,', "", "lacks"),
        ("    2\n", "    7\n", "taps layer 7"),
        ("    2\n", "    -1\n", "target_layer_ids cannot be"),
        ('"hidden_size": 56', '"hidden_size": "56"', "hidden_size cannot be 56"),
        (
            '"num_hidden_layers": 2',
            '"num_hidden_layers": 1000000000',
            "do not fit its config: 2 layers in the file",
        ),
        ('"rope_theta": 50000.0', '"rope_theta": NaN', "rope_theta cannot be nan"),
        ('"mask_token_id": 31', '"mask_token_id": 99999', "mask_token_id is none of its"),
        ('"k3_dspark"', '"eagle"', "model_type cannot be eagle"),
        (config, "[]", "holds no draft: its config.json is no object"),
        (config, "[" * 100_000, "holds no draft"),
    ):
        assert old in config
        (tmp_path / "config.json").write_text(config.replace(old, new))
        with pytest.raises(ValueError, match=said):
            DSparkDraft.load(tmp_path, model)
    with pytest.raises(ValueError, match="holds no draft"):
        DSparkDraft.load(tmp_path / "none", model)
    (tmp_path / "config.json").write_text(config)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors["context_norm.weight"][3] = float("nan")
    save_file(tensors, weights)
    with pytest.raises(ValueError, match=r"context_norm\.weight has 1 values that are not finite"):
        DSparkDraft.load(tmp_path, model)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"do not fit its config: .*[Hh]eader"):
        DSparkDraft.load(tmp_path, model)


def test_bad_input_is_refused(model, draft):
    for ids, count, temperature in (
        (torch.ones(2, 3, dtype=torch.long), 5, 0.0),
        (torch.ones(1, 0, dtype=torch.long), 5, 0.0),
        (torch.ones(1, 3, dtype=torch.long), 0, 0.0),
        (torch.ones(1, 3, dtype=torch.long), 5, -1.0),
    ):
        with pytest.raises(ValueError):
            speculative_generate(model, draft, ids, count, temperature)


@pytest.fixture(scope="module")
def trainer():
    return importlib.import_module("kimi_k3.speculative.training")


def test_a_draft_of_any_model_and_its_rate(trainer):
    sizes = trainer.sizes(tiny.config("kmkkmkkmkkmk", q_lora_rank=None, hidden_size=72, pad_token_id=5))
    assert sizes.target_layer_ids == (3, 6, 9, 11) and trainer.sizes(tiny.config("km")).target_layer_ids == (0, 1)
    assert (sizes.intermediate_size, sizes.q_lora_rank, sizes.mask_token_id) == (288, 36, 5)
    assert (sizes.num_hidden_layers, sizes.markov_rank, sizes.block_size) == (1, 64, 5)
    assert trainer.sizes(tiny.config("km", q_lora_rank=18, pad_token_id=None)).q_lora_rank == 18
    rates = [trainer.rate_at(step, 200, 2.0) for step in (0, 49, 100, 199)]
    assert rates == pytest.approx([2.0 / 50, 2.0 * (1 - 49 / 200), 1.0, 2.0 * 0.02])


def test_the_training_objective_learns_the_target(model, trainer):
    """A few steps of the trainer on random windows: its loss falls and its acceptance rises."""
    torch.manual_seed(0)
    draft = DSparkDraft(SIZES)
    windows = torch.tensor([tokens(40, seed) for seed in range(16)])
    taps, outputs = (states.float() for states in trainer.observe(model, draft, windows))
    optimizer = torch.optim.AdamW(draft.parameters(), 5e-3)
    seen = []
    for _ in range(40):
        anchors = torch.randint(1, 34, (8,))
        loss, accepted = trainer.block_loss(draft, model.lm_head, windows, taps, outputs, anchors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append((loss.item(), accepted))
    assert seen[-1][0] < 0.95 * seen[0][0] and seen[-1][1] > seen[0][1] + 0.03


def test_training_windows_are_what_the_target_writes(model, trainer):
    """The first half of the rows greedily, the second by sampling from its whole distribution."""
    starts = torch.tensor([tokens(6, seed) for seed in range(8)])
    torch.manual_seed(0)
    windows = trainer.continued(model, starts, 30)
    assert windows.shape == (8, 30) and torch.equal(windows[:, :6], starts)
    greedy = model.generate(starts, max_new_tokens=24, do_sample=False)
    assert torch.equal(windows[:4], greedy[:4])
    assert all(not torch.equal(row, other) for row, other in zip(windows[4:], greedy[4:], strict=True))
    assert torch.equal(trainer.continued(model, starts[:1], 30), greedy[:1])


def test_a_killed_training_goes_on_as_if_it_had_not_been(trainer, tmp_path, monkeypatch, capsys):
    sizes = {"WINDOW": 24, "PROMPT": 8, "ROWS": 2, "BLOCKS": 2, "CONTINUED": 2, "SAVED_EVERY": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(trainer, name, value)
    text = (SMALL / "sample.txt").read_text(encoding="utf-8")[:2000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")

    def run(out, *more):
        command = ["--model", str(SMALL), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / out)]
        return trainer.main([*command, "--windows", "4", "--steps", "3", *more])

    assert run("whole") == 0
    loss, calls = trainer.block_loss, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loss(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "block_loss", killed)
        assert run("broken") == 130
    assert "interrupted; " in (line := capsys.readouterr().err.splitlines()[-1]) and "same command goes on" in line
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "block_loss", lambda *arguments: (loss(*arguments)[0] * float("inf"), 0.0))
        assert run("broken") == 2
    assert "step 3: the loss is inf" in capsys.readouterr().err
    assert run("broken", "--seed", "1") == 2
    assert "other settings (seed was 0, is 1)" in capsys.readouterr().err
    with lock(tmp_path / "broken", ValueError):
        assert run("broken") == 2
    assert "another process is working in" in capsys.readouterr().err
    assert run("broken") == 0
    whole, broken = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "broken"))
    assert all(torch.equal(tensor, broken[name]) for name, tensor in whole.items())
    files = {file.name for file in (tmp_path / "broken").iterdir()}
    assert files == {"config.json", "model.safetensors", "training_report.json"}
    (tmp_path / "text.txt").write_text("Too short.", encoding="utf-8")
    assert run("none") == 2 and "needs at least" in capsys.readouterr().err
    (tmp_path / "text.txt").write_bytes(b"caf\xe9")
    assert run("none") == 2 and "text.txt cannot be used: UnicodeDecodeError" in capsys.readouterr().err
    (tmp_path / "text.txt").unlink()
    for wrong, said in ((), "is no file"), (("--rate", "nan"), "must be a number above 0"):
        with pytest.raises(SystemExit):
            run("none", *wrong)
        assert said in capsys.readouterr().err
