# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""
Pretrain a language model: KDN, a hybrid, KDA or any other that `AutoModelForCausalLM` knows. README.md here tells more.

    python examples/pretrain.py --model kdn-750m-diagonal --data FILES --tokenizer NAME --output_dir runs/kdn
    torchrun --nproc_per_node 8 examples/pretrain.py ...the same...
    python examples/pretrain.py --model kdn-750m-diagonal --dry_run
    python examples/pretrain.py export runs/kdn/checkpoint-1000 models/kdn

The same command again goes on from the newest checkpoint.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from fla.models.modeling_utils import FLAPreTrainedModel
from pretraining.data import Batches, Lane, load_documents, load_tokenizer
from pretraining.shapes import GIB, PRESETS, costs, count, is_covered, make_config, meta_model, token_budget
from pretraining.trainer import DATA, STATE, PretrainingTrainer, checkpoints, export, own
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainerState, TrainingArguments, set_seed

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# of --dry_run: numbers of GPUs, and the share of an H100 that is assumed where no speed is given
GPUS = (1, 8, 16, 64)
ASSUMED_MFU, ASSUMED_PEAK = 0.4, 989e12
# smallest values of arguments
AT_LEAST = {
    'seq_len': 1, 'batch_tokens': 1, 'per_device_train_batch_size': 1, 'lanes': 1, 'shuffle_block': 1,
    'dataloader_num_workers': 0, 'save_total_limit': 0, 'seed': 0, 'data_seed': 0,
}
POSITIVE = ('train_tokens', 'tokens_per_second', 'peak_tflops', 'save_steps', 'logging_steps')
# arguments of `TrainingArguments` that follow from numbers of tokens
DERIVED = {'num_train_epochs': '--train_tokens', 'gradient_accumulation_steps': '--batch_tokens'}
# models of FLA that pass over cu_seqlens
UNPACKED = ('log_linear_mamba2', 'mamba', 'mamba2', 'samba')


