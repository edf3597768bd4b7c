# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fla_kdn.models.kdn.configuration_kdn import KDNConfig
from fla_kdn.models.kdn.modeling_kdn import KDNForCausalLM, KDNModel

AutoConfig.register(KDNConfig.model_type, KDNConfig, exist_ok=True)
AutoModel.register(KDNConfig, KDNModel, exist_ok=True)
AutoModelForCausalLM.register(KDNConfig, KDNForCausalLM, exist_ok=True)
# by this list `Trainer` knows which models predict the next token, where it smooths labels
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[KDNConfig.model_type] = KDNForCausalLM.__name__

__all__ = ['KDNConfig', 'KDNForCausalLM', 'KDNModel']
