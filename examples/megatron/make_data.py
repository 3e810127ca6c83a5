"""Writes text files as one Megatron dataset: PREFIX.bin and PREFIX.idx, a document for each file.

python make_data.py PREFIX FILE_OR_FOLDER...
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from common import ByteTokenizer
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def make(prefix: str, paths: list[Path]) -> None:
    """Write the files at ``paths``, and the Python files in the folders there, in order of their names."""
    tokenizer, builder = ByteTokenizer(), IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for path in paths:
        files = (
            [path] if path.is_file() else sorted(file for end in ("py", "txt", "md") for file in path.glob(f"*.{end}"))
        )
        for file in files:
            builder.add_item(torch.tensor(tokenizer.tokenize(file.read_text())))
            builder.end_document()
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    make(sys.argv[1], [Path(path) for path in sys.argv[2:]])
