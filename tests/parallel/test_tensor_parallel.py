"""Tensor, expert and pipeline parallelism in two processes on the CPU: what they compute, send and refuse.

One run of this file as a script does everything that needs two processes: it imports once and forks.
"""

import contextlib
import copy
import datetime
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from kimi_k3 import HybridCache, KimiK3ForCausalLM, KimiK3TextConfig, distributed_kimi_k3
from kimi_k3.distributed_kimi_k3 import OwnExperts, PipelinePart, check_fit
from kimi_k3.parallel import wire
from kimi_k3.training import QKClip
from rounding import EXACT
from several import by_one
from waiting import PATIENCE, run_script, until

# Releases that can cut attention and spread experts in one run; those that let one choose how tokens reach experts.
EP_SIZE, EP_IMPLEMENTATION = (
    name in DistributedConfig.__dataclass_fields__ for name in ("ep_size", "ep_implementation")
)
RANKS = 2


def changed(folder, packed=True, **values):
    config = KimiK3TextConfig.from_pretrained(folder)
    for name, value in values.items():
        setattr(config, name, value)
    if not packed:
        config.expert_quantization = None
    return config


def on_meta(config):
    with torch.device("meta"):
        return KimiK3ForCausalLM(copy.deepcopy(config))


@pytest.mark.parametrize("folder", ["k3_dense_flat", "k3_tiny_mxfp4", "kimi_linear_flat", None])
def test_the_plans_name_every_weight(folder, data_dir):
    """Fault 108: every parameter has a rule and every rule a parameter or module, down to A_log and dt_bias."""
    released = {"num_hidden_layers": 4, "num_experts": 32, "hidden_size": 256, "vocab_size": 64, "q_lora_rank": 32}
    linear = {**KimiK3TextConfig().linear_attn_config, "full_attn_layers": [4], "kda_layers": [1, 2, 3]}
    config = KimiK3TextConfig(**released, linear_attn_config=linear)
    if folder is not None:
        config = KimiK3TextConfig.from_pretrained(data_dir / folder)
    model = on_meta(config)
    plan, expert_plan = model.tp_plan, model._ep_plan
    names = {replace_layer_number_by_wildcard(name) for name, _ in model.named_parameters()}
    modules = {replace_layer_number_by_wildcard(name) for name, _ in model.named_modules()}
    assert set(plan) <= names | modules and set(expert_plan) <= names | modules
    assert [name for name in names if name not in plan and name.rsplit(".", 1)[0] not in plan] == []
    assert set(plan.values()) | set(expert_plan.values()) <= set(ALL_PARALLEL_STYLES)
    assert {name for name in names if ".experts." in name} == {name for name in expert_plan if ".experts." in name}
    with pytest.raises(AttributeError, match="DistributedConfig"):
        config.base_model_tp_plan = {}
    assert bool(expert_plan) == bool(config.num_experts) and model.supports_tp_plan and model.supports_pp_plan
    passed_on = ["partial", "blocks"] if config.attn_res_block_size else ["partial"]
    assert model.config.base_model_pp_plan["layers"] == ([*passed_on, "attention_mask"], passed_on)
    assert {name.split(".")[0] for name in model.config.base_model_pp_plan} == {
        n for n, _ in model.model.named_children()
    }


