"""What a forward promises whatever is passed to it: padding, packing, adapters, checkpointing, caches, refusals.

The logits of every real token are those of its document alone, or there is an error.
"""

import contextlib
import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import kimi_k3
from kimi_k3 import HybridCache, KimiK3ForCausalLM, KimiK3ForConditionalGeneration, layers_kimi_k3
from kimi_k3.kernels import experts, kda
from rounding import EXACT, rms, rms_of_float32

CACHE = kimi_k3.CACHE_ARGUMENT
LENGTHS = (9, 17, 30)


@pytest.fixture(scope="module", params=["k3_tiny_mxfp4", "kimi_linear_flat"])
def model(request, data_dir):
    return AutoModelForCausalLM.from_pretrained(data_dir / request.param, dtype=torch.float32).double()


@pytest.fixture
def float_model(data_dir):
    return KimiK3ForCausalLM.from_pretrained(data_dir / "k3_tiny_mxfp4", dtype=torch.float32, dequantize=True).double()


@pytest.fixture(params=["sdpa", "eager"])
def attention(request, model):
    model.set_attn_implementation(request.param)
    yield request.param
    model.set_attn_implementation("sdpa")


def tokens(rows, length, seed=0):
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(seed))


DOCUMENTS = [tokens(1, length, length) for length in LENGTHS]


def padded(where, width=40):
    """Ids and mask [3, width] with the documents placed on the left, on the right, or with gaps."""
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    generator = torch.Generator().manual_seed(5)
    for row, document in enumerate(DOCUMENTS):
        length = document.shape[1]
        places = {
            "left": torch.arange(width - length, width),
            "right": torch.arange(length),
            "middle": torch.randperm(width, generator=generator)[:length].sort().values,
        }[where]
        ids[row, places], mask[row, places] = document[0], 1
    return ids, mask


@pytest.mark.portable
@pytest.mark.parametrize("pieces", [[40], [7, 1, 1, 21, 10]], ids=["whole", "pieces"])
@pytest.mark.parametrize("where", ["left", "right", "middle"])
@torch.no_grad()
def test_padding_anywhere(model, attention, where, pieces):
    ids, mask = padded(where)
    cache, outputs, start = HybridCache(model.config), [], 0
    for size in pieces:
        stop = start + size
        outputs.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE: cache}).logits)
        start = stop
    logits = torch.cat(outputs, dim=1)
    for row, document in enumerate(DOCUMENTS):
        torch.testing.assert_close(logits[row][mask[row].bool()], model(document).logits[0], **EXACT)


@torch.no_grad()
def test_positions_of_a_padded_batch_are_not_documents(model):
    """Fault 60: the position ids that generate makes for a padded batch repeat, and mean nothing here."""
    ids, mask = padded("left")
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, expected)
    several_axes = positions.expand(3, 3, -1)
    assert torch.equal(model(ids, attention_mask=mask, position_ids=several_axes).logits, expected)


def packed(names):
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    every = {
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "cu_seqlens": offsets,
        "seq_idx": torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None],
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }
    return torch.cat(DOCUMENTS, dim=1), {name: every[name] for name in names}


PACKINGS = [
    ["position_ids"],
    ["cu_seq_lens_q"],
    ["cu_seqlens"],
    ["cu_seq_lens_k"],
    ["seq_idx"],
    ["position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"],
]


@pytest.mark.one_release
@pytest.mark.portable
@pytest.mark.parametrize("names", PACKINGS, ids=lambda names: names[0] if len(names) == 1 else "collator")
def test_packed_documents_do_not_touch(model, attention, names):
    """Faults 53, 54, 55, 58: logits and gradients equal those of each document alone."""
    ids, arguments = packed(names)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, **arguments).logits
    logits.square().sum().backward()
    start = 0
    for document in DOCUMENTS:
        alone = model.get_input_embeddings()(document).detach().requires_grad_()
        expected = model(inputs_embeds=alone).logits
        expected.square().sum().backward()
        rows = slice(start, start + document.shape[1])
        torch.testing.assert_close(logits[:, rows], expected, **EXACT)
        torch.testing.assert_close(embeds.grad[:, rows], alone.grad, **EXACT)
        start = rows.stop


