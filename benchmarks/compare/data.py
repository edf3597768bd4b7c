# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Text as bytes, split into a part to train on and one to be judged by."""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.compare.tasks import Training

# targets that are not scored
IGNORE = -100

# of the text, and in characters
VALIDATION_SHARE, VALIDATION_LIMIT = 0.1, 500_000
# a paragraph shorter than this (a heading, a line of code) may be in both parts
SHARED_LENGTH = 64

DOCUMENT_END = '\n\n\n'

# folders of Python's library that are no part of it, or repeat themselves
LEFT_OUT = frozenset({'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens are bytes; tools that want tokens to pad and to end with get the byte 0, which stands in no text."""
    vocabulary = {f'<0x{byte:02X}>': byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    # a text may be longer than any context, and the name of a byte is no byte
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, split_special_tokens=True,
        pad_token='<0x00>', eos_token='<0x00>',
    )


class Text:
    """Documents as two streams of bytes, `train` and `validation`."""

    def __init__(self, documents: dict[str, str], name: str):
        self.name = name
        train, validation = split(documents)
        self.train, self.validation = (
            torch.frombuffer(bytearray(DOCUMENT_END.join(part).encode()), dtype=torch.uint8) for part in (train, validation)
        )
        self.fingerprint = hashlib.sha256(b'\0'.join(bytes(x.numpy()) for x in (self.train, self.validation))).hexdigest()[:16]

    def check(self, seq_len: int) -> None:
        """Raise a `ValueError` if a part is shorter than a window."""
        for part in ('train', 'validation'):
            size = len(getattr(self, part))
            if size <= seq_len:
                raise ValueError(f'--text: {self.name} leaves {size} bytes for {part}, --seq-len {seq_len} needs more')

    def batches(self, training: Training, seq_len: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets `[windows, seq_len]` of each training step, from random places."""
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(seq_len + 1)
        for _ in range(training.steps):
            starts = torch.randint(len(self.train) - seq_len, (max(1, training.tokens // seq_len), 1), generator=generator)
            tokens = self.train[starts + window].long()
            yield tokens[:, :-1], tokens[:, 1:]

    def validation_windows(self, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The validation part once, in windows side by side; what is left at its end is not used."""
        count = (len(self.validation) - 1) // seq_len
        inputs, targets = (self.validation[i:i + count * seq_len].long().view(count, seq_len) for i in (0, 1))
        return inputs, targets


def read_documentation() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            'this Python lacks its documentation texts (module pydoc_data.topics): name others with --text FILE-OR-FOLDER'
        ) from None
    return dict(topics)


def read_sources(root: Path, left_out: frozenset[str] = frozenset()) -> dict[str, str]:
    """Python's sources in a folder, but for those in folders that are left out."""
    paths = {path.relative_to(root): path for path in root.rglob('*.py') if path.is_file()}
    return {
        str(name): path.read_text(encoding='utf-8', errors='replace')
        for name, path in paths.items() if not left_out & set(name.parts)
    }


def read_library() -> dict[str, str]:
    return read_sources(Path(sysconfig.get_path('stdlib')), LEFT_OUT)


# texts that are on every machine
TEXTS = {
    'documentation': ("Python's documentation", read_documentation),
    'library': ("the sources of Python's standard library", read_library),
}


def read_documents(text: str | None) -> dict[str, str]:
    """The documents of a file or of a folder, with the line ends and blank lines of Unix, or the documentation texts that ship
    with Python."""
    if text is None:
        return read_documentation()

    root = Path(text)
    if not root.exists():
        raise ValueError(f'--text: {text} does not exist')
    # of a folder, all but hidden and binary files
    paths = [root] if root.is_file() else [p for p in root.rglob('*') if p.is_file() and '/.' not in f'/{p.relative_to(root)}']
    contents = {str(p.relative_to(root)): p.read_bytes() for p in paths}
    documents = {
        # by their blank lines paragraphs are told apart
        name: re.sub(r'\n[ \t]+(?=\n)', '\n', x.decode(errors='replace').replace('\r\n', '\n').replace('\r', '\n'))
        for name, x in contents.items() if x.strip() and b'\0' not in x
    }
    if not documents:
        raise ValueError(f'--text: {text} holds no text')
    return documents


def split(documents: dict[str, str]) -> tuple[list[str], list[str]]:
    """Training and validation texts: whole documents, or the tail of the text if none is small enough.

    Paragraphs of the validation texts are taken out of the training texts: documents quote each other.
    """
    share = min(VALIDATION_SHARE * sum(map(len, documents.values())), VALIDATION_LIMIT)
    names = sorted(documents)
    random.Random(0).shuffle(names)
    chosen, size = set(), 0
    for name in names:
        # no document that would outgrow the share by half
        if size < share and size + len(documents[name]) <= 1.5 * share:
            chosen.add(name)
            size += len(documents[name])
    if chosen:
        train, validation = ([documents[x] for x in sorted(documents) if (x in chosen) == part] for part in (False, True))
    else:
        text = DOCUMENT_END.join(documents[x] for x in sorted(documents))
        cut = len(text) - round(share)
        cut = text.rfind('\n', 0, cut) + 1 or cut
        train, validation = [text[:cut]], [text[cut:]]
    held_out = {key for text in validation for key, _ in paragraphs(text) if len(key) >= SHARED_LENGTH}
    return ['\n\n'.join(p for key, p in paragraphs(text) if key not in held_out) for text in train], validation


def paragraphs(text: str) -> list[tuple[str, str]]:
    """Paragraphs, each with its words alone, by which it is known again."""
    return [(' '.join(paragraph.split()), paragraph) for paragraph in text.split('\n\n')]
