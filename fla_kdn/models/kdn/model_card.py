# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData

if TYPE_CHECKING:
    from fla_kdn.models.kdn.configuration_kdn import KDNConfig

TAGS = ['kdn', 'linear-attention', 'flash-linear-attention']


def make_model_card(config: KDNConfig, num_parameters: int) -> ModelCard:
    """What this kind of model is and how to load it, with the metadata of the Hub; the training is left to its owner."""
    specs = config.attn if isinstance(config.attn, list) else [config.attn] if config.attn else []
    attention = sum(len(spec['layers']) for spec in specs)
    layers = f'KDN layers: {config.num_hidden_layers - attention} ({config.covariance} covariance)'
    if attention:
        layers += f'; layers of softmax attention: {attention}'
    metadata = ModelCardData(library_name='transformers', pipeline_tag='text-generation', tags=TAGS)
    return ModelCard(f'''---
{metadata.to_yaml()}
---

# A Kalman Delta Network

A language model of {num_parameters:,} parameters; width {config.hidden_size}; {layers}.
A Kalman Delta Network writes to a linear-attention memory by a Kalman gain, from the tracked uncertainty of that memory
([arXiv 2609.07816](https://arxiv.org/abs/2609.07816)).

Its code is the package `fla_kdn`, an extension of flash-linear-attention, to be installed from its repository.

```python
import fla_kdn  # registers the architecture; or trust_remote_code=True below
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained('this folder or repository')
```
''')