@torch.no_grad()
def test_recurrence_alone_is_isolated(model):
    """Fault 56: with an identity convolution the second document is still isolated."""
    identity = copy.deepcopy(model)
    for name, parameter in identity.named_parameters():
        if "conv1d" in name:
            parameter.zero_()[..., -1] = 1.0
    ids, arguments = packed(["position_ids"])
    logits = identity(ids, **arguments).logits
    torch.testing.assert_close(logits[:, -30:], identity(DOCUMENTS[2]).logits, **EXACT)


def test_what_cannot_be_read_is_refused(model):
    ids = tokens(2, 8)
    cache = HybridCache(model.config)
    model(ids, **{CACHE: cache})
    ones = torch.ones(2, 4, dtype=torch.long)
    for arguments, sentence in [
        ({"attention_mask": ones}, "one column for each token"),
        ({"attention_mask": torch.ones(2, 1, 4, 12)}, "must be 2-D"),
        ({"attention_mask": {"full_attention": None}}, "must be 2-D"),
        ({"seq_idx": torch.zeros(2, 4)}, "documents of one packed row"),
        ({"use_cache": False}, "would ignore the tokens"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            model(ids[:, :4], **{CACHE: copy.deepcopy(cache)}, **arguments)
    with pytest.raises(ValueError, match="cannot continue a cache"):
        first = HybridCache(model.config)
        model(ids[:1], **{CACHE: first})
        model(ids[:1], cu_seq_lens_q=torch.tensor([0, 3, 8]), **{CACHE: first})
    with pytest.raises(ValueError, match="rise from 0 to the length"):
        model(ids[:1], cu_seq_lens_q=torch.tensor([0, 3, 7]))


@torch.no_grad()
def test_shapes_that_say_nothing_are_refused(model):
    """In a sentence of ours, and not somewhere in a layer."""
    ids = tokens(1, 12)
    for wrong in (ids[0], ids[:, :0], ids[:0]):
        with pytest.raises(ValueError, match=r"expected \[B, T\] with a token at least"):
            model(wrong)
    for positions in (torch.arange(9)[None], torch.arange(12).expand(3, 12)):
        with pytest.raises(ValueError, match="position_ids has shape"):
            model(ids, position_ids=positions)
    for offsets in ([0, 5, 12], torch.tensor([[0, 5, 12]])):
        with pytest.raises(ValueError, match="1-D tensor"):
            model(ids, cu_seq_lens_q=offsets)
    with pytest.raises(ValueError, match="different documents"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 5, 12]), cu_seq_lens_k=torch.tensor([0, 6, 12]))


@pytest.mark.portable
@torch.no_grad()
def test_positions_of_one_axis_are_read(model):
    """[T] is as good as [1, T]; passed over, it would let documents touch."""
    positions = torch.cat([torch.arange(document.shape[1]) for document in DOCUMENTS])
    logits = model(torch.cat(DOCUMENTS, dim=1), position_ids=positions).logits
    torch.testing.assert_close(logits, torch.cat([model(d).logits for d in DOCUMENTS], dim=1), **EXACT)


@torch.no_grad()
def test_a_cache_of_other_layers_is_refused(model, data_dir):
    other = AutoModelForCausalLM.from_pretrained(data_dir / "k3_dense_flat", dtype=torch.float32)
    cache = HybridCache(other.config)
    with pytest.raises(ValueError, match="a model with other layers"):
        model(tokens(1, 4), **{CACHE: cache})


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("first, then", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@torch.no_grad()
def test_a_cache_goes_on_in_another_precision(float_model, first, then, static):
    """`model.to(dtype)` between two forwards; bfloat16 is the same path, with less to compare."""
    ids = tokens(2, 14)
    expected, bound = float_model(ids).logits, rms_of_float32(float_model, lambda model: model(ids).logits[:, 10:])
    cache = HybridCache(float_model.config, max_length=20 if static else None)
    float_model.to(first)(ids[:, :10], **{CACHE: cache})
    float_model.to(then)
    parts = [float_model(ids[:, start:stop], **{CACHE: cache}).logits for start, stop in ((10, 11), (11, 14))]
    assert parts[0].dtype == then
    assert rms(torch.cat(parts, dim=1) - expected[:, 10:]) < bound


@pytest.mark.portable
def test_adapters_act_in_every_form_of_the_attention(float_model):
    """An adapter on `kv_b_proj`, which decoding would otherwise fold into the query, acts token by token too."""
    targets = ["kv_b_proj", "q_proj", "o_proj", "f_b_proj"]
    adapted = get_peft_model(float_model, LoraConfig(target_modules=targets, init_lora_weights=False))
    ids = tokens(1, 12)
    whole = adapted(ids).logits
    cache = HybridCache(float_model.config)
    steps = [adapted(ids[:, t : t + 1], **{CACHE: cache}).logits for t in range(12)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, **EXACT)
    with adapted.disable_adapter():
        assert (adapted(ids).logits - whole).abs().max() > 0.1


def test_no_adapter_of_all_linear_is_dead(float_model):
    """Fault 89: every adapter that PEFT attaches gets a gradient."""
    adapted = get_peft_model(float_model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    ids = tokens(2, 16)
    adapted(ids, labels=ids).loss.backward()
    attached = [(name, p) for name, p in adapted.named_parameters() if "lora_" in name]
    assert len(attached) > 50
    assert not [name for name, p in attached if p.grad is None or not p.grad.abs().sum() > 0]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "re-entrant"])