@pytest.mark.parametrize(
    ("folder", "values", "processes", "sentence"),
    [
        ("k3_dense_flat", {}, {"tp_size": 3}, "linear_attn_config.num_heads is 2, which 3 processes"),
        ("k3_dense_flat", {}, {"tp_size": 3}, "num_attention_heads is 2, which 3 processes cannot share evenly"),
        ("k3_dense_flat", {"intermediate_size": 161}, {"tp_size": 2}, "intermediate_size is 161, which 2 processes"),
        ("k3_tiny_mxfp4", {}, {"tp_size": 2}, "moe_intermediate_size is 32, which 2 .* whole MXFP4 groups of 32"),
        ("kimi_linear_flat", {"moe_intermediate_size": 33}, {"tp_size": 2}, r"num_shared_experts \* moe_int.* is 33"),
        (
            "kimi_linear_flat",
            {"num_experts": 7},
            {"tp_size": 2, "enable_expert_parallel": True},
            "num_experts is 7, which 2 processes cannot share evenly",
        ),
        ("k3_dense_flat", {}, {"tp_size": 2, "enable_expert_parallel": True}, "num_experts is 0, which 2 processes"),
        ("k3_dense_flat", {}, {"pp_size": 7}, "num_hidden_layers is 6, too few for 7 pipeline stages"),
        ("k3_dense_flat", {}, {"tp_size": 2, "pp_size": 2}, "tp_size=2 and pp_size=2 cannot go together"),
        ("k3_dense_flat", {}, {"fsdp_size": 2}, "fsdp_size and .* would cut A_log as it lies in the file"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(folder, values, processes, sentence, data_dir):
    model = on_meta(changed(data_dir / folder, **values))
    with pytest.raises(ValueError, match=sentence):
        check_fit(model, DistributedConfig(**processes))


def test_what_fits_is_let_through(data_dir):
    """The released model: 96 heads, 3072 columns in groups of 32, 896 experts."""
    config = KimiK3TextConfig(num_hidden_layers=1, linear_attn_config=KimiK3TextConfig().linear_attn_config | {
        "kda_layers": [], "full_attn_layers": [1]}, first_k_dense_replace=0, vocab_size=8, num_experts=896)  # fmt: skip
    config.expert_quantization = KimiK3TextConfig.from_pretrained(data_dir / "k3_tiny_mxfp4").expert_quantization
    model = on_meta(config)
    for ranks in (2, 8, 32, 96):
        check_fit(model, DistributedConfig(tp_size=ranks))
    with pytest.raises(ValueError, match="num_attention_heads is 96, which 64"):
        check_fit(model, DistributedConfig(tp_size=64))
    check_fit(model, DistributedConfig(tp_size=64, enable_expert_parallel=True))


@pytest.mark.one_release
def test_tokens_of_other_processes_experts_are_numbered_past_the_last_one(monkeypatch):
    """The exchange of releases that have none of their own."""
    for name in ("complete_gradient", "sum_over_processes"):
        monkeypatch.setattr(distributed_kimi_k3, name, lambda x, mesh: x)
    monkeypatch.setattr(distributed_kimi_k3, "local_parameters", lambda module, mesh: contextlib.nullcontext())
    experts = SimpleNamespace(num_experts=3, forward=lambda *given: given)
    OwnExperts().install_forward(experts, SimpleNamespace(get_local_rank=lambda: 1))
    hidden, chosen = torch.randn(2, 4), torch.tensor([[0, 3, 8], [5, 2, 4]])
    given, own, weights = experts.forward(hidden, chosen, torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]))
    assert given is hidden and own.tolist() == [[3, 0, 3], [2, 3, 1]]
    assert torch.equal(weights, torch.tensor([[0.0, 0.2, 0.0], [0.4, 0.0, 0.6]]))


@pytest.mark.portable
def test_two_processes_compute_what_one_does(data_dir, tmp_path):
    """The script below; its output says which check failed. The last one ends a process, so that one has a code."""
    done = run_script(__file__, data_dir, tmp_path, capture_output=True, text=True)
    report = f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, report
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 7], report
    for name in CHECKS:
        assert done.stdout.count(f"{name.__name__}: ok\n") == RANKS, report


# What follows runs in the two processes.


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load(folder, options=None, dtype=torch.float64, **arguments):
    cut = None if options is None else DistributedConfig(**options)
    torch.set_default_dtype(dtype)  # of the parameters that are never in less than float32
    try:
        return KimiK3ForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=cut, **arguments)
    finally:
        torch.set_default_dtype(torch.float32)


def golden(folder):
    tensors = load_file(folder / "golden.safetensors")
    return tensors["input_ids"], tensors["greedy_ids"]


def same(model, alone, ids, wanted=None):
    """Logits, generated ids, and the gradients of two micro-batches, of two models."""
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            got, expected = model(ids, **options).logits, by_one(lambda options=options: alone(ids, **options).logits)
            torch.testing.assert_close(got, expected, **EXACT)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    got, expected = model.generate(ids, **options), by_one(lambda: alone.generate(ids, **options))
    assert torch.equal(got, expected)
    if wanted is not None:
        assert torch.equal(got[:, ids.shape[1] :], wanted[:, :4])

    def step(model):
        model.train()
        for part in (ids[:, :11], ids[:, :29]):
            model(part, labels=part).loss.backward()

    step(model)
    same_gradients(model, alone, step)


