# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""transformers' `Trainer` with what a long run needs: checkpoints that are whole or not there, and a log that tells more."""

from __future__ import annotations

import fcntl
import functools
import json
import re
import resource
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import gather_object
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer

from fla_kdn.models.optim import DecayByNameMixin
from pretraining.health import measure_health
from pretraining.shapes import GIB, costs, is_covered, meta_model, peak_flops

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from typing import IO

    from torch import nn
    from transformers import PreTrainedModel

    from pretraining.data import Batches

# what a checkpoint holds, beside config and tokenizer
WEIGHTS, SCHEDULER, DATA, STATE = 'distcp', 'scheduler.pt', 'data.json', 'trainer_state.json'
# before the name of a checkpoint that is being written, and of one that is being removed
PARTIAL, DISCARDED = 'partial-', 'discarded-'
# which the process that writes to the folder of a run has locked
LOCK = '.lock'
# seconds between attempts to save the end of a run
RETRY_SECONDS = 60


def is_whole(path: Path) -> bool:
    """Whether a checkpoint has all it needs; `.metadata` is written when all processes have written their weights."""
    return all((path / name).exists() for name in (f'{WEIGHTS}/.metadata', SCHEDULER, DATA, STATE))


def checkpoints(folder: str | Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = [path for path in Path(folder).glob('checkpoint-*') if re.fullmatch(r'checkpoint-\d+', path.name)]
    return sorted(filter(is_whole, found), key=lambda path: int(path.name.rpartition('-')[2]))


def tidy(folder: Path) -> None:
    """Make checkpoints of those that were written as their run ended, and remove what is of no use."""
    for path in folder.glob(f'{PARTIAL}checkpoint-*'):
        target = path.with_name(path.name.removeprefix(PARTIAL))
        if is_whole(path) and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f'{DISCARDED}checkpoint-*'):
        shutil.rmtree(path, ignore_errors=True)


def own(folder: Path) -> IO:
    """Make a folder that of this run, as long as the file that is returned is open, and tidy it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open('w')
        try:
            # not flock, which data workers would hold as well
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(f'--output_dir: {folder} is in use by another run; give this one its own.') from None
        except OSError:
            # a file system without locks
            pass
        tidy(folder)
    except OSError as error:
        raise ValueError(f'--output_dir: {folder} cannot be written to: {error}') from None
    return file


def discard(path: Path) -> None:
    """Remove a checkpoint; what is removed in part must not look whole."""
    shutil.rmtree(path.rename(path.with_name(DISCARDED + path.name)), ignore_errors=True)


def export(checkpoint: str | Path, folder: str | Path) -> PreTrainedModel:
    """Write model and tokenizer of a checkpoint into a folder for `from_pretrained`, in fp32."""
    checkpoint, folder = Path(checkpoint), Path(folder)
    if not (checkpoint / WEIGHTS / '.metadata').exists():
        raise ValueError(f'{checkpoint} is not a checkpoint; those of a run are the folders checkpoint-* in its --output_dir.')
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f'{folder} is not empty.')
    config = AutoConfig.from_pretrained(checkpoint)
    # the trainer turns it off
    config.use_cache = True
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    load_weights(model, checkpoint)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return model


def load_weights(model: nn.Module, checkpoint: str | Path) -> None:
    state = {'model': get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=Path(checkpoint, WEIGHTS))
    set_model_state_dict(model, state['model'])


@dataclass
class Save:
    """A checkpoint that is being written: where it will be; when its weights are written, or why they cannot be."""

    folder: Path
    future: Future | None = None
    error: str | None = None

    @property
    def partial(self) -> Path:
        """Where it is until it is whole."""
        return self.folder.with_name(PARTIAL + self.folder.name)


class ConsoleLog(PrinterCallback):
    """Transformers' own has four digits, too few to compare runs by."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_local_process_zero:
            print({key: f'{x:.7g}' if isinstance(x, float) else x for key, x in logs.items() if key != 'total_flos'})


