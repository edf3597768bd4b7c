# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Shared by the evaluations: models, texts and arguments."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import benchmarks.compare.models  # noqa: F401
import fla_kdn  # noqa: F401
from benchmarks.compare.data import DOCUMENT_END, read_documents
from fla_kdn.models.compat import fix_fla_generation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ('auto', 'float32', 'bfloat16', 'float16')


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    if Path(path).is_dir() and not any(Path(path).glob('tokenizer*')):
        raise ValueError(f'MODEL {path} has no tokenizer; its files are expected there')
    return AutoTokenizer.from_pretrained(path)


def load(path: str, dtype: str = 'auto') -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model for evaluation, on a GPU if there is one, and its tokenizer."""
    fix_fla_generation()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings('ignore', category=FutureWarning)
    try:
        tokenizer = load_tokenizer(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except OSError as error:
        raise ValueError(f'MODEL {path} is neither a folder with a model nor the name of one: {error}') from None
    return model.to('cuda' if torch.cuda.is_available() else 'cpu').eval(), tokenizer


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Tells a model from one that was trained on, saved under the same name."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def text_fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_text(text: str | None) -> str:
    """The documents of a file or folder one after another, or the documentation that ships with Python."""
    documents = read_documents(text)
    return DOCUMENT_END.join(documents[name] for name in sorted(documents))
