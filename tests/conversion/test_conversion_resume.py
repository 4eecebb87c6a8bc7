"""Conversions that are killed, and checkpoints that must not be converted: nothing half-made, nothing lost."""

import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_k3.__main__ import main
from kimi_k3.conversion import ConversionError, Target, convert
from kimi_k3.conversion import run as run_module
from kimi_k3.conversion.inventory import take_inventory
from waiting import work_for

pytestmark = pytest.mark.one_release

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MANY = Target(layout="native", expert_dtype="fp32", shard_size=40_000)


def content(folder):
    """File name -> bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def sharded(data_dir, tmp_path):
    """The packed golden checkpoint in shards that a test may damage."""
    convert(data_dir / "k3_tiny_mxfp4", tmp_path / "source", Target(shard_size=200_000))
    return tmp_path / "source"


# --- killed ----------------------------------------------------------------------------------------------------------


def test_twenty_kills_at_random_moments(data_dir, tmp_path):
    """Killed, then the same call again: shards that were whole stay untouched, the end is byte for byte the same."""
    source, destination, spent = data_dir / "kimi_linear_flat", tmp_path / "new", tmp_path / "spent"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kimi_k3.conversion"])

    def code_of_one(target, seconds=None):
        arguments = (seconds, spent, convert, source, target, MANY)
        process = context.Process(target=work_for, args=arguments, kwargs={"workers": 2})
        process.start()
        process.join()
        return process.exitcode

    for whole in (tmp_path / "whole", tmp_path / "timed"):  # the first one waits for the imports of the fork server
        assert code_of_one(whole) == 0
    duration = float(spent.read_text())
    expected = content(whole)
    assert len(expected) > 15 and content(tmp_path / "whole") == expected
    moments = random.Random(0)
    kills = in_the_middle = finished = 0
    shards = {}
    while kills < 20 or not destination.exists():
        code = code_of_one(destination, moments.uniform(0.1, 0.9) * duration if kills < 20 else None)
        assert code in (0, -signal.SIGPROF)
        kills += code != 0
        work = Path(f"{destination}.partial") / "files"
        if work.exists():
            there = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in work.glob("*.safetensors")}
            assert shards.items() <= there.items(), "a finished shard was written again"
            shards = there
            in_the_middle += 0 < len(there) < 20
        if destination.exists():
            assert content(destination) == expected
            finished += 1
            shards = {}
            if kills < 20:
                shutil.rmtree(destination)
                shutil.rmtree(f"{destination}.partial", ignore_errors=True)
    assert content(destination) == expected
    assert kills == 20 and in_the_middle >= 3, (kills, in_the_middle, finished)


class Crash(BaseException):
    pass


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_a_crash_before_every_change_of_the_disk(overwrite, data_dir, tmp_path, monkeypatch):
    """In turn before each sync, rename, copy and removal: never a folder that looks complete and is not."""
    source, destination = data_dir / "kimi_linear_flat", tmp_path / "new"
    target = Target(expert_dtype="mxfp4", shard_size=250_000)
    convert(source, tmp_path / "whole", target)
    expected = content(tmp_path / "whole")
    assert "rounding.json" in expected and INDEX in expected
    calls = 0

    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls -= 1
            if calls == 0:
                raise Crash
            return function(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for owner, name in (
            (os, "fsync"),
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "rmdir"),
            (shutil, "copyfile"),
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        for crash in range(1, 200):
            if overwrite:
                destination.mkdir()
                (destination / "config.json").write_text("old")
            calls = crash
            try:
                convert(source, destination, target, overwrite=overwrite)
            except Crash:
                if destination.exists():
                    assert content(destination) in (expected, {"config.json": b"old"})
                calls = -1
                try:
                    convert(source, destination, target, overwrite=overwrite)
                except ConversionError as error:  # all was done but the removal of an empty folder
                    assert "is there already" in str(error) and not any(Path(f"{destination}.partial").iterdir())
                    Path(f"{destination}.partial").rmdir()
            assert content(destination) == expected
            assert not Path(f"{destination}.partial").exists()
            done = calls > 0
            calls = -1
            shutil.rmtree(destination)
            if done:
                break
    assert crash > 20, "otherwise the calls were not counted"


def test_other_options_or_sources_do_not_continue_it(sharded, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_finish", lambda *args: (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash):
            convert(sharded, tmp_path / "new")
    before = content(tmp_path / "new.partial" / "files")
    with pytest.raises(ConversionError, match="was begun with other options"):
        convert(sharded, tmp_path / "new", Target(expert_dtype="bf16"))
    os.utime(next(sharded.glob("*.safetensors")), (1, 1))
    with pytest.raises(ConversionError, match="was begun with other source files"):
        convert(sharded, tmp_path / "new")
    assert content(tmp_path / "new.partial" / "files") == before


def test_one_process_at_a_time(data_dir, tmp_path):
    (tmp_path / "new.partial").mkdir()
    with (tmp_path / "new.partial" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="another process is working in"):
            convert(data_dir / "kimi_linear_flat", tmp_path / "new")
    convert(data_dir / "kimi_linear_flat", tmp_path / "new")


# --- refused ---------------------------------------------------------------------------------------------------------


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shard_of(folder, name):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def without_index(folder, name):
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.1.w2.weight"


def cut(folder):
    path = folder / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def lose(folder):
    (folder / "model-00003-of-00004.safetensors").unlink()


def double(folder):
    tensor = load_file(shard_of(folder, f"{EXPERT}_scale"))[f"{EXPERT}_scale"]
    other = folder / "model-00004-of-00004.safetensors"
    rewrite(other, lambda tensors: tensors.update({f"{EXPERT}_scale": tensor}))


def retype(folder):
    path = shard_of(folder, f"{EXPERT}_packed")
    rewrite(path, lambda tensors: tensors.update({f"{EXPERT}_packed": tensors[f"{EXPERT}_packed"].float()}))


def retype_integer(folder):
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    rewrite(shard_of(folder, name), lambda tensors: tensors.update({name: tensors[name].to(torch.int32)}))


def lone_scale(folder):
    rewrite(shard_of(folder, f"{EXPERT}_packed"), lambda tensors: tensors.pop(f"{EXPERT}_packed"))
    without_index(folder, f"{EXPERT}_packed")


def lone_codes(folder):
    rewrite(shard_of(folder, f"{EXPERT}_scale"), lambda tensors: tensors.pop(f"{EXPERT}_scale"))
    without_index(folder, f"{EXPERT}_scale")


def unlisted(folder):
    without_index(folder, "language_model.model.norm.weight")


def no_index(folder):
    (folder / INDEX).unlink()


def tail(folder):
    name = "language_model.model.layers.0.self_attn.A_log"
    rewrite(shard_of(folder, name), lambda tensors: tensors[name][31:].fill_(1.0))


def no_section(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def extra(folder, values=torch.ones(4)):  # noqa: B008
    path = folder / "model-00004-of-00004.safetensors"
    rewrite(path, lambda tensors: tensors.update({"language_model.model.layers.7.enorm.weight": values}))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["language_model.model.layers.7.enorm.weight"] = path.name
    (folder / INDEX).write_text(json.dumps(index))


def overlapping(folder):
    path = folder / "model-00001-of-00004.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    header[names[1]]["data_offsets"] = [x - 4 for x in header[names[1]]["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def longer(folder):
    with (folder / "model-00002-of-00004.safetensors").open("ab") as file:
        file.write(b"12345678")


def pickle_in_index(folder):
    path = folder / "model-00002-of-00004.safetensors"
    torch.save(load_file(path), folder / "shard.bin")
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(path.name, "shard.bin"))


def not_json(folder):
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    "damage, message",
    [
        (cut, r"model-00002-of-00004\.safetensors is cut off"),
        (lose, r"lacks the shard model-00003-of-00004\.safetensors"),
        (double, r"layers\.2\..*experts\.1\.w2\.weight_scale is in model-0000\d.* and in model-00004"),
        (retype, r"layers\.2\..*experts\.1\.w2\.weight_packed is F32, expected U8"),
        (retype_integer, r"layers\.0\.self_attn\.q_proj\.weight .*is stored as I32"),
        (lone_scale, r"lacks .*layers\.2\..*experts\.1\.w2\.weight_packed"),
        (lone_codes, r"lacks .*layers\.2\..*experts\.1\.w2\.weight_scale"),
        (unlisted, r"holds language_model\.model\.norm\.weight, which .*index\.json does not list"),
        (no_index, r"has shards .* but no model\.safetensors\.index\.json"),
        (tail, r"layers\.0\.self_attn\.A_log has 32 entries for 4 heads"),
        (no_section, r"packed experts .* but the config has no quantization_config"),
        (extra, r"layers\.7\.enorm\.weight, which its configuration has no place for"),
        (overlapping, r"in model-00001-of-00004\.safetensors has bytes"),
        (longer, r"model-00002-of-00004\.safetensors has [\d,]+ bytes, and its header describes"),
        (pickle_in_index, r"names 'shard\.bin', which is not a safetensors file"),
        (not_json, r"config\.json is not JSON"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_sources_are_refused_by_name_and_the_target_is_untouched(damage, message, sharded, tmp_path):
    """Fault 115 (the tail of A_log), and every way a download goes wrong."""
    damage(sharded)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text("old")
    with pytest.raises(ConversionError, match=message):
        convert(sharded, tmp_path / "new", overwrite=True)
    assert content(tmp_path / "new") == {"config.json": b"old"}
    assert not (tmp_path / "new.partial").exists()


def test_an_adapter_beside_the_weights_is_refused(sharded, tmp_path):
    """Its configuration alone would go along, and the new folder would not load."""
    (sharded / "adapter_config.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"has an adapter beside its weights .*merge it"):
        convert(sharded, tmp_path / "new")
    assert not (tmp_path / "new.partial").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float8_e4m3fn], ids=str)
def test_foreign_tensors_can_be_left_out(dtype, sharded, data_dir, tmp_path):
    """Of any type: what is left out need not be one that is read."""
    extra(sharded, torch.ones(4).to(dtype))
    assert take_inventory(sharded).foreign == ["language_model.model.layers.7.enorm.weight"]
    convert(sharded, tmp_path / "new", drop_foreign=True)
    assert (tmp_path / "new" / WEIGHTS).read_bytes() == (data_dir / "k3_tiny_mxfp4" / WEIGHTS).read_bytes()


def test_an_existing_target_is_kept_unless_asked(data_dir, tmp_path):
    source = data_dir / "kimi_linear_flat"
    convert(source, tmp_path / "new")
    (tmp_path / "new" / "mine").write_text("mine")
    with pytest.raises(ConversionError, match="is there already: --overwrite"):
        convert(source, tmp_path / "new")
    assert (tmp_path / "new" / "mine").exists()
    convert(source, tmp_path / "new", overwrite=True)
    assert not (tmp_path / "new" / "mine").exists() and (tmp_path / "new" / WEIGHTS).exists()
    for place in (source, source / "inside", source.parent):
        with pytest.raises(ConversionError, match="take another place"):
            convert(source, place, overwrite=True)


def test_only_checkpoints_are_overwritten(data_dir, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("mine")
    with pytest.raises(ConversionError, match=r"home is not a checkpoint .*move it away"):
        convert(data_dir / "kimi_linear_flat", tmp_path / "home", overwrite=True)
    assert content(tmp_path / "home") == {"thesis": b"mine"}
    assert not (tmp_path / "home.partial").exists()


def test_a_target_that_is_made_in_the_meantime_is_kept(data_dir, tmp_path, monkeypatch):
    source, original = data_dir / "kimi_linear_flat", run_module._finish

    def meanwhile(*args):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "config.json").write_text("mine")
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_finish", meanwhile)
        with pytest.raises(ConversionError, match="is there already: --overwrite"):
            convert(source, tmp_path / "new")
    assert content(tmp_path / "new") == {"config.json": b"mine"}
    convert(source, tmp_path / "new", overwrite=True)
    assert (tmp_path / "new" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


def test_the_work_folder_may_not_be_the_source(data_dir, tmp_path):
    """Shards would be written among those that are read."""
    source = tmp_path / "new.partial" / "files"
    shutil.copytree(data_dir / "kimi_linear_flat", source)
    before = content(source)
    with pytest.raises(ConversionError, match=r"new\.partial is .*files or a folder .*take another place"):
        convert(source, tmp_path / "new", Target(shard_size=100_000))
    assert content(source) == before and not (tmp_path / "new").exists()


def test_a_mount_point_is_refused_before_the_start(data_dir, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "disk")
    with pytest.raises(ConversionError, match=r"disk is a mount point.*take a folder inside it"):
        convert(data_dir / "kimi_linear_flat", tmp_path / "disk")
    convert(data_dir / "kimi_linear_flat", tmp_path / "disk" / "new")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_source_that_changes_on_the_way_is_refused(name, data_dir, tmp_path, monkeypatch):
    source, original = tmp_path / "source", run_module._write_shard
    shutil.copytree(data_dir / "kimi_linear_flat", source)

    def meanwhile(*args):
        original(*args)
        os.utime(source / name, (1, 1))

    monkeypatch.setattr(run_module, "_write_shard", meanwhile)
    with pytest.raises(ConversionError, match=r"source changed while it was read: delete .*partial"):
        convert(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_too_little_disk_is_refused_before_the_start(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9, 700_000))
    with pytest.raises(ConversionError, match=r"has 700,000 bytes free, and [\d,]+ are needed"):
        convert(data_dir / "kimi_linear_flat", tmp_path / "new")
    assert not list(tmp_path.iterdir())
    convert(data_dir / "kimi_linear_flat", tmp_path / "new", Target(expert_dtype="mxfp4"))


def test_a_disk_that_fills_up_leaves_no_target(data_dir, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            convert(data_dir / "kimi_linear_flat", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    convert(data_dir / "kimi_linear_flat", tmp_path / "new")


def test_a_disk_that_takes_a_part_of_what_is_written_gets_the_rest(data_dir, tmp_path, monkeypatch):
    """Of headers too: a system that has little room left takes a part and reports no error."""
    source, pwrite = data_dir / "kimi_linear_flat", os.pwrite
    convert(source, tmp_path / "whole")
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, place: pwrite(descriptor, view[:4099], place))
    convert(source, tmp_path / "parts")
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_torch_save_files_are_read_only_when_asked(data_dir, tmp_path, monkeypatch):
    """Refused with the reason; with weights_only, tensors are read and code is not. The file was saved on a GPU."""
    source = tmp_path / "source"
    source.mkdir()
    shutil.copyfile(data_dir / "kimi_linear_flat" / "config.json", source / "config.json")
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(load_file(data_dir / "kimi_linear_flat" / WEIGHTS), source / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"unpickling runs whatever code .*--weights-only"):
        convert(source, tmp_path / "new")
    convert(source, tmp_path / "new", allow_pickle=True)
    assert (tmp_path / "new" / WEIGHTS).read_bytes() == (data_dir / "kimi_linear_flat" / WEIGHTS).read_bytes()

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"lm_head.weight": Evil()}, source / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin cannot be read with weights_only=True"):
        convert(source, tmp_path / "other", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


# --- the command line ------------------------------------------------------------------------------------------------


def test_commands(data_dir, tmp_path, capsys):
    golden, new = str(data_dir / "k3_tiny_mxfp4"), str(tmp_path / "new")
    assert main(["convert", golden, new, "--layout", "flat", "--expert-dtype", "bf16", "--shard-size", "100KB"]) == 0
    assert "bytes in" in capsys.readouterr().out
    assert main(["verify", golden, new]) == 0
    assert "the same model" in capsys.readouterr().out
    assert main(["inspect", new]) == 0
    out = capsys.readouterr().out
    assert "7 layers: 5 KDA, 2 MLA" in out and "routed experts" in out and "missing: 0" in out
    assert main(["convert", golden, new]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["verify", golden, str(data_dir / "kimi_linear_flat")]) == 2
    out, err = capsys.readouterr()
    lacking = sum(int(number) for number in re.findall(r" lacks (\d+) tensors, the first ", out))
    others = out.partition("logits: ")[2].splitlines()[1:]
    listed = sum(" differs " in line or " is " in line or " has shape " in line for line in others)
    listed += int(re.search(r"\.\.\. (\d+) more", out)[1])
    assert lacking > 100 and f"not the same model: {lacking + listed} differences" in err
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "there is no checkpoint folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["convert", golden, new, "--layers", "x"])
    assert "must be a layer or a range" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["verify", golden, new, "--seed", str(2**70)])
    assert "must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("event", [KeyboardInterrupt(), PermissionError(errno.EACCES, "Permission denied", "shard")])
@pytest.mark.parametrize("command", ["convert", "verify", "inspect"])
def test_interruptions_and_refusals_of_the_system_are_one_sentence(
    command, event, data_dir, tmp_path, monkeypatch, capsys
):
    def fail(*args):
        raise event

    monkeypatch.setattr("kimi_k3.conversion.source.read_header", fail)
    golden = str(data_dir / "kimi_linear_flat")
    arguments = {"convert": [golden, str(tmp_path / "new")], "verify": [golden, golden], "inspect": [golden]}
    assert main([command, *arguments[command]]) == (130 if isinstance(event, KeyboardInterrupt) else 2)
    sentence = "interrupted" if isinstance(event, KeyboardInterrupt) else "shard: Permission denied"
    way_on = "; the same command continues where this one ended" if command == "convert" else ""
    assert capsys.readouterr().err == f"kimi-k3 {command}: {sentence}{way_on}\n"


@pytest.mark.parametrize("metadata", [[1], {"total_size": "12"}, None])
def test_inspect_takes_an_index_without_a_usable_total(metadata, sharded, capsys):
    index = json.loads((sharded / INDEX).read_text())
    (sharded / INDEX).write_text(json.dumps(index | {"metadata": metadata}))
    assert main(["inspect", str(sharded)]) == 0
    assert "missing: 0" in capsys.readouterr().out