def test_gradient_checkpointing_recomputes_and_changes_nothing(float_model, reentrant, monkeypatch):
    """Faults 15, 96, 97: KDA layers run again in backward; gradients are equal."""
    model, ids, calls = float_model.train(), tokens(2, 40), []
    chunk = kda.chunk_kda
    monkeypatch.setattr(kda, "chunk_kda", lambda *args, **kwargs: calls.append(1) or chunk(*args, **kwargs))
    model.enable_input_require_grads()

    def gradients():
        model.zero_grad()
        calls.clear()
        model(ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, len(calls)

    plain, once = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed, twice = gradients()
    assert twice == 2 * once
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, **EXACT)


def test_autocast_reaches_no_float32_part(float_model, monkeypatch):
    """Router logits are those of float32, the recurrence gets float32, whatever autocast is on around them."""
    seen, float_model = [], float_model.float()
    chunk = kda.chunk_kda

    def spy(q, k, v, g, beta, **kwargs):
        seen.append((torch.is_autocast_enabled("cpu"), q.dtype, g.dtype, beta.dtype))
        return chunk(q, k, v, g, beta, **kwargs)

    monkeypatch.setattr(kda, "chunk_kda", spy)
    gate, x = float_model.model.layers[1].block_sparse_moe.gate, torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        float_model(tokens(1, 40))
        assert torch.nn.functional.linear(x, gate.weight).dtype == torch.bfloat16, "autocast is on"
        logits = gate(x)[0]
    assert torch.equal(logits, torch.nn.functional.linear(x, gate.weight))
    assert seen and set(seen) == {(False, torch.float32, torch.float32, torch.float32)}


@torch.no_grad()
def test_forward_on_meta(data_dir):
    """Fault 81: no device is assumed; shapes come out on the meta device."""
    config = kimi_k3.KimiK3TextConfig.from_pretrained(data_dir / "k3_tiny_mxfp4")
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config)
    output = model(torch.zeros(2, 7, dtype=torch.long, device="meta"), use_cache=False)
    assert output.logits.shape == (2, 7, 160)


def test_packed_model_survives_requires_grad(model):
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert not any(p.requires_grad for p in frozen.parameters())
    frozen.requires_grad_(True)
    assert all(p.requires_grad for p in frozen.parameters() if p.is_floating_point())


def test_caches_cross_autograd_modes(model):
    """A cache of inference mode goes on under no_grad; one built under autograd can be copied."""
    ids = tokens(1, 20)
    expected = model(ids).logits[:, 12:]
    for context in (torch.inference_mode, contextlib.nullcontext):
        cache = HybridCache(model.config)
        with context():
            model(ids[:, :12], **{CACHE: cache})
        cache = copy.deepcopy(cache) if context is contextlib.nullcontext else cache
        with torch.no_grad():
            steps = [model(ids[:, t : t + 1], **{CACHE: cache}).logits for t in range(12, 20)]
        torch.testing.assert_close(torch.cat(steps, dim=1), expected, **EXACT)


def test_a_cache_of_inference_mode_goes_on_under_autograd(model):
    """Its states are constants then: gradients are those of a cache that was filled under no_grad."""
    ids, gradients = tokens(1, 20), []
    for context in (torch.inference_mode, torch.no_grad):
        cache = HybridCache(model.config)
        with context():
            model(ids[:, :12], **{CACHE: cache})
        embeds = model.get_input_embeddings()(ids[:, 12:]).detach().requires_grad_()
        model(inputs_embeds=embeds, **{CACHE: cache}).logits.square().sum().backward()
        gradients.append(embeds.grad)
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_both_cache_names(model, name):
    ids = tokens(1, 10)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    cache = HybridCache(model.config)
    text = model.generate(ids, **{name: cache}, **settings)
    assert torch.equal(text, model.generate(ids, **settings))
    assert cache.get_seq_length() > 0, "the cache that was given was used"