@dataclass
class PretrainingArguments(TrainingArguments):
    """The paper's recipe by default; fields of `TrainingArguments` that are not here have its defaults."""

    model: str = field(default='', metadata={'help': f'preset ({", ".join(PRESETS)}), or file or folder with a config'})
    config_overrides: dict | str | None = field(default=None, metadata={'help': 'fields of the config, as JSON'})
    attn_implementation: str | None = field(default=None, metadata={'help': 'kernel of softmax attention, as in transformers'})

    data: str = field(default='', metadata={'help': 'file, folder or pattern of parquet, JSON lines or text; or hub data set'})
    data_config: str | None = field(default=None, metadata={'help': 'config of a hub data set'})
    data_split: str = field(default='train', metadata={'help': 'split of a hub data set'})
    text_column: str = field(default='text', metadata={'help': 'column with the text of a document'})
    tokenizer: str = field(default='', metadata={'help': "folder or hub name; 'bytes' for one token per byte"})
    seq_len: int = field(default=4096, metadata={'help': 'tokens of a row'})
    packing: Literal['documents', 'concatenated'] = field(default='documents', metadata={
        'help': 'whether documents in a row are kept apart (documents), or read as one text as in the paper (concatenated)'})
    shuffle_block: int = field(default=1024, metadata={'help': 'documents that are shuffled together'})
    lanes: int = field(default=64, metadata={
        'help': 'streams of documents, a multiple of processes times workers; fewer if the rows of a step are no multiple'})

    train_tokens: float | None = field(default=None, metadata={'help': "tokens of the run; default: the paper's for the size"})
    batch_tokens: int = field(default=128 * 4096, metadata={'help': 'tokens of an optimizer step, over all processes'})
    parallel: Literal['fsdp', 'ddp'] = field(default='fsdp', metadata={'help': 'how several GPUs share the model'})
    peak_tflops: float | None = field(default=None, metadata={'help': 'dense bf16 TFLOP/s of the GPU, for the mfu'})
    dry_run: bool = field(default=False, metadata={'help': 'only print what the run would cost'})
    tokens_per_second: float | None = field(default=None, metadata={'help': 'speed of a GPU, for --dry_run'})

    learning_rate: float = 4e-4
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    lr_scheduler_type: str = 'cosine_with_min_lr'
    lr_scheduler_kwargs: dict | str | None = None
    warmup_steps: float = 0.01
    per_device_train_batch_size: int = 4
    bf16: bool | None = field(default=None, metadata={'help': 'bf16 autocast over fp32 weights; default: on GPUs'})
    logging_steps: float = 10
    save_steps: float = 1000
    save_total_limit: int | None = 3
    dataloader_num_workers: int = 1
    # a NaN is to be seen
    logging_nan_inf_filter: bool = False

    def __post_init__(self):
        self._check_numbers()
        for name in ('config_overrides', 'lr_scheduler_kwargs'):
            setattr(self, name, self._read_fields(name))
        if self.lr_scheduler_kwargs is None and self.lr_scheduler_type == 'cosine_with_min_lr':
            self.lr_scheduler_kwargs = {'min_lr_rate': 0.1}
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.bf16 is None:
            self.bf16 = not self.use_cpu
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False
        # the stream of rows takes itself up again
        self.ignore_data_skip = True
        super().__post_init__()
        self._set_batches()
        # one process has one GPU
        self._n_gpu = min(self.n_gpu, 1)
        self.checkpoints_activations = bool(self.gradient_checkpointing)
        if self.parallel == 'fsdp' and self.world_size > 1:
            self.fsdp_plugin_args = {
                'fsdp_version': 2,
                'auto_wrap_policy': 'transformer_based_wrap',
                'state_dict_type': 'SHARDED_STATE_DICT',
                'cpu_ram_efficient_loading': False,
                'activation_checkpointing': self.gradient_checkpointing,
                # weights are gathered in fp32 and autocast rounds them, as on one GPU: decays in bf16 would be others
                'mixed_precision_policy': MixedPrecisionPolicy(),
            }
            # FSDP's own, with which a block is gathered once less
            self.gradient_checkpointing = self.activation_checkpointing = False

    def _check_numbers(self) -> None:
        for name, least in AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f'--{name} {value} must be at least {least}.')
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f'--{name} {value:g} must be positive and finite.')
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(f'--max_steps {self.max_steps} must be positive.')
        if self.max_steps > 0 and self.train_tokens is not None:
            raise ValueError('--max_steps and --train_tokens both say how long the run is; give one of them.')
        for name, source in DERIVED.items():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f'--{name} follows from {source}; give that instead.')

    def _read_fields(self, name: str) -> dict | None:
        value = getattr(self, name)
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f'--{name} {value!r} is no JSON: {error}') from None
        if not isinstance(value, dict | None):
            raise ValueError(f'--{name} {value!r} must be fields with their values, as in \'{{"name": 1}}\'.')
        return value

    def _set_batches(self) -> None:
        """Set the number of micro-batches, and check that rows, processes, workers and lanes go together."""
        processes, rows = self.world_size, self.batch_tokens // self.seq_len
        if self.batch_tokens % self.seq_len or rows % processes or rows == 0:
            unit = self.seq_len * processes
            raise ValueError(
                f'--batch_tokens {self.batch_tokens} is not a number of rows of --seq_len {self.seq_len} for each of '
                f'{processes} processes; {unit * max(1, round(self.batch_tokens / unit))} would be.',
            )
        self.lanes = math.gcd(self.lanes, rows)
        readers = processes * max(1, self.dataloader_num_workers)
        if self.lanes % readers:
            raise ValueError(
                f'{self.lanes} lanes, the common part of --lanes and the {rows} rows of a step, cannot be shared out to '
                f'{processes} processes of {self.dataloader_num_workers} workers: change --dataloader_num_workers or --lanes.',
            )
        rows //= processes
        self.per_device_train_batch_size = min(self.per_device_train_batch_size, rows)
        if rows % self.per_device_train_batch_size:
            raise ValueError(
                f'--per_device_train_batch_size {self.per_device_train_batch_size} does not divide the {rows} rows that a '
                f'process has in a step of {self.batch_tokens} tokens.',
            )
        self.gradient_accumulation_steps = rows // self.per_device_train_batch_size

    def set_steps(self) -> None:
        """Set the number of steps from the number of tokens, if that of steps is not given."""
        if self.max_steps > 0:
            return
        tokens = self.train_tokens or token_budget(self.model)
        if tokens is None:
            raise ValueError(f'--train_tokens: say how many tokens; the paper has no run of the size of {self.model}.')
        if tokens < self.batch_tokens:
            raise ValueError(f'--train_tokens {tokens:g} is less than one step of --batch_tokens {self.batch_tokens}.')
        self.max_steps = int(tokens // self.batch_tokens)


def describe(args: PretrainingArguments, config: PreTrainedConfig) -> str:
    """What a run would cost, on several numbers of GPUs."""
    model = meta_model(config)
    cost, tokens = costs(model, args.seq_len), args.max_steps * args.batch_tokens
    parameters = f'parameters              {cost.parameters:,}, without embeddings {cost.non_embedding:,}'
    run = f'run                     {count(tokens)}tokens, {args.max_steps:,} steps of {args.batch_tokens:,}'
    if not is_covered(model):
        unknown = f'FLOPs, memory and time are not known for {type(model).__name__}, nor will the log have the mfu.'
        return '\n'.join((parameters, run, unknown))
    speed = args.tokens_per_second or ASSUMED_MFU * ASSUMED_PEAK / cost.flops_per_token
    basis = '' if args.tokens_per_second else f' ({ASSUMED_MFU:.0%} of {ASSUMED_PEAK / 1e12:.0f} TFLOP/s)'
    rows, step_rows = args.per_device_train_batch_size * args.seq_len, args.batch_tokens // args.seq_len
    lines = [
        parameters,
        f'state of a sequence     {cost.state_bytes:,} bytes',
        f'FLOPs of a token        {count(cost.flops_per_token)}FLOP, forward and backward',
        f'{run}; {count(tokens * cost.flops_per_token)}FLOP',
        f'speed                   {speed:,.0f} tokens a second and GPU{basis}',
        '',
        f'{"GPUs":>6}{"days":>10}{"GiB on each":>14}   with micro-batches of {rows:,} tokens at most, estimated',
    ]
    for gpus in GPUS:
        if step_rows % gpus:
            lines.append(f'{gpus:>6}   cannot share the {step_rows} rows of a step')
            continue
        micro = min(rows, args.batch_tokens // gpus)
        memory = cost.memory(micro, gpus, args.parallel, args.checkpoints_activations, micro * gpus < args.batch_tokens)
        lines.append(f'{gpus:>6}{tokens / speed / gpus / 86400:>10.1f}{memory / GIB:>14.1f}')
    return '\n'.join(lines)


def find_checkpoint(args: PretrainingArguments, settings: dict) -> Path | None:
    """The checkpoint to go on from: the newest whole one of the run, or if there is none, the one that is named."""
    whole = checkpoints(args.output_dir)
    named = args.resume_from_checkpoint and Path(args.resume_from_checkpoint)
    if named and named.resolve() in (x.resolve() for x in whole[:-1]):
        raise ValueError(
            f'--resume_from_checkpoint: {args.output_dir} has a later checkpoint, {whole[-1].name}, which would count as '
            'that of the new run; give that another --output_dir.',
        )
    if whole:
        path = whole[-1]
    elif not named:
        return None
    elif named in checkpoints(named.parent):
        path = named
    else:
        raise ValueError(f'--resume_from_checkpoint: {named} is not a whole checkpoint.')
    stored = json.loads((path / DATA).read_text())['settings']
    # another version may have other fields
    different = [f'{key} was {stored[key]} and is now {x}' for key, x in settings.items() if stored.get(key, x) != x]
    if different:
        raise ValueError(f'{path} was made with other settings: {"; ".join(different)}. A new run needs another --output_dir.')
    return path


def make_model(args: PretrainingArguments, config: PreTrainedConfig) -> PreTrainedModel:
    """New weights in fp32, the same for a seed on any number of processes."""
    set_seed(args.seed)
    options = {} if args.attn_implementation is None else {'attn_implementation': args.attn_implementation}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    if args.packing == 'documents' and (not isinstance(model, FLAPreTrainedModel) or config.model_type in UNPACKED):
        raise ValueError(
            f'--packing documents tells documents apart by cu_seqlens, which {type(model).__name__} does not know; '
            'use --packing concatenated.',
        )
    return model


def digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def fields_of(config: PreTrainedConfig) -> dict:
    """Fields of a config but for those that change no step of training."""
    fields = json.loads(config.to_json_string(use_diff=False))
    return {
        f'config.{name}': x for name, x in fields.items()
        if name not in ('_name_or_path', 'architectures', 'dtype', 'torch_dtype', 'transformers_version', 'use_cache')
    }


def read_inputs(
    args: PretrainingArguments,
    config: PreTrainedConfig,
) -> tuple[PreTrainedTokenizerBase, IterableDataset, dict]:
    """Tokenizer, documents, and the settings of the run that have to stay the same when it goes on."""
    for name in ('data', 'tokenizer'):
        if not getattr(args, name):
            raise ValueError(f'--{name} is missing.')
    tokenizer = load_tokenizer(args.tokenizer, config.vocab_size)
    for name in ('bos_token_id', 'eos_token_id', 'pad_token_id'):
        setattr(config, name, getattr(tokenizer, name))
    documents, fingerprint = load_documents(args.data, args.data_config, args.data_split, args.text_column)
    return tokenizer, documents, {
        'weights': digest([(name, list(x.shape)) for name, x in meta_model(config).state_dict().items()]),
        'data': fingerprint,
        'tokenizer': digest(sorted(tokenizer.get_vocab().items())),
        'data_seed': args.seed if args.data_seed is None else args.data_seed,
        'optim': args.optim.value,
        **{name: getattr(args, name) for name in ('seq_len', 'packing', 'shuffle_block', 'lanes', 'batch_tokens')},
        **fields_of(config),
    }


def agree(error: str | None, settings: dict | None) -> None:
    """Raise on all processes what one of them has met, or that they have read different things."""
    told = gather_object([(error, settings)])
    for process, (error, _) in enumerate(told):
        if error:
            raise ValueError(error if len(told) == 1 else f'process {process}: {error}')
    for process, (_, other) in enumerate(told):
        if other != told[0][1]:
            keys = ', '.join(key for key, x in other.items() if x != told[0][1].get(key))
            raise ValueError(f'process {process} has another {keys} than process 0; all must see the same files.')


def prepare(args: PretrainingArguments) -> PretrainingTrainer | None:
    """The trainer of a run, which knows where the run goes on; `None` if there is nothing to train."""
    if not args.model:
        raise ValueError(f'--model is missing; presets: {", ".join(PRESETS)}.')
    config = make_config(args.model, args.config_overrides)
    args.set_steps()
    is_main = args.process_index == 0
    if args.dry_run:
        if is_main:
            print(describe(args, config))
        return None
    tokenizer = documents = settings = owned = error = None
    try:
        tokenizer, documents, settings = read_inputs(args, config)
        if is_main:
            owned = own(Path(args.output_dir))
    except ValueError as e:
        error = str(e)
    # the others see the folder as the first has left it
    agree(error, settings)
    checkpoint = find_checkpoint(args, settings)
    if is_main:
        for path in set(Path(args.output_dir).glob('checkpoint-*')) - set(checkpoints(args.output_dir)):
            print(f'{path} is not whole and is passed over')
    if checkpoint is not None:
        done = TrainerState.load_from_json(checkpoint / STATE).global_step
        if is_main:
            print(f'{checkpoint} is the end of this run' if done >= args.max_steps else f'going on from {checkpoint}')
        if done >= args.max_steps:
            return None
    args.resume_from_checkpoint = None if checkpoint is None else str(checkpoint)

    lanes = [
        Lane(
            documents, tokenizer, args.text_column, args.seq_len, args.shuffle_block, settings['data_seed'], index, args.lanes,
        ) for index in range(args.process_index, args.lanes, args.world_size)
    ]
    batches = Batches(lanes, args.per_device_train_batch_size, args.packing, args.dataloader_num_workers)
    model = make_model(args, config)
    return PretrainingTrainer(model, args, processing_class=tokenizer, batches=batches, settings=settings, owned=owned)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    is_main, trainer = os.environ.get('RANK', '0') == '0', None
    try:
        if argv[:1] == ['export']:
            if len(argv) != 3:
                raise ValueError('export takes a checkpoint and a new folder.')
            try:
                export(*argv[1:])
            except OSError as error:
                raise ValueError(f'export: {error}') from None
            return 0
        args, = HfArgumentParser(PretrainingArguments, description=__doc__).parse_args_into_dataclasses(argv)
        trainer = prepare(args)
        if trainer is not None:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            # none with --save_strategy no
            if is_main and (written := checkpoints(args.output_dir)):
                print(f'for from_pretrained: python examples/pretrain.py export {written[-1]} FOLDER')
        if dist.is_initialized():
            # if DDP were the last to hold the process group, it would wait for gloo's threads while it has the GIL they need
            trainer = None
            gc.collect()
            dist.destroy_process_group()
    except KeyboardInterrupt:
        if is_main:
            print('pretrain.py: interrupted; the same command goes on from the last checkpoint', file=sys.stderr)
        return 130
    except FloatingPointError as error:
        if is_main:
            print(f'pretrain.py: error: {error}', file=sys.stderr)
        return 1
    except ValueError as error:
        # before training it is that of all processes
        if is_main or trainer is not None:
            last = checkpoints(args.output_dir)[-1:] if trainer is not None else []
            print(f'pretrain.py: error: {error}' + ''.join(f' The last checkpoint is {x}.' for x in last), file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
