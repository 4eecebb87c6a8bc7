"""`kimi-k3 cache`: what a folder of kept prefixes holds, checked and cleared."""

import torch

import tiny
from kimi_k3 import __main__ as cli
from kimi_k3.serving.prefix_cache import PrefixCache


def test_the_folder_on_the_command_line(tmp_path, capsys):
    """stats counts what is there, --check finds a damaged file, clear empties it unless somebody uses it."""
    folder = tmp_path / "kept"
    cache = PrefixCache(tiny.model("kmk"), device_bytes=0, folder=folder, disk_bytes=1 << 30, block=4, every=12)
    cache.forward(torch.arange(30)[None])
    cache.flush()
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert size == cache.stats()["tiers"]["disk"]["bytes"]
    assert cli.main(["cache", "stats", str(folder)]) == 0
    assert f"3 states and 3 segments of 29 tokens, {size:,} bytes, 0 broken" in capsys.readouterr().out
    assert cli.main(["cache", "clear", str(folder)]) == 2
    assert "in use" in capsys.readouterr().err
    cache.close()
    file = next(folder.rglob("*.state.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert cli.main(["cache", "stats", str(folder), "--check"]) == 0
    assert "2 states and 3 segments" in capsys.readouterr().out
    assert cli.main(["cache", "clear", str(folder)]) == 0
    assert not list(folder.iterdir())
    (folder / "letter.txt").write_text("mine")
    for action in ("stats", "clear"):
        assert cli.main(["cache", action, str(folder)]) == 2
        assert "letter.txt" in capsys.readouterr().err
    assert cli.main(["cache", "stats", str(tmp_path / "nowhere")]) == 2
    assert (folder / "letter.txt").exists()