def same_gradients(model, alone, step):
    """Those that a process has of `model`, and those of `step(alone)`."""

    def gradients_of_one():
        step(alone)
        return {name: parameter.grad for name, parameter in alone.named_parameters()}

    gradients = by_one(gradients_of_one)
    for name, parameter in model.named_parameters():
        expected = gradients[name]
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            bound = EXACT["atol"] * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(
                whole(parameter.grad), expected, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
            )


def tensor_parallel(data, scratch, rank):
    """Dense and MoE models on half the heads, columns and experts' columns, in both layouts of KDA's gate."""
    for name, experts in (("k3_dense_flat", None), ("kimi_linear_flat", (8, 64, 64))):
        ids, wanted = golden(data / name)
        model, alone = load(data / name, {"tp_size": 2}), load(data / name)
        layer = model.model.layers[1]
        heads = model.config.linear_attn_config["num_heads"] // 2
        assert layer.self_attn.num_heads == heads and layer.self_attn.dt_bias.to_local().shape == (
            heads * model.config.linear_attn_config["head_dim"],
        )
        if experts is not None:  # [E, 2M, D], half of M
            assert layer.block_sparse_moe.experts.gate_up_proj.to_local().shape == (experts[0], 32, experts[2])
        same(model, alone, ids, wanted)
        model.eval()
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            attentions = model(ids, output_attentions=True).attentions
            expected = by_one(lambda alone=alone, ids=ids: alone.eval()(ids, output_attentions=True).attentions)
        assert cache.layers[0].tensors()[-1].shape[1] == heads, "states of other processes' heads"
        torch.testing.assert_close(attentions, expected, **EXACT)


def other_ways_to_decode(data, scratch, rank):
    """Static caches, beams and drafts that are taken back work on a process's own heads."""
    ids, _ = golden(data / "k3_dense_flat")
    model, alone = load(data / "k3_dense_flat", {"tp_size": 2}), load(data / "k3_dense_flat")
    for options in ({"cache_implementation": "static"}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
        some = ids[:1] if "prompt_lookup_num_tokens" in options else ids
        options = {**options, "attention_mask": torch.ones_like(some), "max_new_tokens": 4, "do_sample": False}
        expected = by_one(lambda some=some, options=options: alone.generate(some, **options))
        assert torch.equal(model.generate(some, **options), expected), options
    with torch.no_grad():  # a saved cache belongs to the process that made it
        cache = model(ids[:, :-1]).past_key_values
        cache.save(scratch / f"cache{rank}", model)
        got = model(ids[:, -1:], past_key_values=HybridCache.load(scratch / f"cache{rank}", model)).logits
        expected = by_one(lambda: alone(ids).logits)
        torch.testing.assert_close(got[:, -1], expected[:, -1], **EXACT)
        dist.barrier()
        with pytest.raises(ValueError):
            HybridCache.load(scratch / f"cache{1 - rank}", model)
    with pytest.raises(ValueError, match="cut over processes"):
        QKClip(model)

    def step(model):  # a few tokens against a cache, where MLA reads the weight of kv_b_proj itself
        cache = model(ids[:, :-2]).past_key_values
        model(ids[:, -2:], past_key_values=cache, attention_mask=torch.ones_like(ids)).logits.square().sum().backward()

    step(model)
    same_gradients(model, alone, step)


def packed_experts(data, scratch, rank):
    """MXFP4 is cut as it lies, in whole groups, and a folder saved from parts is the one that was read; tied head."""
    ids = golden(data / "k3_tiny_mxfp4")[0][:, :40]
    for options in ({}, {"dequantize": True}):
        model, alone = load(scratch / "packed", {"tp_size": 2}, **options), load(scratch / "packed", **options)
        experts = model.model.layers[1].block_sparse_moe.experts
        if not options:
            shapes = [tuple(parameter.to_local().shape) for parameter in experts.parameters()]
            assert shapes == [(8, 64, 16), (8, 64, 1), (8, 32, 16), (8, 32, 1)]
            assert {parameter.dtype for parameter in experts.parameters()} == {torch.uint8}
            load(scratch / "packed", {"tp_size": 2}, torch.float32).save_pretrained(scratch / "saved")
            saved, read = (load_file(scratch / name / "model.safetensors") for name in ("saved", "packed"))
            assert torch.equal(saved.pop("lm_head.weight"), read["model.embed_tokens.weight"])
            assert set(saved) == set(read) and all(torch.equal(saved[key], read[key]) for key in read)
        same(model, alone, ids)


def expert_parallel(data, scratch, rank):
    """Whole experts on their processes: alone, and beside cut attention where transformers can."""
    alone_too, sums = {"enable_expert_parallel": True}, {"ep_size": 2, "ep_implementation": "all_reduce"}
    cases = [("k3_tiny_mxfp4", alone_too)]
    if not EP_IMPLEMENTATION:
        cases.append(("kimi_linear_flat", alone_too))
    if EP_SIZE:
        cases.append(("k3_tiny_mxfp4", {"ep_size": 2}))
    if EP_IMPLEMENTATION:
        cases.append(("kimi_linear_flat", sums))
    for name, options in cases:
        ids = golden(data / name)[0][:, :40]
        model, alone = load(data / name, {"tp_size": 2, **options}), load(data / name)
        experts = model.model.layers[1].block_sparse_moe.experts
        assert experts.num_experts == 4 and next(experts.parameters()).to_local().shape[0] == 4
        cut = isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)
        if EP_IMPLEMENTATION or not EP_SIZE:  # for the others, experts alone are experts beside cut attention
            assert cut == ("enable_expert_parallel" not in options)
        same(model, alone, ids)