def test_key_mapping_is_honoured(data_dir, tmp_path):
    tensors = load_file(data_dir / "k3_dense_flat" / "model.safetensors")
    save_file({n.replace("o_proj", "out_proj"): t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((data_dir / "k3_dense_flat" / "config.json").read_text())
    renamed = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, key_mapping={"out_proj": "o_proj"})
    plain = KimiK3ForCausalLM.from_pretrained(data_dir / "k3_dense_flat", dtype=torch.float32)
    assert torch.equal(renamed(tokens(1, 6)).logits, plain(tokens(1, 6)).logits)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda t: {**t, "model.norm.weight": t["model.norm.weight"].char()}, "model.norm.weight is stored as I8"),
        (lambda t: {**t, "language_model.model.norm.weight": t["model.norm.weight"].clone()}, "are the same tensor"),
    ],
    ids=["other-number-format", "there-twice"],
)
def test_checkpoints_that_would_be_misread(data_dir, tmp_path, change, sentence):
    save_file(change(load_file(data_dir / "k3_dense_flat" / "model.safetensors")), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((data_dir / "k3_dense_flat" / "config.json").read_text())
    with pytest.raises(ValueError, match=sentence):
        KimiK3ForCausalLM.from_pretrained(tmp_path)


def test_saving_keeps_the_users_files(model, tmp_path):
    (tmp_path / "experts.py").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "experts.py").read_text() == "mine"
    assert (tmp_path / "kernels" / "experts.py").read_bytes() == open(experts.__file__, "rb").read()


def test_missing_vision_weights_start_finite(data_dir, tmp_path):
    folder = data_dir / "k3_vision" / "small_signal"
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith("vision_tower")}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    loaded = KimiK3ForConditionalGeneration.from_pretrained(tmp_path, new_tensors=["vision_tower"])
    assert all(torch.isfinite(t).all() for t in loaded.state_dict().values())


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"linear_attn_config": {"kda_layers": None}}, "kda_layers"),
        ({"linear_attn_config": {"full_attn_layers": ["a"]}}, "full_attn_layers"),
        ({"linear_attn_config": {"num_heads": True}}, "num_heads"),
        ({"quantization_config": "mxfp4"}, "quantization_config"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor"),
        ({"num_experts_per_token": True}, "num_experts_per_token"),
        ({"mla_use_output_gate": "no"}, "mla_use_output_gate"),
        ({"initializer_range": -1}, "initializer_range"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_config_values_of_the_wrong_kind(data_dir, changes, field):
    settings = kimi_k3.KimiK3TextConfig.from_pretrained(data_dir / "k3_tiny_mxfp4").to_dict()
    linear = {**settings["linear_attn_config"], **changes.get("linear_attn_config", {})}
    with pytest.raises(ValueError, match=field):
        kimi_k3.KimiK3TextConfig.from_dict({**settings, **changes, "linear_attn_config": linear})


def test_a_pseudo_query_is_no_linear_layer():
    assert not issubclass(layers_kimi_k3.KimiK3PseudoQuery, torch.nn.Linear)


@pytest.mark.parametrize("place", ["layer 3 (MLA)", "layer 1 (KDA)", "the embedding", "the output norm", "lm_head"])
@torch.no_grad()
def test_the_first_layer_that_is_not_finite_is_named(model, place):
    """Fault 73: a debug mode says where NaN or infinity first appeared."""
    broken = copy.deepcopy(model)
    text = getattr(broken, "language_model", broken)
    broken.check_finite = True
    assert torch.isfinite(broken(tokens(1, 5)).logits).all()
    weight = {
        "layer 3 (MLA)": text.model.layers[3].self_attn.o_proj.weight,
        "layer 1 (KDA)": text.model.layers[1].self_attn.o_proj.weight,
        "the embedding": text.model.embed_tokens.weight,
        "the output norm": text.model.norm.weight,
        "lm_head": text.lm_head.weight,
    }[place]
    weight.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=place.replace("(", r"\(").replace(")", r"\)")):
        broken(tokens(1, 5))


@torch.no_grad()
def test_logits_to_keep_never_makes_all_logits(model, monkeypatch):
    """The head sees the kept positions only, so a long prompt never makes [T, vocabulary]."""
    text, seen = getattr(model, "language_model", model), []
    forward = text.lm_head.forward
    monkeypatch.setattr(text.lm_head, "forward", lambda x: seen.append(x.shape) or forward(x))
    assert model(tokens(1, 50), logits_to_keep=1).logits.shape == (1, 1, 160)
    assert seen == [(1, 1, 64)]


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "float"])
@torch.no_grad()
def test_disk_offload(data_dir, tmp_path, dequantize):
    """Layers that lie on disk give the same logits and text, packed experts and absorbed attention included."""
    folder = data_dir / "k3_tiny_mxfp4"
    plain = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float64)
    places = {name: "cpu" for name in ("model.embed_tokens", "model.norm", "lm_head")}
    places |= {f"model.output_attn_res_{part}": "cpu" for part in ("norm", "proj")}
    places |= {f"model.layers.{i}": "disk" if i in (1, 3) else "cpu" for i in range(7)}
    settings = {"dtype": torch.float64, "device_map": places, "offload_folder": tmp_path, "dequantize": dequantize}
    offloaded = KimiK3ForCausalLM.from_pretrained(folder, **settings)
    assert offloaded.model.layers[3].self_attn.o_proj.weight.is_meta
    ids = tokens(1, 20)
    torch.testing.assert_close(offloaded(ids).logits, plain(ids).logits, **EXACT)
    generation = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(offloaded.generate(ids, **generation), plain.generate(ids, **generation))


