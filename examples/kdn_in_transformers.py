# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""
A hybrid of KDN and sliding-window attention in transformers: train it, generate, go on from a kept cache, fine-tune with LoRA.

    pip install -e '.[examples]'
    python examples/kdn_in_transformers.py

It downloads nothing, and takes one to two minutes on two CPU cores.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    TextStreamer,
    Trainer,
    TrainingArguments,
    set_seed,
)

from fla_kdn import KDNConfig
from fla_kdn.models.optim import DecayByNameMixin

set_seed(0)
folder = tempfile.mkdtemp()

# %% A tokenizer of bytes, and the documentation texts that ship with Python, cut into samples of uneven length

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(['<pad>', '<eos>', *alphabet])}, merges=[]))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token='<pad>', eos_token='<eos>')


def samples(text: str) -> list[dict[str, list[int]]]:
    ids = tokenizer(text)['input_ids']
    cuts = [0]
    while cuts[-1] < len(ids):
        cuts.append(cuts[-1] + random.randint(100, 300))
    return [{'input_ids': ids[a:b]} for a, b in zip(cuts, cuts[1:], strict=False)]


text = '\n\n'.join(topics[name] for name in sorted(topics))

# %% A model whose second and fourth layer are attention over the last 64 tokens

config = KDNConfig(
    vocab_size=len(tokenizer),
    hidden_size=128,
    num_hidden_layers=4,
    num_heads=4,
    head_dim=32,
    attn={'layers': [1, 3], 'num_heads': 4, 'window_size': 64},
    initializer_range=0.06,
    pad_token_id=tokenizer.pad_token_id,
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
)
model = AutoModelForCausalLM.from_config(config)

# %% Training: samples packed into one row, none of which sees another


class KDNTrainer(DecayByNameMixin, Trainer):
    """Without weight decay of decays and of other parameters that are no matrices."""


def train(model: torch.nn.Module, text: str, steps: int, learning_rate: float) -> None:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        logging_steps=steps // 5,
        lr_scheduler_type='cosine',
        warmup_steps=steps // 10,
        learning_rate=learning_rate,
        weight_decay=0.1,
        save_strategy='no',
        report_to=[],
    )
    KDNTrainer(
        model=model,
        args=arguments,
        train_dataset=samples(text),
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    ).train()
    model.eval()


train(model, text, steps=250, learning_rate=5e-3)

# %% Save and load

model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

# %% Generate, alone and in a batch padded on the left

prompts = ['The "import" statement', 'A class definition is']
sampling = {'do_sample': True, 'temperature': 0.6}
inputs = tokenizer(prompts[0], return_tensors='pt')
print('--- generated')
model.generate(**inputs, max_new_tokens=80, **sampling, streamer=TextStreamer(tokenizer))
batch = tokenizer(prompts, return_tensors='pt', padding=True, padding_side='left')
for ids in model.generate(**batch, max_new_tokens=40, **sampling):
    print(repr(tokenizer.decode(ids, skip_special_tokens=True)))

# %% Go on from a kept cache: the common prefix is read once

prefix = tokenizer('The following is an example of a function definition:\n\n', return_tensors='pt')
with torch.no_grad():
    cache = model(**prefix, use_cache=True).past_key_values
print('--- from one cache')
for more in ('def ', 'class '):
    ids = torch.cat((prefix['input_ids'], tokenizer(more, return_tensors='pt')['input_ids']), 1)
    kept = copy.deepcopy(cache)
    ids = model.generate(ids, past_key_values=kept, max_new_tokens=40, **sampling)
    print(repr(tokenizer.decode(ids[0, prefix['input_ids'].shape[1]:])))

# %% LoRA teaches it to write dashes for spaces

targets = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
adapted.print_trainable_parameters()
train(adapted, text.replace(' ', '-'), steps=50, learning_rate=5e-3)
merged = adapted.merge_and_unload()
inputs = tokenizer(prompts[0], return_tensors='pt')
print('--- fine-tuned')
print(tokenizer.decode(merged.generate(**inputs, max_new_tokens=80, **sampling)[0]))
