# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from pathlib import Path

from setuptools import find_packages, setup

COMPARE = ['matplotlib', 'rich', 'safetensors']
EVALS = ['lm_eval>=0.4.13,<0.5', *COMPARE]
# before 4.6, `set_epoch` of a stream does not change the order of its files
EXAMPLES = ['accelerate', 'datasets>=4.6.1', 'peft']

setup(
    name='fla-kdn',
    version='0.1.0',
    description='Kalman Delta Networks for flash-linear-attention',
    long_description=Path(__file__).with_name('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='MIT',
    license_files=['LICENSE'],
    packages=find_packages(include=['fla_kdn', 'fla_kdn.*']),
    python_requires='>=3.10',
    install_requires=[
        'torch>=2.7',
        'triton>=3.3',
        'flash-linear-attention==0.6.*',
        'transformers>=5.6.2,<6',
        'einops',
    ],
    extras_require={
        'compare': COMPARE,
        'evals': EVALS,
        'examples': EXAMPLES,
        'inspect': ['matplotlib'],
        'test': [*EVALS, *EXAMPLES, 'trl', 'pytest', 'pytest-timeout', 'pytest-xdist', 'ruff==0.17.*'],
    },
    classifiers=[
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
