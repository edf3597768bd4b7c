# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

from __future__ import annotations

import shutil
from pathlib import Path

from fla.models.configuration_utils import AttentionConfig, AttentionConfigBase, validate_loss_config
from transformers.configuration_utils import PreTrainedConfig

from fla_kdn.layers.kdn import check_options
from fla_kdn.models.kdn.presets import PRESETS

# copied beside every saved checkpoint
CODE_FILE = Path(__file__).with_name('auto_kdn.py')


class KDNConfig(AttentionConfigBase, PreTrainedConfig):
    """Configuration of a KDN model. Fields are those of FLA's `KDAConfig` and of the layer, :class:`KalmanDeltaNet`."""

    model_type = 'kdn'
    # the second is its name from transformers 5.24 on
    keys_to_ignore_at_inference = ['past_key_values', 'cache']

    def __init__(
        self,
        attn_mode: str = 'chunk',
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        covariance: str = 'diagonal',
        info_scale: float | None = None,
        learn_info_scale: bool = False,
        r_min: float = 0.01,
        fixed_r: float | None = None,
        fixed_omega: float | None = None,
        use_short_conv: bool = True,
        safe_gate: bool = True,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        max_position_embeddings: int = 2048,
        hidden_ratio: int | None = 4,
        intermediate_size: int | None = None,
        hidden_act: str = 'swish',
        num_hidden_layers: int = 24,
        norm_eps: float = 1e-6,
        attn: AttentionConfig = None,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        fuse_norm: bool = True,
        fuse_swiglu: bool = True,
        fuse_cross_entropy: bool = True,
        fuse_linear_cross_entropy: bool = False,
        use_l2warp: bool = False,
        vocab_size: int = 32000,
        **kwargs,
    ):
        self.attn_mode = attn_mode
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.covariance = covariance
        self.info_scale = info_scale
        self.learn_info_scale = learn_info_scale
        self.r_min = r_min
        self.fixed_r = fixed_r
        self.fixed_omega = fixed_omega
        self.use_short_conv = use_short_conv
        self.safe_gate = safe_gate
        self.lower_bound = lower_bound
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.max_position_embeddings = max_position_embeddings

        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.num_hidden_layers = num_hidden_layers
        self.norm_eps = norm_eps
        self.attn = attn
        self.use_cache = use_cache
        self.initializer_range = initializer_range

        self.fuse_norm = fuse_norm
        self.fuse_swiglu = fuse_swiglu
        self.fuse_cross_entropy = fuse_cross_entropy
        self.fuse_linear_cross_entropy = fuse_linear_cross_entropy
        self.use_l2warp = use_l2warp
        self.vocab_size = vocab_size

        check_options(
            mode=attn_mode,
            covariance=covariance,
            info_scale=info_scale,
            r_min=r_min,
            fixed_r=fixed_r,
            fixed_omega=fixed_omega,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            head_dim=head_dim,
            expand_v=expand_v,
            num_heads=num_heads,
            num_v_heads=num_heads if num_v_heads is None else num_v_heads,
        )
        validate_loss_config(fuse_cross_entropy=fuse_cross_entropy, fuse_linear_cross_entropy=fuse_linear_cross_entropy)

        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    @classmethod
    def from_preset(cls, name: str, **options) -> KDNConfig:
        """The shape called `name` in `fla_kdn.models.kdn.presets.PRESETS`, with `options` in place of its values."""
        if name not in PRESETS:
            raise ValueError(f'No preset is called {name!r}; there are {", ".join(PRESETS)}.')
        return cls(**{**PRESETS[name], **options})

    @classmethod
    def register_for_auto_class(cls, auto_class: str = 'AutoConfig') -> None:
        """Nothing to do: `save_pretrained` writes the code file of a checkpoint, and it stays the one written there."""

    def save_pretrained(self, save_directory, **kwargs):
        """Save the configuration, and with it a code file for `trust_remote_code=True` that hands over to this package."""
        self.auto_map = {
            'AutoConfig': f'{CODE_FILE.stem}.KDNConfig',
            'AutoModel': f'{CODE_FILE.stem}.KDNModel',
            'AutoModelForCausalLM': f'{CODE_FILE.stem}.KDNForCausalLM',
        }
        super().save_pretrained(save_directory, **kwargs)
        shutil.copy(CODE_FILE, save_directory)

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        # `save_pretrained(push_to_hub=True)` uploads what the parent has written
        shutil.copy(CODE_FILE, working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)
