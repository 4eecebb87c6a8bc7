"""A conversion that is continued over damaged work: the same folder in the end, or a refusal, never another one."""

import random
import shutil

import pytest

from kimi_k3.conversion import ConversionError, Target, convert
from kimi_k3.conversion import run as run_module

pytestmark = pytest.mark.one_release

TARGET = Target(expert_dtype="mxfp4", shard_size=120_000)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def begun(data_dir, tmp_path_factory):
    """(the finished folder's content, the work of the same conversion, broken off before its end)."""
    folder = tmp_path_factory.mktemp("conversion")
    convert(data_dir / "kimi_linear_flat", folder / "whole", TARGET)

    def stop(*args):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(data_dir / "kimi_linear_flat", folder / "new", TARGET)
    return content(folder / "whole"), folder / "new.partial"


def continued(begun, data_dir, tmp_path, damage):
    """The folder that the same call makes of the work, after `damage(work)`."""
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    shutil.rmtree(tmp_path / "new.partial", ignore_errors=True)
    shutil.copytree(begun[1], tmp_path / "new.partial")
    damage(tmp_path / "new.partial")
    convert(data_dir / "kimi_linear_flat", tmp_path / "new", TARGET)
    assert not (tmp_path / "new.partial").exists()
    return content(tmp_path / "new")


def test_a_damaged_shard_is_written_again(begun, data_dir, tmp_path, caplog):
    """A flipped bit, a lost digest, a digest of other values; and all the others stay."""
    whole, work = begun
    first, second, third, *_ = sorted(path.name for path in (work / "files").iterdir())

    def damage(work):
        data = bytearray((work / "files" / first).read_bytes())
        data[len(data) // 2] ^= 64
        (work / "files" / first).write_bytes(data)
        (work / f"{second}.done").unlink()
        (work / f"{third}.done").write_text("{}")

    assert continued(begun, data_dir, tmp_path, damage) == whole
    assert caplog.text.count("was damaged and is written again") == 3
    for name in (first, second, third):
        assert f"{name} was damaged" in caplog.text


def test_random_damage_to_any_file_of_the_work(begun, data_dir, tmp_path):
    whole, draw, refused = begun[0], random.Random(1), 0

    def damage(work):
        files = sorted(path for path in work.rglob("*") if path.is_file() and path.name != "lock")
        file = draw.choice([work / "state.json", *files])
        data = bytearray(file.read_bytes())
        at = draw.randrange(len(data))
        if draw.random() < 0.5:
            data[at] ^= 1 << draw.randrange(8)
        else:
            del data[at:]
        file.write_bytes(data)

    for _ in range(12):
        try:
            assert continued(begun, data_dir, tmp_path, damage) == whole
        except ConversionError as error:
            assert "state.json is damaged" in str(error) and "delete" in str(error)
            refused += 1
    assert 0 < refused < 12
