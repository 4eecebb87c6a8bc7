"""What a folder holds is decided in one place: loading, converting and inspecting say the same of a doubtful one."""

import json
import os
import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from kimi_k3 import KimiK3ForCausalLM, KimiK3TextConfig
from kimi_k3.conversion import convert
from kimi_k3.conversion.inventory import take_inventory
from kimi_k3.conversion.verify import verify

INDEX = "model.safetensors.index.json"
DOORS = {
    "load": lambda folder, out: KimiK3ForCausalLM.from_pretrained(folder),
    "convert": lambda folder, out: convert(folder, out),
    "inspect": lambda folder, out: take_inventory(folder),
}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    tiny.model("kmk").save_pretrained(folder)
    return folder, load_file(folder / "model.safetensors")


@pytest.fixture
def folder(tensors, tmp_path):
    """A folder with a configuration and no weights."""
    path = tmp_path / "folder"
    path.mkdir()
    (path / "config.json").write_bytes((tensors[0] / "config.json").read_bytes())
    return path


def write_index(folder, names, file):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))


def write_weights(path, tensors):
    save_file(tensors, path, metadata={"format": "pt"})


def refused_alike(folder, sentence):
    for name, enter in DOORS.items():
        with pytest.raises(ValueError) as caught:
            enter(folder, folder.parent / "out")
        assert sentence in str(caught.value), name
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("way", ["absolute", "above", "below"])
def test_an_index_names_files_of_its_folder_alone(way, tensors, folder):
    """Else a folder of somebody could make us read, and write into a converted one, any file of this machine."""
    source, content = tensors
    (folder / "inner").mkdir()
    write_weights(folder / "inner" / "model.safetensors", content)
    target = {
        "absolute": str(source / "model.safetensors"),
        "above": os.path.relpath(source / "model.safetensors", folder),
        "below": "inner/model.safetensors",
    }[way]
    write_index(folder, content, target)
    refused_alike(folder, f"{INDEX} names {target!r}, which is not a file of the folder")


def test_two_models_in_a_folder_are_refused(tensors, folder):
    """transformers would run the one and convert the other."""
    _, content = tensors
    write_weights(folder / "model.safetensors", {name: tensor * 2 for name, tensor in content.items()})
    write_index(folder, content, "model-00001-of-00001.safetensors")
    # An index whose shards are gone is only left over; so is the shard, once the index is gone.
    assert torch.equal(
        DOORS["load"](folder, None).lm_head.weight, content["lm_head.weight"] * 2
    ) and take_inventory(folder).tensors == len(content)  # fmt: skip
    write_weights(folder / "model-00001-of-00001.safetensors", content)
    refused_alike(folder, "holds two models, model.safetensors and the shards of")
    write_index(folder, content, "model.safetensors")
    assert torch.equal(DOORS["load"](folder, None).lm_head.weight, content["lm_head.weight"] * 2)
    convert(folder, folder.parent / "out")
    assert torch.equal(
        DOORS["load"](folder.parent / "out", None).lm_head.weight, content["lm_head.weight"] * 2
    )  # fmt: skip


def test_side_files_come_from_the_folder_alone(tensors, tmp_path):
    """A link in a folder of somebody could put any file of this machine into the converted one."""
    source, _ = tensors
    secret = tmp_path / "secret.json"
    secret.write_text('"of this machine"')
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (blobs / name).write_bytes((source / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{name}")  # as the hub's cache has them
    convert(snapshot, tmp_path / "cached")
    assert (tmp_path / "cached" / "generation_config.json").is_file()
    (snapshot / "special_tokens_map.json").symlink_to(secret)
    with pytest.raises(ValueError, match=r"special_tokens_map\.json is a link to a file outside the folder"):
        convert(snapshot, tmp_path / "out")
    (snapshot / "special_tokens_map.json").unlink()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "x.py").write_text("")
    (snapshot / "kernels").symlink_to(tmp_path / "code")
    (snapshot / "tokenizer_config.json").write_text('{"auto_map": {}}')
    with pytest.raises(ValueError, match=r"x\.py is a link to a file outside"):
        convert(snapshot, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_copied_values_that_are_not_finite_are_told(tensors, folder, caplog):
    _, content = tensors
    content = {name: tensor.clone() for name, tensor in content.items()}
    content["model.norm.weight"][3] = float("nan")
    write_weights(folder / "model.safetensors", content)
    convert(folder, folder.parent / "out")
    assert "norm.weight: values that are not finite were copied as they are" in caplog.text
    result = verify(folder, folder.parent / "out", logits=False)
    assert result.same and result.not_finite == ["norm.weight"]


def test_a_configuration_cannot_ask_for_more_experts_than_there_are(tensors, folder):
    """Before a list of all their names is made: a million experts would take minutes and gigabytes."""
    _, content = tensors
    write_weights(folder / "model.safetensors", content)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_experts": 10**6}))
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    refused_alike(folder, "num_experts is 1000000 in the configuration, and the checkpoint lacks all but 9")
    assert time.process_time() - start < 20, "seconds, where a list took minutes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 500_000, "kB"


def test_a_tensor_of_no_bytes_stands_for_no_experts(tensors, folder):
    """A header may give any number of experts without a byte of them."""
    _, content = tensors
    name = "model.layers.1.block_sparse_moe.experts.gate_up_proj"
    write_weights(folder / "model.safetensors", {**content, name: torch.empty(10**9, 2, 0)})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_experts": 10**9}))
    refused_alike(folder, f"{name} has shape [1000000000, 2, 0], not [1000000000, rows, columns] of all experts")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**12},
        {"hidden_act": "x" * 10**6},
        {"num_experts": [1] * 10**6},
        {"linear_attn_config": {"kda_layers": [*range(1, 10**5), 10**6], "full_attn_layers": [10**7]}},
        {"linear_attn_config": {"kda_layers": ["x"] * 10**5}},
        {"linear_attn_config": {"x" * 10**6: 1}},
    ],
    ids=["many-layers", "long-text", "long-list", "layers-out-of-range", "no-numbers", "long-key"],
)
def test_no_configuration_takes_the_memory_or_fills_the_screen(changes, tensors):
    values = json.loads((tensors[0] / "config.json").read_text())
    linear = values["linear_attn_config"] | changes.get("linear_attn_config", {})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, TypeError)) as caught:
        KimiK3TextConfig.from_dict({**values, **changes, "linear_attn_config": linear})
    assert len(str(caught.value)) < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200_000, "kB"


def test_a_model_without_a_sparse_layer_needs_no_experts(tmp_path):
    """A cut of the first layers keeps `num_experts` in its configuration."""
    tiny.model("km", first_k_dense_replace=2).save_pretrained(tmp_path / "dense")
    KimiK3ForCausalLM.from_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "out")
    assert not take_inventory(tmp_path / "out").missing


@pytest.mark.parametrize("way", ["through a link", "relative"])
def test_the_cache_of_the_hub_anywhere(way, tensors, tmp_path, monkeypatch):
    """Its files are links to its blobs; the cache may lie behind a link itself."""
    source, _ = tensors
    blobs, snapshot = tmp_path / "disk" / "models--x" / "blobs", tmp_path / "disk" / "models--x" / "snapshots" / "a"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    for number, file in enumerate((source / "config.json", source / "model.safetensors")):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (blobs / "2").write_text("{}")
    (snapshot / "special.json").symlink_to("../../blobs/2")
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path)
    root = Path("disk") if way == "relative" else tmp_path / "home"
    convert(root / "models--x" / "snapshots" / "a", tmp_path / "out")
    assert (tmp_path / "out" / "special.json").read_text() == "{}"
