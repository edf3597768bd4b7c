# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The runs of the job, and their results on disk, by which an interrupted job goes on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from benchmarks.compare.settings import Preset
    from benchmarks.compare.tasks import Language, Synthetic


@dataclass(frozen=True)
class Run:
    """What is trained; a run that differs in nothing of this is the same run."""
    mixer: str
    task: str
    seed: int

    @property
    def name(self) -> str:
        return f'{self.mixer}-{self.task}-seed{self.seed}'

    @property
    def what(self) -> str:
        return f'{self.task} seed {self.seed}'

    def model_folder(self, out: Path) -> Path:
        """`models/<mixer>`, with the task unless it is text, and the seed unless it is 0."""
        task = '' if self.task == 'language' else f'-{self.task}'
        seed = '' if self.seed == 0 else f'-seed{self.seed}'
        return out / 'models' / f'{self.mixer}{task}{seed}'


def run_settings(
    run: Run, preset: Preset, config: PreTrainedConfig, task: Language | Synthetic, versions: dict, device: str,
) -> dict:
    """All that decides the result of a run, as it is stored beside the result."""
    return {
        **asdict(run),
        **task.settings(),
        **asdict(preset.backbone),
        'intermediate_size': config.intermediate_size,
        'bf16': preset.bf16,
        'device': device,
        'versions': versions,
    }


def result_file(out: Path, run: Run) -> Path:
    return out / 'runs' / f'{run.name}.json'


def write_json(path: Path, content: dict) -> None:
    """Write all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix('.tmp')
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)


def load_result(path: Path, settings: dict, option: str) -> dict | None:
    """The result in a file, `None` if there is none; raises, naming the option, if it was made with other settings."""
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    # as it looks after a round trip through JSON
    wanted, found = json.loads(json.dumps(settings)), stored['settings']
    different = [
        f'{key} was {found.get(key)!r} and is now {wanted.get(key)!r}'
        for key in sorted({*wanted, *found}) if found.get(key) != wanted.get(key)
    ]
    if different:
        raise ValueError(f'{option}: {path} was made with other settings: {"; ".join(different)}')
    return stored['result']


def load_finished(out: Path, settings: dict[Run, dict]) -> dict[Run, dict]:
    """Results of finished runs; raises if one was made with other settings."""
    results = {run: load_result(result_file(out, run), wanted, '--resume') for run, wanted in settings.items()}
    return {run: result for run, result in results.items() if result is not None}
