# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The examples run from end to end, with few steps."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from transformers import TrainingArguments

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """5 steps of a `Trainer` whatever it is asked for."""
    init = TrainingArguments.__init__
    options = {'max_steps': 5, 'logging_steps': 1, 'warmup_steps': 0, 'use_cpu': True, 'disable_tqdm': True}
    monkeypatch.setattr(TrainingArguments, '__init__', lambda self, **kwargs: init(self, **{**kwargs, **options}))


def test_kdn_in_transformers(capsys):
    pytest.importorskip('peft')
    runpy.run_path(str(EXAMPLES / 'kdn_in_transformers.py'))
    output = capsys.readouterr().out
    assert [line for line in output.splitlines() if line.startswith('---')] == [
        '--- generated', '--- from one cache', '--- fine-tuned']
    assert output.count('"import" statement') == 3