@pytest.mark.parametrize(
    "folder, layers",
    [
        pytest.param("k3_dense_flat", 5, id="dense", marks=pytest.mark.one_release),
        pytest.param("k3_tiny_mxfp4", 4, id="packed experts"),
        pytest.param("kimi_linear_flat", 4, id="kimi_linear", marks=pytest.mark.one_release),
    ],
)
@torch.no_grad()
def test_compiles_as_one_graph(data_dir, folder, layers):
    """Without a graph break, packed experts included; the logits are those of the uncompiled model.

    Tracing takes as long as there are layers: these have every kind of them and a border of blocks of the depth mix.
    """
    model = KimiK3ForCausalLM.from_pretrained(data_dir / folder, dtype=torch.float32).double()
    model.model.layers = model.model.layers[:layers]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = tokens(2, 70)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, **EXACT)


@pytest.mark.one_release
def test_a_compiled_model_trains(float_model):
    """One graph with float experts: logits and gradients are the uncompiled ones; the selection bias gets none."""
    model, ids = float_model.train(), tokens(2, 70)
    model.model.layers = model.model.layers[:4]  # as above

    def gradients(forward):
        model.zero_grad()
        output = forward(ids, labels=ids, use_cache=False)
        output.loss.backward()
        logits.append(output.logits.detach())
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    logits = []

    torch._dynamo.reset()
    plain = gradients(model)
    compiled = gradients(torch.compile(model, fullgraph=True, backend="eager"))
    torch.testing.assert_close(*logits, **EXACT)
    assert compiled.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient, **EXACT)


def test_checkpointing_holds_less(float_model):
    """What a step at T=2048 keeps for backward falls by far more than the 30 % that is asked for."""
    model, ids = float_model.float().train(), tokens(1, 2048)

    def bytes_kept():
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return sum(kept.values())

    plain = bytes_kept()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert bytes_kept() < 0.7 * plain


@torch.no_grad()
def test_masks_of_numbers(model):
    """1 and 0 of any type are a mask. What is added to the scores would be read as its opposite, and numbers of packed
    documents as one text: refused."""
    ids, mask = padded("left")
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    for dtype in (torch.bool, torch.float32):
        assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits[mask.bool()], expected)
    for padding in (-1e9, float("-inf")):
        added = torch.where(mask.bool(), 0.0, padding)
        with pytest.raises(ValueError, match="other than 0 and 1"):
            model(ids, attention_mask=added)
    for numbers in ((mask - 1) * 10_000, mask.cumsum(-1).clamp(max=2) * mask):
        with pytest.raises(ValueError, match="nor numbers of packed documents"):
            model(ids, attention_mask=numbers)
