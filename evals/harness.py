# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""EleutherAI's lm-evaluation-harness over models of KDN and of FLA: `python -m evals.harness --model_args pretrained=PATH`.

All arguments are the harness's own. Task files in `evals/tasks` are known beside its own tasks, and beside those of
`--include_path`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lm_eval.__main__ import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import setup_logging, simple_parse_args_string

import benchmarks.compare.models  # noqa: F401
import fla_kdn  # noqa: F401
from fla_kdn.models.compat import fix_fla_generation

if TYPE_CHECKING:
    from argparse import Namespace

TASKS = Path(__file__).with_name('tasks')

# tokens of input and output together to which the texts of a group are cut
LENGTHS = {'paper_recall': 2048}


class Harness(HarnessCLI):

    def parse_args(self) -> Namespace:
        args = super().parse_args()
        file = getattr(args, 'config', None)
        config = {**(EvaluatorConfig.load_yaml_config(file) if file else {}), **{k: v for k, v in vars(args).items() if v}}
        if hasattr(args, 'include_path'):
            args.include_path = [str(TASKS), *([config['include_path']] if 'include_path' in config else [])]
        if hasattr(args, 'model_args'):
            tasks, model_args = config.get('tasks', []), config.get('model_args', {})
            tasks = tasks.split(',') if isinstance(tasks, str) else tasks
            model_args = simple_parse_args_string(model_args) if isinstance(model_args, str) else model_args
            lengths = [length for group, length in LENGTHS.items() if group in tasks]
            args.model_args = {**({'max_length': min(lengths)} if lengths else {}), **model_args}
        return args


def main() -> None:
    setup_logging()
    fix_fla_generation()
    harness = Harness()
    harness.execute(harness.parse_args())


if __name__ == '__main__':
    main()
