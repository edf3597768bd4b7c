# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import subprocess
from pathlib import Path


def find_commit() -> str | None:
    """The commit that is checked out, marked if files differ from it; `None` outside a repository."""
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() or None