def pipeline(data, scratch, rank):
    """Stages pass the finished blocks on: logits and ids through `generate`, gradients through torch's pipelining."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def loss(logits, ids):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    for name in ("k3_tiny_mxfp4", "kimi_linear_flat"):
        ids, wanted = golden(data / name)
        model, alone = load(data / name, {"pp_size": 2}), load(data / name)
        held = {key for key, _ in model.named_parameters() if ".layers." in key}
        assert 0 < len(held) < sum(".layers." in key for key, _ in alone.named_parameters())
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with torch.no_grad():
            got = model(ids, attention_mask=mask, use_cache=False).logits
            expected = by_one(lambda alone=alone, ids=ids, mask=mask: alone(ids, attention_mask=mask).logits)
        torch.testing.assert_close(got, expected, **EXACT)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "use_cache": False}
        assert torch.equal(model.generate(ids, **options)[:, ids.shape[1] :], wanted[:, :6])
        with pytest.raises(NotImplementedError, match="use_cache=False, not use_cache"):
            model(ids, use_cache=True)
        with pytest.raises(NotImplementedError, match="would lack the others"):
            model.save_pretrained(scratch / "stage")
        model.train(), alone.train()
        with pytest.raises(RuntimeError, match="PipelinePart"):
            model(ids)
        stage = PipelineStage(PipelinePart(model), rank, RANKS, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss)
        _ = schedule.step(ids) if rank == 0 else schedule.step(target=ids)

        def gradients_of_one(alone=alone, ids=ids):
            loss(alone(ids).logits, ids).backward()
            return {key: parameter.grad for key, parameter in alone.named_parameters()}

        gradients = by_one(gradients_of_one)
        for key in held:
            got = model.get_parameter(key).grad
            torch.testing.assert_close(got, gradients[key], **EXACT, msg=lambda t, key=key: f"{key}: {t}")


def bytes_sent(data, scratch, rank):
    """What is counted on the wire is what the formulas say."""
    cases = [("k3_dense_flat", {"tp_size": 2}), ("kimi_linear_flat", {"tp_size": 2})]
    if not EP_SIZE:
        cases.append(("k3_tiny_mxfp4", {"tp_size": 2, "enable_expert_parallel": True}))
    if EP_IMPLEMENTATION:
        spread = {"tp_size": 2, "enable_expert_parallel": True, "ep_implementation": "all_reduce"}
        cases.append(("k3_tiny_mxfp4", spread))
        cases.append(("k3_tiny_mxfp4", {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"}))
    for name, options in cases:
        ids = golden(data / name)[0][:, :40]
        model, pairs = load(data / name, options, torch.float32).train(), [0]
        config, tokens = model.config, ids.numel()
        exchanged = options.get("ep_implementation") == "all_to_all"

        def count(module, inputs, output, pairs=pairs, config=config):
            own = output[1].chunk(RANKS)[rank]  # a process sends the pairs of its share of the tokens
            pairs[0] += int((own // (config.num_experts // RANKS) != rank).sum())

        for module in model.modules():
            if type(module).__name__ == "KimiK3TopkRouter":
                module.register_forward_hook(count)
        with wire.Wire() as forward:
            square = model(ids).logits.square().mean()
        with wire.Wire() as backward:
            square.backward()
        totals = torch.tensor([forward.total, backward.total, pairs[0]], dtype=torch.float64)
        dist.all_reduce(totals)
        *sent, elsewhere = (totals / RANKS).tolist()
        expected = [0, 0]
        if "enable_expert_parallel" not in options:
            expected = wire.tensor_parallel_bytes(config, RANKS, tokens, tokens, 4, "ep_size" in options)
        if len(options) > 1:
            more = wire.expert_parallel_bytes(config, RANKS, tokens, 4, elsewhere if exchanged else None)
            expected = [a + b for a, b in zip(expected, more, strict=True)]
        assert sent == pytest.approx(expected, rel=0.05), (name, options, forward.sent, backward.sent)
    ids, _ = golden(data / "k3_tiny_mxfp4")
    model = load(data / "k3_tiny_mxfp4", {"pp_size": 2}, torch.float32)
    first = model._pp_stage.layer_range_for_rank(1, model.config.num_hidden_layers)[0]
    with torch.no_grad(), wire.Wire() as forward:
        model(ids, use_cache=False)
    expected = wire.pipeline_bytes(model.config, first, ids.numel(), 4) if rank == 0 else 0
    assert forward.sent.get("send", 0) == expected


def misfits(data, scratch, rank):
    """A number of processes that does not fit is an error on each of them."""
    with pytest.raises(ValueError, match="num_heads is 3, which 2 processes cannot share evenly"):
        load(scratch / "three_heads", {"tp_size": 2})
    with pytest.raises(RuntimeError, match="2"):
        load(data / "k3_dense_flat", {"tp_size": 4})


def passed(check):
    os.write(1, f"{check.__name__}: ok\n".encode())  # one write: two processes share the pipe


def meet(scratch, rank, name):
    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{scratch / name}", rank=rank, world_size=2, timeout=timeout)


def a_process_that_stops(data, scratch, rank):
    """One that hangs is an error on the others after the timeout of the group of `init_process_group`."""
    model, seen = load(data / "k3_dense_flat", {"tp_size": 2}), scratch / "the other one has seen it"
    dist.barrier()
    if rank == 1:
        until(seen.exists)
        return
    # Only now: what came before may take as long as it likes on a busy machine.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2), dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        model(torch.ones(1, 4, dtype=torch.long))
    seen.touch()


def a_process_that_dies(data, scratch, rank):
    """The others raise because its connection is closed, without waiting for the timeout."""
    meet(scratch, rank, "second")
    model = load(data / "k3_dense_flat", {"tp_size": 2})
    dist.barrier()
    if rank == 1:
        passed(a_process_that_dies)
        os._exit(7)
    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed"):
        model(torch.ones(1, 4, dtype=torch.long))


CHECKS = (
    tensor_parallel,
    other_ways_to_decode,
    packed_experts,
    expert_parallel,
    pipeline,
    bytes_sent,
    misfits,
    a_process_that_stops,
    a_process_that_dies,
)


def run(data, scratch, rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    meet(scratch, rank, "first")
    for check in CHECKS:
        start = time.process_time()
        check(data, scratch, rank)
        passed(check)
        print(f"{check.__name__} took {time.process_time() - start:.1f} s", file=sys.stderr, flush=True)


def main(data, scratch):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    packed = changed(data / "k3_tiny_mxfp4", num_hidden_layers=4, moe_intermediate_size=64, tie_word_embeddings=True)
    packed.linear_attn_config = {**packed.linear_attn_config, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    KimiK3ForCausalLM(packed).save_pretrained(scratch / "packed")
    three = changed(data / "k3_dense_flat")
    three.linear_attn_config = {**three.linear_attn_config, "num_heads": 3}
    KimiK3ForCausalLM(three).save_pretrained(scratch / "three_heads")
    children = []
    for rank in range(RANKS):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(data, scratch, rank)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
