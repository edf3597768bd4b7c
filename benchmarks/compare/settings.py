# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Sizes of the comparison. Every mixer gets the same backbone, data, optimizer and number of parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.compare.mixers import MIXERS
from benchmarks.compare.tasks import Needles, NoisyAssociations, Overwriting, Recall, Synthetic, Training
from evals.synthetic import TokenNeedles


@dataclass(frozen=True)
class Backbone:
    """Shape of the models; `intermediate_size` is KDA's, the other mixers' follows from its number of parameters."""
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    # the width of the MLPs is a multiple of it
    width_step: int
    initializer_range: float
    # at least 256, the bytes of a text
    vocab_size: int = 256


@dataclass(frozen=True)
class Preset:
    backbone: Backbone
    mixers: tuple[str, ...]
    # default text, one of `data.TEXTS`
    text: str
    seq_len: int
    # none where text is not learnt
    language: Training | None
    tasks: dict[str, Synthetic]
    device: str
    bf16: bool
    # speed: sequences decoded together, tokens of a timed block, blocks (and training steps) of which the median is taken
    decode_batch: int
    decode_tokens: int
    repeats: int
    # processes that train at once
    workers: int = 1


RATES = (1e-3, 3e-3)

# Sized to take minutes with three seeds on two GPUs, so steps are few: 800 of recall, which takes longest, fewer of the
# others, and about half an epoch of text.
GPU = Preset(
    backbone=Backbone(
        hidden_size=256, num_hidden_layers=2, num_heads=2, head_dim=64, intermediate_size=512, width_step=8,
        initializer_range=0.03, vocab_size=320,
    ),
    mixers=(
        'kdn-diagonal', 'kdn-isotropic', 'kda', 'gated-deltanet', 'gdn2', 'precond-kda', 'mamba2', 'attention', 'kdn-window',
    ),
    text='library',
    seq_len=512,
    language=Training(steps=400, tokens=16384, learning_rates=(3e-3, 1e-2)),
    tasks={
        'recall': Recall(
            Training(steps=800, tokens=16384, learning_rates=RATES),
            symbols=128, train_pairs=(2, 4, 8, 16, 32, 64), eval_pairs=(8, 16, 32, 64, 96, 128), eval_sequences=128,
            fillers=64, train_stretch=(1, 2), eval_lengths=(128, 256, 1024, 4096, 16384, 65536), length_pairs=32,
        ),
        'overwriting': Overwriting(
            Training(steps=700, tokens=16384, learning_rates=RATES),
            keys=128, values=64, train_writes=(1, 1, 2, 4), more_writes=((8,), (16,)), eval_sequences=128,
            train_keys=(4, 8, 16, 32, 64), eval_keys=(16, 32, 64, 96, 128),
        ),
        'noisy': NoisyAssociations(
            Training(steps=400, tokens=16384, learning_rates=RATES),
            keys=64, values=16, train_writes=(2, 2, 4, 4, 8, 8, 16, 16), more_writes=((32,) * 4, (64,) * 4),
            eval_sequences=512, reliability=0.5,
        ),
        'needles': Needles(
            Training(steps=500, tokens=16384, learning_rates=RATES),
            TokenNeedles(needles=8, questions=8, keys=64, values=64, distractors=64),
            train_lengths=(64, 128, 256), eval_lengths=(128, 256, 1024, 4096, 16384, 65536), eval_sequences=128,
        ),
    },
    device='cuda',
    bf16=True,
    decode_batch=32,
    decode_tokens=64,
    repeats=15,
    workers=16,
)

PRESETS = {
    'cpu': Preset(
        backbone=Backbone(
            hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=32, intermediate_size=160, width_step=1,
            initializer_range=0.06,
        ),
        mixers=('kdn-diagonal', 'kdn-isotropic', 'kda', 'gated-deltanet'),
        text='documentation',
        seq_len=256,
        language=Training(steps=400, tokens=2048, learning_rates=(1e-2,)),
        tasks={
            'recall': Recall(
                Training(steps=600, tokens=2048, learning_rates=(2e-3,)),
                symbols=64, train_pairs=(2, 4, 8, 16), eval_pairs=(4, 8, 16, 32, 64), eval_sequences=64,
            ),
        },
        device='cpu',
        bf16=False,
        decode_batch=4,
        decode_tokens=16,
        repeats=7,
    ),
    'gpu': GPU,
    # KDN with one option changed, beside KDN
    'ablations': replace(
        GPU,
        mixers=tuple(mixer for mixer in MIXERS if mixer.startswith(('kdn-diagonal', 'kdn-isotropic'))),
        language=None,
        tasks={
            'recall': replace(
                GPU.tasks['recall'], training=Training(steps=700, tokens=16384, learning_rates=(2e-3,)),
                eval_lengths=(128, 256, 1024, 4096, 16384),
            ),
            'noisy': replace(GPU.tasks['noisy'], training=Training(steps=400, tokens=16384, learning_rates=(2e-3,))),
        },
    ),
    # both approximations beside the full covariance, which is a loop over tokens: small keys, short sequences, for which a CPU
    # is as fast as a GPU
    'exact': replace(
        GPU,
        backbone=replace(GPU.backbone, hidden_size=64, head_dim=16, intermediate_size=128, width_step=1,
                         initializer_range=0.06),
        mixers=('kdn-exact', 'kdn-diagonal', 'kdn-isotropic', 'kdn-diagonal-mu-1', 'kdn-isotropic-mu-1', 'kda'),
        language=None,
        tasks={
            'recall': Recall(
                Training(steps=500, tokens=4096, learning_rates=(4e-3,)),
                symbols=32, train_pairs=(2, 4, 8, 16), eval_pairs=(4, 8, 12, 16, 24), eval_sequences=256,
            ),
            'noisy': NoisyAssociations(
                Training(steps=1000, tokens=4096, learning_rates=(4e-3,)),
                keys=32, values=8, train_writes=(2, 2, 4, 4, 8, 8), more_writes=((16,) * 3,), eval_sequences=512,
                reliability=0.5,
            ),
        },
        device='cpu',
        bf16=False,
        workers=2,
    ),
}
