"""Traces, their replay on a small model, and the simulation against arithmetic that it cannot see."""

import json

import pytest
import torch

from kimi_k3 import KimiK3ForCausalLM
from kimi_k3 import __main__ as cli
from kimi_k3.costs import formulas, trace
from kimi_k3.costs.report import read_cost
from kimi_k3.costs.simulation import Simulation
from kimi_k3.serving import replay
from kimi_k3.serving.prefix_cache import PrefixCache

pytestmark = pytest.mark.one_release


@pytest.fixture(scope="module")
def sessions():
    return trace.generate(100, seed=1)


@pytest.fixture(scope="module")
def k3(data_dir):
    return read_cost(data_dir / "config_kimi_k3.json")


def session(name, turns, shared=0):
    return trace.Session(name, shared, tuple(turns))


def test_the_generator_has_the_published_medians(sessions, monkeypatch):
    found = trace.medians(sessions)
    assert found["input"] == pytest.approx(142_000, rel=0.01)
    assert found["output"] == pytest.approx(444, rel=0.01)
    assert found["turns"] == pytest.approx(65, abs=1)
    assert trace.generate(100, seed=1) == sessions != trace.generate(100, seed=2)
    assert (trace.INPUT, trace.OUTPUT, trace.TURNS, trace.SHARED) == (142_000, 444, 65, 8192)
    assert {s.shared for s in sessions} == {8192} and len({s.session for s in sessions}) == 100
    monkeypatch.setattr(trace, "LONGEST", 200_000)
    shorter = trace.generate(30, seed=1)
    assert 190_000 < max(s.inputs()[-1] + s.turns[-1][1] for s in shorter) <= 200_000


