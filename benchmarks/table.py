"""Writes docs/performance.md from the newest line of every case in benchmarks/results/*.jsonl.

python benchmarks/table.py
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = """# Performance, as measured

Written by `python benchmarks/table.py` from `benchmarks/results/*.jsonl`; each line there holds the command, date,
versions and machine of its case. Ours and the peer run in turn on the same machine; cases without a peer ran alone. On
a CPU only the ratio means something. Decoding steps of the `slice` models: ours replays a captured graph, the peer runs
step by step.

| case | ours, ms | peer | peer, ms | faster | extra memory, ours / peer | roofline, ms | machine | date |
|---|---|---|---|---|---|---|---|---|
"""


TRAINING = """
## Training steps

Forward, backward and AdamW on one row; tokens a second, and the most memory of a step, all included
(`benchmarks/training.py`; `steps_in_a_row` of a line in the results says after how many steps the host waited).

| case | weights | ours, tokens/s | peer | peer, tokens/s | faster | memory, ours / peer | machine | date |
|---|---|---|---|---|---|---|---|---|
"""

VALUES = """
## What is no time

| case | value | machine | date |
|---|---|---|---|
"""


def gigabytes(case):
    if "ours_extra_bytes" not in case:
        return ""
    ours, peer = case["ours_extra_bytes"], case.get("peer_extra_bytes")
    if peer is None:
        return f"{ours / 1e9:.2f} GB"
    return f"{ours / 1e9:.2f} / {peer / 1e9:.2f} GB ({ours / peer:.2f})"


def row(case):
    machine = case["gpu"] or f"CPU, {case['cpu_threads']} threads"
    roofline = f"{case['roofline_ms']:.3f}" if case["roofline_ms"] else ""
    peer = "| | | "
    if case["peer_ms"] is not None:
        peer = f"| {case['peer']} | {case['peer_ms']} | {case['peer_ms'] / case['ours_ms']:.1f}x "
    return (
        f"| {case['case']} | {case['ours_ms']} {peer}| {gigabytes(case)} | {roofline} | {machine} | {case['date']} |\n"
    )


def training_row(case):
    peer = "| | | "
    if case["peer_ms"] is not None:
        faster = case["peer_ms"] / case["ours_ms"]
        peer = f"| {case['peer']} | {case['peer_tokens_per_s']:,} | {faster:.2f}x "
    return (
        f"| {case['case']} | {case['parameters'] / 1e9:.2f}B | {case['ours_tokens_per_s']:,} {peer}| {gigabytes(case)} "
        f"| {case['gpu']} | {case['date']} |\n"
    )


def value_row(case):
    return f"| {case['case']} | {case['value']} {case['unit']} | {case['gpu'] or 'CPU'} | {case['date']} |\n"


def main():
    newest = {}
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            case = json.loads(line)
            newest[case["case"]] = case
    commands = "".join(f"* `{command}`\n" for command in sorted({case["command"] for case in newest.values()}))
    training = [case for case in newest.values() if "ours_tokens_per_s" in case]
    timed = [case for case in newest.values() if "ours_ms" in case and case not in training]
    text = HEAD + "".join(row(case) for case in timed)
    if training:
        text += TRAINING + "".join(map(training_row, training))
    if values := [case for case in newest.values() if "value" in case]:
        text += VALUES + "".join(map(value_row, values))
    text += "\n## Commands\n\n" + commands
    (ROOT / "docs" / "performance.md").write_text(text)


if __name__ == "__main__":
    main()
