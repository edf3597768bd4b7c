# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Documents in, rows of tokens out: streamed, packed, in one order for a seed, and taken up where they stopped.

The documents are dealt to *lanes*, `--lanes` of them, and each lane cuts its own stream of tokens into rows of `--seq_len`.
Row i of the run is the next one of lane i modulo the number of lanes. A process, and in it a data worker, reads some of the
lanes, so that the rows of an optimizer step are the same for any number of processes and workers that divides the lanes.
Where a lane stands is a few numbers; checkpoints hold them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from glob import escape, glob, has_magic
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec.asyn
import numpy as np
import torch
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader, get_worker_info
from transformers import AutoTokenizer, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

# the reader of a file
READERS = {'.parquet': 'parquet', '.jsonl': 'json', '.json': 'json', '.ndjson': 'json', '.txt': 'text'}
COMPRESSED = ('.gz', '.zst', '.xz', '.bz2')
# documents that are tokenized at once
TOKENIZED = 32
IGNORE = -100


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte; it needs no download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(['<pad>', '<eos>', *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # a text that has the names of tokens means no more by them
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token='<pad>', eos_token='<eos>', split_special_tokens=True)


def load_tokenizer(name: str, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer called `name`, `bytes` for that of bytes, checked against the vocabulary of the model."""
    try:
        tokenizer = byte_tokenizer() if name == 'bytes' else AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f'--tokenizer: {name!r} is not a folder or a name on the hub with a tokenizer: {error}') from None
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"--tokenizer: {name!r} has {len(tokenizer):,} tokens, the model's vocabulary {vocab_size:,}; give the model "
            f"more, --config_overrides '{{\"vocab_size\": {math.ceil(len(tokenizer) / 64) * 64}}}'.",
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f'--tokenizer: {name!r} has no token for the end of a text (eos_token), which ends each document.')
    return tokenizer


def find_files(data: str) -> list[str]:
    """Files of a path or a pattern, in order; none if `data` is not of this machine."""
    data = os.path.expanduser(data)
    if has_magic(data) and not Path(data).exists():
        paths = [Path(x) for x in glob(data, recursive=True)]
    elif Path(data).is_dir():
        paths = [x for x in Path(data).rglob('*') if reader_of(x) and '/.' not in f'/{x.relative_to(data)}']
    else:
        paths = [Path(data)]
    return sorted(str(x) for x in paths if x.is_file())


def reader_of(path: str | Path) -> str | None:
    path = Path(path)
    return READERS.get(Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix)


def load_documents(data: str, config: str | None, split: str, text_column: str) -> tuple[IterableDataset, str]:
    """A stream of documents with the one column `text_column`, and a fingerprint of what they are read from."""
    files = find_files(data)
    if files:
        readers = {reader_of(x) for x in files}
        if len(readers) > 1 or None in readers:
            raise ValueError(f'--data: {data!r} must be files of one kind, one of {", ".join(READERS)}; found {files[:5]}.')
        reader, = readers
        options = {'sample_by': 'document'} if reader == 'text' else {}
        load = {'path': reader, 'split': 'train', **options}
        fingerprint = [(Path(x).name, Path(x).stat().st_size) for x in files]
    else:
        is_path = data.startswith(('.', '/', '~')) or data.endswith('/') or data.count('/') > 1
        if is_path or has_magic(data) or reader_of(data) or Path(data).exists():
            raise ValueError(f'--data: no file with one of the endings {", ".join(READERS)} at {data!r}.')
        load = {'path': data, 'name': config, 'split': split}
        fingerprint = [data, config, split]
    example = None
    try:
        if files:
            # the reader of parquet fails at a file without rows
            load['data_files'] = [escape(x) for x in files if reader != 'parquet' or parquet.read_metadata(x).num_rows]
        if load.get('data_files') != []:
            dataset = load_dataset(**load, streaming=True)
            example = next(iter(dataset), None)
    except StopIteration:
        # from the JSON reader, of a file without a line
        pass
    except Exception as error:
        # the libraries for formats and for the hub raise errors of many classes
        raise ValueError(f'--data: {data!r} could not be read: {type(error).__name__}: {error}') from error
    if example is None:
        raise ValueError(f'--data: {data!r} has no documents.')
    if text_column not in example:
        raise ValueError(f'--text_column: {data!r} has no column {text_column!r}, it has {", ".join(example)}.')
    if not isinstance(example[text_column], str | None):
        raise ValueError(
            f'--text_column: {text_column!r} of {data!r} must be text, its first value is of type '
            f'{type(example[text_column]).__name__}.',
        )
    fingerprint = json.dumps([fingerprint, dataset.num_shards, text_column])
    return dataset.select_columns([text_column]), hashlib.sha256(fingerprint.encode()).hexdigest()[:16]


class Lane:
    """
    Rows of one lane, without end: after its last document the lane begins again, in another order.

    The lane has an equal share of the files, or every n-th document of a share. It goes through its files in random order,
    and in random order through each block of `block_size` documents. `position` is where the next row begins: the epoch, the
    state of the dataset before the block, the number of the block, the document in it and the token in that.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        text_column: str,
        seq_len: int,
        block_size: int,
        seed: int,
        index: int,
        lanes: int,
    ):
        # every lane has as many files as the others; those that share them take turns
        groups = math.gcd(lanes, dataset.num_shards)
        dataset = dataset.shard(groups, index % groups, contiguous=False)
        self.dataset = split_dataset_by_node(dataset, rank=index // groups, world_size=lanes // groups)
        self.tokenizer = tokenizer
        self.text_column = text_column
        self.seq_len = seq_len
        self.block_size = block_size
        self.seed = seed
        self.index = index
        self.position = {'epoch': 0, 'dataset': None, 'block': 0, 'document': 0, 'token': 0}

    def __iter__(self) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Rows of token ids `[seq_len]`, and where documents, or the rests of them, begin in each."""
        row, starts = [], []
        start = self.position
        for epoch in range(start['epoch'], 2 ** 62):
            is_empty = start['dataset'] is None and start['document'] == start['token'] == 0
            for block, state, documents in self._blocks(epoch, start):
                for document in range(start['document'], len(documents)):
                    ids = documents[document]
                    is_empty &= len(ids) == 0
                    token = start['token']
                    start = {**start, 'token': 0}
                    while token < len(ids):
                        starts.append(len(row))
                        piece = ids[token:token + self.seq_len - len(row)]
                        row.extend(piece)
                        token += len(piece)
                        if len(row) == self.seq_len:
                            self.position = {
                                'epoch': epoch, 'dataset': state, 'block': block, 'document': document, 'token': token,
                            }
                            yield np.array(row, dtype=np.int32), starts
                            row, starts = [], []
                start = {**start, 'document': 0}
            if is_empty:
                raise ValueError('no text for it: none at all, or fewer documents than lanes; lower --lanes.')
            start = {'epoch': epoch + 1, 'dataset': None, 'block': 0, 'document': 0, 'token': 0}

    def _blocks(self, epoch: int, start: dict) -> Iterator[tuple[int, dict | None, Documents]]:
        """Blocks of shuffled documents, each with its number and the state of the dataset before it."""
        # the epoch of a dataset is the seed of the order of its files
        self.dataset.set_epoch(1 + self.seed + 2 ** 20 * epoch)
        block, state = start['block'], start['dataset']
        self.dataset.load_state_dict(state)
        # unlike its iterator, `iter` does not share out the documents among data workers
        for batch in self.dataset.iter(self.block_size):
            texts = batch[self.text_column]
            order = np.random.default_rng([self.seed, self.index, epoch, block]).permutation(len(texts))
            yield block, state, Documents([texts[i] for i in order], self.tokenizer)
            block, state = block + 1, self.dataset.state_dict()


class Documents:
    """Texts as token ids, tokenized some at a time; each ends with the token for that, and one without text has none."""

    def __init__(self, texts: list[str | None], tokenizer: PreTrainedTokenizerBase):
        self.texts = texts
        self.tokenizer = tokenizer
        self.ids, self.first = [], 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        if not self.first <= index < self.first + len(self.ids):
            self.first = index
            texts = [text or '' for text in self.texts[index:index + TOKENIZED]]
            ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)['input_ids']
            self.ids = [[*x, self.tokenizer.eos_token_id] if x else [] for x in ids]
        return self.ids[index - self.first]


class Rows(torch.utils.data.IterableDataset):
    """Rows of some lanes, one lane after the other; a data worker has every n-th of the lanes."""

    def __init__(self, lanes: list[Lane]):
        self.lanes = lanes

    def __iter__(self) -> Iterator[dict]:
        worker = get_worker_info()
        if worker is not None:
            # a forked process has the lock of a loop that does not run in it
            fsspec.asyn.reset_lock()
        lanes = self.lanes if worker is None else self.lanes[worker.id::worker.num_workers]
        rows = [(lane, iter(lane)) for lane in lanes]
        while True:
            for lane, iterator in rows:
                try:
                    input_ids, starts = next(iterator)
                except Exception as error:
                    # from a worker, an exception would come as a traceback in a text
                    cause = error if type(error) is ValueError else f'{type(error).__name__}: {error}'
                    yield {'error': f'--data: lane {lane.index} cannot be read on: {cause}'}
                    return
                yield {'input_ids': input_ids, 'starts': starts, 'lane': lane.index, 'position': lane.position}


class Batches:
    """
    Micro-batches of `rows` rows for one process, and where its lanes stand after the last one handed out.

    Args:
        lanes (list[Lane]): the lanes of this process.
        rows (int): rows of a micro-batch.
        packing (str):
            `documents`: one row of all tokens `[1, rows * seq_len]` with FLA's `cu_seqlens`, so that nothing of one document
            reaches another, and the first token of a document is no target. `concatenated`: `[rows, seq_len]`, as one text.
        num_workers (int): processes that tokenize; 0 for none.
    """

    def __init__(self, lanes: list[Lane], rows: int, packing: str, num_workers: int):
        self.rows = rows
        self.packing = packing
        self.positions = {lane.index: lane.position for lane in lanes}
        self.lanes = lanes
        self.num_workers = num_workers

    def load_positions(self, positions: dict[str, dict]) -> None:
        for lane in self.lanes:
            lane.position = self.positions[lane.index] = positions[str(lane.index)]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # rows come from the workers one by one, in turn: their order does not depend on how many there are
        options = {'prefetch_factor': 2 * self.rows} if self.num_workers else {}
        loader = DataLoader(
            Rows(self.lanes), batch_size=None, num_workers=self.num_workers, collate_fn=_identity, **options)
        stream = iter(loader)
        while True:
            rows = list(islice(stream, self.rows))
            for row in rows:
                if 'error' in row:
                    raise ValueError(row['error'])
            self.positions |= {row['lane']: row['position'] for row in rows}
            yield collate([row['input_ids'] for row in rows], [row['starts'] for row in rows], self.packing)


def _identity(row: dict) -> dict:
    return row


def collate(rows: list[np.ndarray], starts: list[list[int]], packing: str) -> dict[str, torch.Tensor]:
    """A micro-batch; see :class:`Batches`."""
    input_ids = torch.from_numpy(np.stack(rows)).long()
    if packing == 'concatenated':
        return {'input_ids': input_ids, 'labels': input_ids.clone()}
    seq_len = input_ids.shape[1]
    bounds = [i * seq_len + start for i, row in enumerate(starts) for start in row]
    input_ids = input_ids.view(1, -1)
    labels = input_ids.clone()
    labels[0, bounds] = IGNORE
    cu_seqlens = torch.tensor([*bounds, input_ids.shape[1]], dtype=torch.int32)
    return {'input_ids': input_ids, 'labels': labels, 'cu_seqlens': cu_seqlens}