def test_files(sessions, tmp_path):
    """What is written is read back; what is no session is refused with its line."""
    path = tmp_path / "trace.jsonl"
    trace.write(path, sessions)
    assert trace.read(path) == sessions
    smallest = [session("a", [(1, 1, 0.0)]), session("b", [(3, 1, 0.0), (1, 1, 0.0)], shared=3)]
    trace.write(path, smallest)
    assert trace.read(path) == smallest
    good = json.dumps({"session": "a", "shared": 2, "turns": [[5, 1, 0]]})
    bad = ["", "{", "[]", '{"session": 1}', good.replace("[5, 1, 0]", "[0, 1, 0]"), good.replace("[5, 1, 0]", "[5, 1]")]
    bad += [good.replace("2,", "6,"), good.replace("[[5, 1, 0]]", "[]"), good.replace("5,", "5.5,")]
    for line in bad:
        path.write_text(good + "\n" + line + "\n")
        with pytest.raises(ValueError, match="line 2"):
            trace.read(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no session"):
        trace.read(path)


def test_inputs_and_smaller_sessions():
    whole = session("a", [(100, 10, 1.0), (50, 20, 0.0)], shared=40)
    assert whole.inputs() == [100, 160]
    assert trace.smaller([whole], 10) == [session("a", [(10, 1, 1.0), (5, 2, 0.0)], shared=4)]


def test_one_user_alone_waits_as_long_as_the_cost_model_says(k3):
    """First turn: the prompt in chunks. Second: only what is new, behind a cache that stayed."""
    node = formulas.Node(formulas.GPUS["b300"], 8)
    simulation = Simulation(k3, node, [session("a", [(8192 * 2, 2, 10.0), (100, 2, 1e9)])], 1)
    simulation.random.randrange = lambda count: 0
    result = simulation.run(0.001, 200)
    first, second = simulation.finished
    waits = sorted(turn.first - turn.arrived for turn in (first, second))
    assert (result.output_rate, result.first_token_p90, result.moved) == (4 / 200, waits[0], {})
    assert result.first_token_median == sum(waits) / 2 and result.hit_rate == (8192 * 2 + 2) / (8192 * 4 + 102)
    expected = sum(node.prefill_seconds(k3, 8192, past) for past in (0, 8192))
    assert first.first - first.arrived == pytest.approx(expected, rel=1e-3)
    assert second.known == 8192 * 2 + 2
    assert second.first - second.arrived == pytest.approx(node.prefill_seconds(k3, 98, 8192 * 2 + 2), rel=1e-2)


def test_a_user_who_begins_again_begins_at_the_first_turn(k3):
    """And an answer takes as many steps as it has tokens left, not more."""
    node = formulas.Node(formulas.GPUS["b300"], 8)
    simulation = Simulation(k3, node, [session("a", [(500, 3, 1.0), (50, 6, 1.0), (70, 4, 1.0)])], 1)
    simulation.random.randrange = lambda count: 1
    simulation.run(0.001, 120)
    asked = [turn.input for turn in simulation.finished]
    first, second, third = session("a", [(500, 3, 1.0), (50, 6, 1.0), (70, 4, 1.0)]).inputs()
    assert asked[:8] == [second, third, first, second, third, first, second, third]
    step = node.seconds(k3.flops(1, 501), k3.read_weight_bytes(1) + k3.state_bytes() * 2)
    turn, following = simulation.finished[2:4]
    assert turn.output == 3  # the prompt's last position gives the first
    assert following.arrived - turn.first - 1.0 == pytest.approx(2 * step, rel=0.05)


@pytest.mark.parametrize("host", [0, 1e12])
def test_the_knee_is_where_the_gpu_budget_ends(k3, host):
    """Equal sessions: as many as fit keep their caches; with a few more everything is computed again, or loaded."""
    node = formulas.Node(formulas.GPUS["b300"], 8)
    turns = [(142_000, 50, 5.0)] + [(50, 50, 5.0)] * 150
    same = [session("a", turns)]
    fit = int(node.cache_capacity(k3, 150_000) / 150_000)
    below, above = (Simulation(k3, node, same, count, host).run(400, 150) for count in (fit - 3, fit + 8))
    assert below.hit_rate > 0.98
    if host:
        assert above.hit_rate > 0.98 and above.output_rate > 0.9 * below.output_rate
        assert above.moved["host"][1] > below.moved["host"][1]
    else:
        assert above.hit_rate < 0.5 and above.output_rate < 0.5 * below.output_rate


def test_sessions_move_down_in_the_order_of_their_use(k3):
    """From a tier that is full into the next one, out of the last; of what lies there only what is new is written."""
    size, node = k3.cache_bytes, formulas.Node(formulas.GPUS["b300"], 8)
    rooms = size(300) + size(200), size(400)
    simulation = Simulation(k3, node, [session("a", [(500, 3, 1.0)])], 1, *rooms)
    host, disk = simulation.stores

    def down(owner, tokens, *lies):
        simulation._move_down(owner, tokens)
        assert [list(store.sessions.items()) for store in (host, disk)] == list(lies)
        for store, room in zip((host, disk), rooms, strict=True):
            assert store.used == sum(map(size, store.sessions.values())) <= room

    down("a", 300, [("a", 300)], [])
    down("b", 200, [("a", 300), ("b", 200)], [])
    down("a", 300, [("b", 200), ("a", 300)], [])
    assert (host.written, disk.written) == (size(300) + size(200), 0)
    down("c", 150, [("a", 300), ("c", 150)], [("b", 200)])
    assert (host.written, disk.written) == (size(300) + size(200) + size(150), size(200))
    down("d", 310, [("c", 150), ("d", 310)], [("a", 300)])
    before = host.written
    down("c", 160, [("d", 310), ("c", 160)], [("a", 300)])
    assert host.written - before == size(160) - (size(150) - k3.state_bytes())
    down("large", 10**7, [("d", 310), ("c", 160)], [("a", 300)])
    assert host.take("none") is None and host.take_oldest() == ("d", 310) and host.used == size(160)


def test_a_session_comes_back_from_the_tier_where_it_lies(k3):
    """One GPU session fits: two users take turns, and each finds its cache in host memory, as fast as its link is."""
    turns = [(100_000, 2, 1.0), *[(10, 2, 1.0)] * 40]
    node = formulas.Node(formulas.GPUS["b300"], 8)
    simulation = Simulation(k3, node, [session("a", turns)], 2, host_bytes=1e13)
    simulation.random.randrange = lambda count: 0
    simulation.gpus.capacity = simulation.gpus.size_of(101_000) * 1.5
    result = simulation.run(200, 50)
    later = [turn for turn in simulation.finished if turn.input > 100_000]
    assert len(later) > 40 and all(turn.known == turn.input - 10 for turn in later)
    moved = sum(k3.cache_bytes(turn.known) for turn in later)
    assert result.moved["host"][1] == pytest.approx(moved, rel=0.1)
    loading = k3.cache_bytes(100_000) / (8 * 64e9)
    prefill = node.prefill_seconds(k3, 10, 100_000)
    assert result.first_token_median == pytest.approx(loading + prefill, rel=0.3)


def test_a_simulation_that_cannot_start_says_why(k3, sessions):
    with pytest.raises(ValueError, match="does not fit"):
        Simulation(k3, formulas.Node(formulas.GPUS["h100"], 8), sessions, 1)


def test_replay_runs_the_trace_through_the_real_cache(data_dir, tmp_path):
    """Hit rate as arithmetic has it when everything fits, less when it does not; write-back moves fewer bytes."""
    model = KimiK3ForCausalLM.from_pretrained(data_dir / "k3_dense_flat", dtype=torch.float32)
    played = [session(f"s{i}", [(20, 3, 0.0)] + [(8, 3, 0.0)] * 4, shared=8) for i in range(4)]
    inputs = sum(sum(s.inputs()) for s in played)
    # every later turn finds all but the last token of the one before; sessions share 8 tokens once that was seen twice
    known = sum(sum(s.inputs()[:-1]) + 4 * 2 for s in played)
    moved = {}
    for through in (True, False):
        options = {"block": 4, "every": 400, "disk_bytes": 1 << 30, "write_through": through}
        cache = PrefixCache(model, 1 << 30, folder=tmp_path / f"{through}", **options)
        result = replay.replay(cache, played, 2, 100)
        cache.close()
        assert result.turns == 20
        assert known / inputs <= result.hit_rate <= (known + 2 * 8 + 8) / inputs
        small = PrefixCache(model, cache.stats()["tiers"]["device"]["bytes"] // 3, folder=tmp_path / f"{through} small",
                            **options)  # fmt: skip
        moved[through] = replay.replay(small, played, 4, 100)
        small.close()
    assert 0 < moved[False].written["disk"] < moved[True].written["disk"]
    tight = PrefixCache(model, 1 << 17, block=4, every=400)
    assert replay.replay(tight, played, 4, 100).hit_rate < 0.5
    tight.close()


def test_commands(data_dir, tmp_path, capsys):
    """trace, replay --simulate with a picture, replay --model; refusals are sentences."""
    path, config = tmp_path / "trace.jsonl", str(data_dir / "config_kimi_k3.json")
    assert cli.main(["trace", str(path), "--sessions", "20"]) == 0
    assert cli.main(["trace", str(path)]) == 2
    assert "exists" in capsys.readouterr().err
    trace.write(path, [session(f"s{i}", [(20000, 50, 1.0)] * 3, shared=100) for i in range(4)])
    picture = tmp_path / "knee.png"
    command = [
        "replay",
        str(path),
        "--simulate",
        config,
        "--concurrency",
        "2",
        "--minutes",
        "1",
        "--host-bytes",
        "1T",
        "--disk-bytes",
        "2T",
    ]
    assert cli.main([*command, "--picture", str(picture)]) == 0
    assert capsys.readouterr().out.count("| 2 |") == 3 and picture.read_bytes().startswith(b"\x89PNG")
    model = str(data_dir / "k3_dense_flat")
    small = ["replay", str(path), "--model", model, "--turns", "5", "--concurrency", "2"]
    assert cli.main([*small, "--scale", "1000", "--disk-bytes", "1G"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| 2 | 5 |"))
    assert float(row.split("|")[4].strip().rstrip("%")) > 10, "blocks small enough for sessions of a tiny model"
    for arguments, said in (
        ([*small, "--scale", "1"], "larger --scale"),
        ([*small, "--picture", "a.png"], "belongs to --simulate"),
        (["replay", str(tmp_path / "none"), "--model", model], "cannot be read"),
        (["replay", str(path), "--simulate", str(tmp_path / "none")], "no configuration"),
        ([*command, "--gpus", "1"], "does not fit"),
    ):
        assert cli.main(arguments) == 2
        assert said in capsys.readouterr().err
    for size in ("lots", "-0.4", "inf"):
        with pytest.raises(SystemExit):
            cli.main([*small, f"--device-bytes={size}"])
        assert "must be bytes such as" in capsys.readouterr().err