class PretrainingTrainer(DecayByNameMixin, Trainer):
    """
    A `Trainer` on :class:`Batches`.

    Checkpoints are those of `torch.distributed.checkpoint` under FSDP, DDP and on one device, so each can go on from the
    others' and on any number of processes. One is written from a copy in the memory of the host, while training goes on, under
    another name, and renamed when it is whole; if that fails, for instance on a full disk, the next save is the next attempt.
    Before an update with a gradient that is not finite the run stops, and keeps the batch.
    """

    def __init__(self, *args, batches: Batches, settings: dict, owned: IO | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        # the lock of the output folder, on the main process
        self.owned = owned
        if self.pop_callback(PrinterCallback):
            self.add_callback(ConsoleLog)
        self.batches = batches
        # what has to stay the same when the run goes on
        self.settings = settings
        shapes = meta_model(self.model.config)
        self.flops_per_token = costs(shapes, self.args.seq_len).flops_per_token if is_covered(shapes) else None
        self.peak_flops = 1e12 * self.args.peak_tflops if self.args.peak_tflops else peak_flops()
        # those of this step
        self.micro_batches = []
        # of lanes that read more often than others
        self.has_warned = False
        # time and step of the last log
        self.last_log = None
        # the one that is being written
        self.pending: Save | None = None

    def get_train_dataloader(self) -> Batches:
        return self.batches

    # ---- steps

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> torch.autocast:
        # accelerate puts a forward pass under autocast, but not that of FSDP2, which it expects to cast the weights
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16, cache_enabled=cache_enabled)

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
        if self.last_log is None:
            self.last_log = time.perf_counter(), self.state.global_step
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.micro_batches and self.micro_batches[0]['step'] != self.state.global_step:
            self.micro_batches.clear()
        self.micro_batches.append({'step': self.state.global_step, 'inputs': inputs, 'loss': loss})
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> torch.Tensor | float:
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        # the norm is that of all processes: they stop together
        if not torch.isfinite(torch.as_tensor(grad_norm)).all():
            self._stop(float(grad_norm))
        return grad_norm

    def _stop(self, grad_norm: float) -> None:
        self._finish_save()
        step = self.state.global_step + 1
        folder = Path(self.args.output_dir, f'nonfinite-{step}')
        losses = [batch['loss'].item() for batch in self.micro_batches]

        def keep() -> None:
            folder.mkdir(exist_ok=True)
            content = {'micro_batches': self.micro_batches, 'lanes': self.batches.positions}
            torch.save(content, folder / f'process-{self.args.process_index}.pt')

        error = self._attempt(keep)
        kept = f'could not be saved ({error})' if error else f'is in {folder}'
        last = checkpoints(self.args.output_dir)
        raise FloatingPointError(
            f'step {step}: the norm of the gradient is {grad_norm}, the losses of this process are {losses}. The weights were '
            f'not changed. The batch {kept}; the last checkpoint is {last[-1] if last else "none"}. The same command goes on '
            'from there, and comes to the same batch: lower --learning_rate, or start again with another --seed.',
        )

    # ---- log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._finish_save(wait=False)
        step, now = self.state.global_step, time.perf_counter()
        # share of the run; the stream of rows has no end
        self.state.epoch = step / self.state.max_steps
        if 'loss' in logs:
            start, first = self.last_log
            rate = (step - first) * self.args.batch_tokens / (now - start) / self.args.world_size
            logs['tokens'] = step * self.args.batch_tokens
            logs['data_epoch'] = self._data_epoch()
            logs['tokens_per_second_per_gpu'] = rate
            if self.peak_flops and self.flops_per_token:
                logs['mfu'] = rate * self.flops_per_token / self.peak_flops
            if self.args.device.type == 'cuda':
                logs['memory_gib'] = torch.cuda.max_memory_allocated() / GIB
            else:
                logs['memory_gib'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
            logs |= self._health()
            self.last_log = time.perf_counter(), step
        super().log(logs, start_time)

    def _data_epoch(self) -> int:
        """How often a lane has read all its documents, at most."""
        epochs = gather_object([position['epoch'] for position in self.batches.positions.values()])
        least, most = min(epochs), max(epochs)
        if most > least + 1 and self.args.process_index == 0 and not self.has_warned:
            self.has_warned = True
            print(
                f'--data: some lanes have read their documents {most} times, others {least}: files of very different sizes, '
                'of which each lane has as many. Join small ones, or lower --lanes.', file=sys.stderr,
            )
        return most

    def _health(self) -> dict[str, float]:
        """Of one row of the last micro-batch."""
        inputs, length = self.micro_batches[-1]['inputs'], self.args.seq_len
        input_ids, bounds = inputs['input_ids'][:1, :length].to(self.args.device), inputs.get('cu_seqlens')
        if bounds is not None:
            bounds = bounds.to(self.args.device)
            bounds = torch.cat((bounds[bounds < length], bounds.new_tensor([length])))
        with self.compute_loss_context_manager():
            health = measure_health(self.model, input_ids, bounds)
        # a forward pass without a backward leaves weights whole
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return health

    # ---- checkpoints

    def _attempt(self, action: Callable[[], None], on_main_process: bool = False) -> str | None:
        """Run `action` on all processes or the main one; the first error of any, on all of them."""
        error = None
        if self.args.process_index == 0 or not on_main_process:
            try:
                action()
            except (OSError, RuntimeError, CheckpointException) as e:
                # of the processes that failed, one tells
                cause = next(iter(e.failures.values()))[0] if isinstance(e, CheckpointException) else e
                error = f'{type(cause).__name__}: {cause}'
        return next((x for x in gather_object([error]) if x is not None), None)

    def _save_checkpoint(self, model: nn.Module, trial: None = None) -> None:
        start = time.perf_counter()
        self._finish_save()
        self.store_flos()
        positions = {}
        for part in gather_object([self.batches.positions]):
            positions |= part
        self._begin_save(positions)
        if self.state.global_step >= self.state.max_steps:
            while self._finish_save():
                time.sleep(RETRY_SECONDS)
                self._begin_save(positions)
        if self.last_log is not None:
            self.last_log = self.last_log[0] + time.perf_counter() - start, self.last_log[1]

    def _begin_save(self, positions: dict[int, dict]) -> None:
        """Copy what there is to save, and write it while training goes on."""
        save = self.pending = Save(Path(self.args.output_dir, f'checkpoint-{self.state.global_step}'))

        def write_small_parts() -> None:
            shutil.rmtree(save.partial, ignore_errors=True)
            save.partial.mkdir(parents=True)
            torch.save(self.lr_scheduler.state_dict(), save.partial / SCHEDULER)
            (save.partial / DATA).write_text(json.dumps({'settings': self.settings, 'lanes': positions}))
            self.model.config.save_pretrained(save.partial)
            self.processing_class.save_pretrained(save.partial)
            self.state.save_to_json(save.partial / STATE)

        def begin_weights() -> None:
            state = {
                'model': get_model_state_dict(self.model),
                'optimizer': get_optimizer_state_dict(self.model, self._bare_optimizer()),
            }
            save.future = dcp.async_save(state, checkpoint_id=save.partial / WEIGHTS, process_group=self._saving_group)

        save.error = self._attempt(write_small_parts, on_main_process=True) or self._attempt(begin_weights)
        if save.error:
            # where it was begun, a thread waits there for processes that do not come
            self.__dict__.pop('_saving_group', None)

    def _finish_save(self, wait: bool = True) -> str | None:
        """Make a checkpoint of what is written, when it is or, without `wait`, if it is; the error, if there was one."""
        save = self.pending
        if save is None or not (wait or all(gather_object([save.error is not None or save.future.done()]))):
            return None
        self.pending = None

        def make_checkpoint() -> None:
            if save.folder.exists():
                discard(save.folder)
            save.partial.rename(save.folder)
            if self.args.save_total_limit:
                for path in checkpoints(save.folder.parent)[:-self.args.save_total_limit]:
                    discard(path)

        error = save.error or self._attempt(save.future.result) or self._attempt(make_checkpoint, on_main_process=True)
        if error and self.args.process_index == 0:
            is_end = save.folder.name == f'checkpoint-{self.state.max_steps}'
            then = f'The next attempt is in {RETRY_SECONDS} seconds.' if is_end else 'Training goes on, to the next save.'
            print(
                f'{save.folder.name} could not be saved: {error}\n'
                f'Make room in {self.args.output_dir}; the checkpoints before it are as they were. {then}',
                file=sys.stderr,
            )
            shutil.rmtree(save.partial, ignore_errors=True)
        return error

    @functools.cached_property
    def _saving_group(self) -> dist.ProcessGroup | None:
        """A group of processes that no other thread uses, nor the GPUs."""
        return dist.new_group(backend='gloo') if dist.is_initialized() else None

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, 'optimizer', self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_weights(self.model if model is None else model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        # how often to log and to save is this command's, and not the checkpoint's
        self.state.compute_steps(self.args, self.args.max_steps)
        optimizer, scheduler = self._bare_optimizer(), self.lr_scheduler
        # so are learning rate, weight decay and betas
        options = [{key: x for key, x in group.items() if key not in ('params', 'lr')} for group in optimizer.param_groups]
        state = {'optimizer': get_optimizer_state_dict(self.model, optimizer)}
        dcp.load(state, checkpoint_id=Path(checkpoint, WEIGHTS))
        set_optimizer_state_dict(self.model, optimizer, state['optimizer'])
        scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))
        for group, mine in zip(optimizer.param_groups, options, strict=True):
            group.update(mine)
        # all of transformers' schedules but those that follow a metric
        if isinstance(scheduler, LambdaLR):
            scheduler.base_lrs = [group['initial_lr'] for group in optimizer.param_groups]
            for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
                group['lr'] = group['initial_lr'] * factor(scheduler.last_epoch)
            scheduler._last_lr = [group['lr'] for group in optimizer.param_groups]
        self.batches.load_positions(json.loads(Path(checkpoint, DATA).read_text())['lanes'])
