"""A tokenizer and a text in the forms that torchtitan reads: its wheel brings neither, and nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def write(folder: Path) -> None:
    """A byte-level tokenizer of 258 tokens, and 400 lines of arithmetic in the folder ``text`` inside."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(["<bos>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    texts = (f"{n} times {n + 1} is {n * (n + 1)}; its half is {n * (n + 1) // 2}. " * 3 for n in range(400))
    (folder / "text" / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
