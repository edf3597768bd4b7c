# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""The runs of the job, and their results on disk, by which an interrupted job goes on."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
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
    # where the task has a choice
    learning_rate: float | None = None

    @property
    def name(self) -> str:
        return f'{self.mixer}-{self.task}-seed{self.seed}{self.rate_suffix}'

    @property
    def what(self) -> str:
        return f'{self.task} seed {self.seed}' + (f', learning rate {self.learning_rate:g}' if self.learning_rate else '')

    @property
    def rate_suffix(self) -> str:
        return f'-lr{self.learning_rate:g}' if self.learning_rate else ''

    def model_folder(self, out: Path) -> Path:
        """`models/<mixer>`, with the task unless it is text, the seed unless it is 0, and the learning rate of several."""
        task = '' if self.task == 'language' else f'-{self.task}'
        seed = '' if self.seed == 0 else f'-seed{self.seed}'
        return out / 'models' / f'{self.mixer}{task}{seed}{self.rate_suffix}'


class Plan:
    """The runs of a job: every learning rate with the first seed, then the best of them with the other seeds."""

    def __init__(self, mixers: Iterable[str], tasks: dict[str, Language | Synthetic], seeds: list[int]):
        self.seeds = seeds
        # of each mixer on each task, with the first seed
        self.trials: dict[tuple[str, str], list[Run]] = {}
        for task, about in tasks.items():
            rates = about.training.learning_rates
            for mixer in mixers:
                self.trials[mixer, task] = [
                    Run(mixer, task, seeds[0], rate) for rate in (rates if len(rates) > 1 else (None,))
                ]
        self.results: dict[Run, dict] = {}
        # those that failed are over as well
        self.over: set[Run] = set()

    def possible(self) -> list[Run]:
        return [replace(run, seed=seed) for seed in self.seeds for tried in self.trials.values() for run in tried]

    def end(self, run: Run, result: dict | None) -> list[Run]:
        """A run is over, with a result unless it failed; returns those that can begin by that."""
        self.over.add(run)
        if result:
            self.results[run] = result
        tried = self.trials[run.mixer, run.task]
        return self.due(run.mixer, run.task) if run in tried and self.over.issuperset(tried) else []

    def with_best_rate(self, mixer: str, task: str) -> list[Run]:
        """A run for each seed, with the learning rate that trains best, or the first if none trains."""
        tried = self.trials[mixer, task]
        best = min(
            (run for run in tried if run in self.results), key=lambda run: end_loss(self.results[run]), default=tried[0],
        )
        return [replace(best, seed=seed) for seed in self.seeds]

    def due(self, mixer: str, task: str) -> list[Run]:
        """Runs that can begin: all trials, or the other seeds once these are over."""
        trials = [run for run in self.trials[mixer, task] if run not in self.over]
        return trials or [run for run in self.with_best_rate(mixer, task) if run not in self.over]

    def waiting(self) -> list[Run]:
        """Runs that cannot begin, as their learning rate is not known."""
        return [
            Run(*about, run.seed) for about, tried in self.trials.items() if not self.over.issuperset(tried)
            for run in self.with_best_rate(*about)[1:] if run not in self.over
        ]

    def finished(self, mixer: str, task: str) -> dict[Run, dict]:
        """Results with the learning rate that trains best."""
        return {run: self.results[run] for run in self.with_best_rate(mixer, task) if run in self.results}

    def by_rate(self, mixer: str, task: str) -> dict[str, dict]:
        """Results of the first seed with each learning rate; empty where there is one."""
        tried = self.trials[mixer, task]
        return {f'{run.learning_rate:g}': self.results[run] for run in tried if run.learning_rate and run in self.results}


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


def end_loss(result: dict) -> float:
    """The loss over the last tenth of training, by which learning rates are judged: on data that is new, or seen once."""
    losses = result['curve']['loss']
    return statistics.fmean(losses[-max(1, len(losses) // 10):])


def result_file(out: Path, run: Run) -> Path:
    return out / 'runs' / f'{run.name}.json'


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
