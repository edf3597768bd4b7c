# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""What `examples/pretrain.py` is made of: rows of documents, shapes and their costs, the health of KDN, and bad input."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
import torch
from conftest import assert_close
from fla.models import Mamba2Config
from pyarrow import parquet
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'examples'))

import pretrain  # noqa: E402
from pretraining import trainer as trainer_module  # noqa: E402
from pretraining.data import Batches, Lane, byte_tokenizer, collate, find_files, load_documents  # noqa: E402
from pretraining.health import layer_health, measure_health  # noqa: E402
from pretraining.shapes import (  # noqa: E402
    PRESETS,
    SIZES,
    costs,
    is_covered,
    make_config,
    meta_model,
    peak_flops,
    token_budget,
)
from pretraining.trainer import PretrainingTrainer  # noqa: E402

from fla_kdn import KalmanDeltaNet  # noqa: E402
from fla_kdn.ops.kdn.gain import kdn_gain  # noqa: E402
from fla_kdn.ops.kdn.inputs import noise  # noqa: E402

SEQ_LEN = 32
FILES = 3


def make_documents() -> list[list[str]]:
    """Texts of each file, all different; one of a file is empty, and some are longer than a row."""
    rng = random.Random(0)
    texts = [[f'{file}.{i} ' + 'x' * rng.randint(0, 80) for i in range(21 + file)] for file in range(FILES)]
    return [['', *x] for x in texts]


@pytest.fixture(params=['parquet', 'jsonl', 'txt'])
def data(request, tmp_path) -> Path:
    folder = tmp_path / 'data'
    folder.mkdir()
    for file, texts in enumerate(make_documents()):
        path, rows = folder / f'{file}.{request.param}', [{'id': i, 'text': x} for i, x in enumerate(texts)]
        if request.param == 'parquet':
            parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
        elif request.param == 'jsonl':
            path.write_text('\n'.join(map(json.dumps, rows)))
        else:
            path.unlink(missing_ok=True)
            for i, text in enumerate(texts):
                path.with_stem(f'{file}-{i}').write_text(text)
    return folder


def make_lanes(data: Path, lanes: int, process: int = 0, processes: int = 1, seed: int = 0) -> list[Lane]:
    documents, _ = load_documents(str(data), None, 'train', 'text')
    return [
        Lane(documents, byte_tokenizer(), 'text', SEQ_LEN, block_size=4, seed=seed, index=i, lanes=lanes)
        for i in range(process, lanes, processes)
    ]


def take(batches: Batches, count: int) -> list[dict[str, torch.Tensor]]:
    iterator = iter(batches)
    return [next(iterator) for _ in range(count)]


def same(got: list[dict], want: list[dict]) -> bool:
    return all(torch.equal(x[name], y[name]) for x, y in zip(got, want, strict=True) for name in y)


# ---- rows


@pytest.mark.parametrize('lanes', [1, 4, 6])
def test_each_document_once_in_an_epoch(data, lanes):
    """Of all lanes together. The rows of a lane are its documents, one after the other, in an order that the seed makes."""
    tokenizer, orders = byte_tokenizer(), []

    def documents(lane: Lane, epoch: int) -> list[str]:
        return [text for _, _, block in lane._blocks(epoch, lane.position) for text in block.texts if text]

    for seed in (0, 1):
        order = []
        for lane in make_lanes(data, lanes, seed=seed):
            epochs = [documents(lane, epoch) for epoch in range(2)]
            assert epochs[0] != epochs[1]
            want = [x for texts in epochs for text in texts for x in [*tokenizer(text)['input_ids'], tokenizer.eos_token_id]]
            first = [0]
            for text in [*epochs[0], *epochs[1]]:
                first.append(first[-1] + len(text) + 1)
            for i, (row, starts) in enumerate(islice(lane, len(want) // SEQ_LEN)):
                span = range(i * SEQ_LEN, (i + 1) * SEQ_LEN)
                assert row.tolist() == want[span.start:span.stop]
                assert starts == sorted({0, *(x - span.start for x in first if x in span)})
            order += epochs[0]
        assert sorted(order) == sorted(text for file in make_documents() for text in file if text)
        orders.append(order)
    assert orders[0] != orders[1]


def test_order_does_not_depend_on_workers(data):
    want = take(Batches(make_lanes(data, 6), 6, 'documents', 0), 8)
    for workers in (1, 2, 3):
        assert same(take(Batches(make_lanes(data, 6), 6, 'documents', workers), 8), want)


def test_steps_do_not_depend_on_processes(data):
    """Two steps of 12 rows, on one process, on two and on three."""
    steps = {}
    for processes in (1, 2, 3):
        count = 12 // processes
        parts = [take(Batches(make_lanes(data, 6, i, processes), count, 'concatenated', 0), 2) for i in range(processes)]
        steps[processes] = [sorted(row for part in parts for row in part[step]['input_ids'].tolist()) for step in range(2)]
    assert steps[1] == steps[2] == steps[3] and steps[1][0] != steps[1][1]


@pytest.mark.parametrize('lanes', [2, 6])
def test_rows_go_on_where_they_stopped(data, lanes):
    batches, want, positions = Batches(make_lanes(data, lanes), lanes, 'documents', 0), [], []
    for batch in take_with(batches, 40, positions):
        want.append(batch)
    for stop in (0, 3, 11, 24, 37):
        again = Batches(make_lanes(data, lanes), lanes, 'documents', 0)
        again.load_positions(json.loads(positions[stop]))
        assert same(take(again, 40 - stop - 1), want[stop + 1:]), stop
    # through workers that have read ahead
    batches = Batches(make_lanes(data, lanes), lanes, 'documents', 2)
    take(batches, 12)
    assert json.loads(json.dumps(batches.positions)) == json.loads(positions[11])


def take_with(batches: Batches, count: int, positions: list[str]):
    iterator = iter(batches)
    for _ in range(count):
        batch = next(iterator)
        positions.append(json.dumps(batches.positions))
        yield batch


@pytest.mark.parametrize('model', ['kdn-swa-tiny-diagonal', 'kda-tiny'])
def test_nothing_of_a_document_reaches_another(model):
    """The loss of a batch is that of its pieces one by one; of concatenated rows it is that of the rows."""
    torch.manual_seed(0)
    # weights so large that a leak shows
    model = AutoModelForCausalLM.from_config(make_config(model, {'initializer_range': 0.3}))
    rows, starts = torch.randint(264, (2, 24)).int(), [[0, 5, 6, 20], [0, 9]]
    losses = {}
    for packing in ('documents', 'concatenated'):
        batch = collate([row.numpy() for row in rows], starts, packing)
        with torch.no_grad():
            losses[packing] = model.train()(**batch).loss.item()
        bounds = [[*x, 24] for x in starts] if packing == 'documents' else [[0, 24]] * 2
        pieces = [row[a:b].long()[None] for row, x in zip(rows, bounds, strict=True) for a, b in zip(x, x[1:], strict=False)]
        total = sum(model(input_ids=x, labels=x).loss.item() * (x.shape[1] - 1) for x in pieces if x.shape[1] > 1)
        assert losses[packing] == pytest.approx(total / sum(x.shape[1] - 1 for x in pieces), rel=1e-5)
    assert abs(losses['documents'] / losses['concatenated'] - 1) > 1e-3


def test_blocks_and_lanes_have_orders_of_their_own(tmp_path):
    (tmp_path / 'a.jsonl').write_text('\n'.join(json.dumps({'text': str(i)}) for i in range(64)))
    documents, _ = load_documents(str(tmp_path), None, 'train', 'text')
    orders = set()
    for index in range(2):
        lane = Lane(documents, byte_tokenizer(), 'text', 32, block_size=16, seed=0, index=index, lanes=2)
        for _, _, block in lane._blocks(0, lane.position):
            rank = sorted(map(int, block.texts))
            orders.add(tuple(rank.index(int(x)) for x in block.texts))
    assert len(orders) == 4


def test_hidden_files_are_no_data(tmp_path):
    for name in ('a.txt', '.b.txt', '.cache/c.txt'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('x')
    assert find_files(str(tmp_path)) == [str(tmp_path / 'a.txt')]


def test_fingerprint_tells_files_of_one_name_apart(tmp_path):
    prints = []
    for text in ('a', 'ab', 'ab'):
        (tmp_path / 'a.txt').write_text(text)
        prints.append(load_documents(str(tmp_path), None, 'train', 'text')[1])
    assert prints[0] != prints[1] == prints[2]


# ---- shapes


@pytest.mark.parametrize('size,spread', [('1.3b', 3e-4), ('750m', 3e-4), ('0.4b', 8e-4), ('0.1b', 1.3e-3), ('tiny', 2e-2)])
def test_models_of_a_size_have_as_many_parameters(size, spread):
    names = [name for name in PRESETS if f'-{size}' in name]
    counts = []
    for name in names:
        config = make_config(name)
        assert config.intermediate_size % 8 == 0
        assert all(getattr(config, field) == value for field, value in SIZES[size].items())
        counts.append(costs(meta_model(config), 4096).non_embedding)
    assert len(counts) == 5 and max(counts) / min(counts) - 1 < spread, dict(zip(names, counts, strict=True))


def test_published_shapes():
    for name, parameters in {'kdn-1.3b-isotropic': 1_449_848_592, 'kdn-1.3b-diagonal': 1_449_806_796}.items():
        assert costs(meta_model(make_config(name)), 4096).parameters == parameters
    assert token_budget('kdn-swa-1.3b-diagonal') == 100e9 and token_budget('kda-750m') == 50e9
    assert token_budget('kdn-0.4b-diagonal') is None
    assert make_config('kda-tiny', {'vocab_size': 300}).vocab_size == 300


@pytest.mark.parametrize('name', ['kdn-swa-tiny-diagonal', 'kdn-swa-tiny-isotropic', 'kda-tiny'])
def test_state_bytes(name):
    """What a cache holds after more tokens than the window has."""
    model = AutoModelForCausalLM.from_config(make_config(name)).to(torch.bfloat16).eval()
    with torch.no_grad():
        cache = model(torch.arange(100)[None], use_cache=True).past_key_values

    def size(x) -> int:
        if isinstance(x, torch.Tensor):
            return x.numel() * x.element_size()
        return sum(map(size, x.values() if isinstance(x, dict) else x)) if isinstance(x, dict | list | tuple) else 0

    assert costs(model, 4096).state_bytes == sum(size(cache[i]) for i in range(len(cache)))


def test_flops():
    model, T, D = meta_model(make_config('kdn-swa-tiny-diagonal')), 4096, 64
    parameters = sum(p.numel() for p in model.parameters()) - 264 * D
    # means over the tokens, one by one
    visible = sum(min(t + 1, 64) for t in range(T)) / T
    assert costs(model, T).flops_per_token == pytest.approx(6 * parameters + 18 * 2 * 32 * 32 + 12 * D * visible)
    tied = meta_model(make_config('kda-tiny', {'tie_word_embeddings': True}))
    assert costs(tied, T).flops_per_token == 6 * sum(p.numel() for p in tied.parameters()) + 2 * 18 * 2 * 32 * 32


def test_memory_goes_down_with_what_saves_it():
    cost = costs(meta_model(make_config('kdn-750m-diagonal')), 4096)

    def memory(gpus=8, parallel='fsdp', checkpointing=False, accumulates=True, rows=32768):
        return cost.memory(rows, gpus, parallel, checkpointing, accumulates)

    assert memory(gpus=64) < memory() < memory(parallel='ddp') and memory(gpus=1) > 16 * cost.parameters
    assert memory(checkpointing=True) < memory() and memory(accumulates=False) < memory() and memory(rows=4096) < memory()


def test_dry_run(capsys):
    assert pretrain.main(['--model', 'kdn-1.3b-isotropic', '--dry_run', '--tokens_per_second', '50000']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any('1,449,848,592' in line and '1,302,392,592' in line for line in lines)
    assert any('190,734 steps of 524,288' in line for line in lines)
    days = {int(line.split()[0]): float(line.split()[1]) for line in lines[-4:]}
    assert days[8] == pytest.approx(100e9 / 50000 / 8 / 86400, abs=0.06)
    # a run on 64 GPUs would be refused
    assert pretrain.main(['--model=kdn-tiny-isotropic', '--dry_run', '--batch_tokens=65536', '--train_tokens=1e6']) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip() == '64   cannot share the 16 rows of a step'


def test_memory_by_hand():
    cost = costs(meta_model(make_config('kdn-tiny-diagonal')), 64)
    D, F, HV, K, V, N, layers = 64, 152, 2, 32, 32, cost.parameters, 2
    block = 12 * D + 4 * F + 4 * (2 * HV * K + HV * V) + 12 * HV * K + 4 * HV * 64 + 6 * HV * V
    assert (cost.block_activations, cost.activations, cost.logits) == (block, layers * block, 6 * 264)
    assert cost.memory(100, 1, 'fsdp', False, False) == 18 * N + 100 * (layers * block + cost.logits)
    assert cost.memory(100, 8, 'ddp', True, False) == 20 * N + 2 * cost.block + 100 * (4 * D * layers + block + cost.logits)


def test_peak_flops(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    for name, flops in {'NVIDIA H100 PCIe': 756e12, 'NVIDIA H100 80GB HBM3': 989e12, 'Some Card': None}.items():
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda name=name: name)
        assert peak_flops() == flops


def test_recipe(tmp_path):
    """The paper's, by default."""
    data = write(tmp_path / 'good.jsonl', '\n'.join(json.dumps({'text': 'abc ' * 40}) for _ in range(200)))
    argv = ['--model', 'kdn-swa-tiny-diagonal', '--data', data, '--tokenizer', 'bytes', '--output_dir', str(tmp_path / 'run')]
    args, = HfArgumentParser(pretrain.PretrainingArguments).parse_args_into_dataclasses([*argv, '--train_tokens', '1e9'])
    assert (args.seq_len, args.batch_tokens, args.max_grad_norm, args.lanes) == (4096, 524288, 1.0, 64)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 128
    trainer = pretrain.prepare(args)
    assert args.max_steps == 1907
    trainer.create_optimizer_and_scheduler(args.max_steps)
    decayed, undecayed = trainer.optimizer.param_groups
    assert decayed['betas'] == (0.9, 0.95) and (decayed['weight_decay'], undecayed['weight_decay']) == (0.1, 0)
    names = {p: name for name, p in trainer.model.named_parameters()}
    assert all(p.ndim > 1 for p in decayed['params']) and len(decayed['params']) + len(undecayed['params']) == len(names)
    endings = {names[p].rpartition('.')[2] for p in undecayed['params']}
    assert {'A_log', 'dt_bias', 'prior_precision', 'bias'} < endings
    rate = trainer.lr_scheduler.lr_lambdas[0]
    assert rate(0) == 0 and rate(10) == 0.5 and rate(20) == 1 and rate(1907) == pytest.approx(0.1)
    assert decayed['initial_lr'] == 4e-4


# ---- health


@pytest.mark.parametrize('options', [
    {}, {'learn_info_scale': True, 'info_scale': 7.0}, {'fixed_r': 0.3, 'safe_gate': False}, {'lower_bound': -0.5},
])
@pytest.mark.parametrize('covariance', ['diagonal', 'isotropic'])
def test_layer_health(covariance, options):
    """Against the gain stage of the op: from its whitened keys and its beta in the first, its beta in the second variant."""
    torch.manual_seed(0)
    layer = KalmanDeltaNet(32, head_dim=8, num_heads=2, num_v_heads=4, covariance=covariance, **options).eval()
    with torch.no_grad():
        # some decays at the floor
        layer.dt_bias.uniform_(-4, 2)
        x, bounds = torch.randn(1, 50, 32), torch.tensor([0, 13, 50])
        k = layer.k_conv1d(x=layer.k_proj(x), cu_seqlens=bounds)[0].unflatten(-1, (2, 8))
        g = layer.f_proj(x).unflatten(-1, (4, 8))
        arguments = layer.noise(x)
        gain = kdn_gain(
            k, k, g, **arguments, initial_cov=layer.prior_covariance(), covariance=covariance, use_qk_l2norm_in_kernel=True,
            info_scale=layer.log_info_scale.exp() if layer.learn_info_scale else layer.info_scale,
            A_log=layer.A_log, dt_bias=layer.dt_bias, safe_gate=layer.safe_gate, lower_bound=layer.lower_bound,
            cu_seqlens=bounds,
        )
        got = layer_health(layer, x, bounds)
        norm = gain.k.square().sum(-1).repeat_interleave(4 // gain.k.shape[2], dim=2)
        r = noise(arguments.pop('omega'), arguments.pop('r'), **arguments)[1]
        strength = gain.beta * norm
        # the noise that the strength leaves: n = r s / (1 - s)
        n = r * strength / (1 - strength)
        assert_close(got[0], (n / (r + n)).mean(), 1e-5, 'write strength')
        if covariance == 'diagonal':
            unit = k / k.norm(dim=-1, keepdim=True)
            p_hat = (gain.k / unit.repeat_interleave(2, dim=2)).square()
            for i, extreme in enumerate((p_hat.amin(), p_hat.amax()), start=1):
                assert_close(got[i], extreme, 1e-3, 'covariance')
        raw = -layer.A_log.exp()[:, None] * torch.nn.functional.softplus(g + layer.dt_bias.view(4, 8))
        share = (raw <= (layer.lower_bound or -5)).float().mean() if layer.safe_gate else torch.zeros(())
        assert torch.equal(got[3], share) and (share > 0.01 or not layer.safe_gate)


def test_health_of_a_model():
    """Of its layers, on a pass as in evaluation, with documents apart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config('kdn-tiny-diagonal', {'lower_bound': -0.5})).train()
    ids, bounds, modes = torch.randint(264, (1, 40)), torch.tensor([0, 9, 40]), []
    with torch.no_grad():
        hidden = model.model(ids, cu_seqlens=bounds, output_hidden_states=True).hidden_states
        blocks = zip(model.model.layers, hidden, strict=False)
        strength, low, high, floor = torch.stack([layer_health(b.attn, b.attn_norm(x), bounds) for b, x in blocks]).T
    handle = model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    health = measure_health(model, ids, bounds)
    handle.remove()
    want = {
        'write_strength': strength.mean(), 'covariance_min': low.min(), 'covariance_max': high.max(),
        'decay_floor_share': floor.mean(),
    }
    assert health == {f'kdn_{name}': pytest.approx(x.item(), rel=1e-5) for name, x in want.items()}
    assert health['kdn_decay_floor_share'] > 0 and modes == [False]
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())
    hybrid = AutoModelForCausalLM.from_config(make_config('kdn-swa-tiny-isotropic'))
    assert measure_health(hybrid, ids, bounds).keys() == health.keys()
    assert measure_health(AutoModelForCausalLM.from_config(make_config('kda-tiny')), ids) == {}


def test_rate(monkeypatch):
    """Of one of two GPUs; logging and saving do not count."""
    clock = iter((10., 12., 20., 23., 28.)).__next__
    trainer = object.__new__(PretrainingTrainer)
    trainer.__dict__ |= {
        '_finish_save': lambda wait=True: None, '_begin_save': lambda positions: None, 'store_flos': lambda: None,
        '_health': dict, '_data_epoch': lambda: 0, 'batches': SimpleNamespace(positions={}), 'peak_flops': 1000.,
            'flops_per_token': 2.,
        'last_log': (5., 0), 'state': SimpleNamespace(global_step=10, max_steps=20, epoch=0.),
        'args': SimpleNamespace(batch_tokens=100, world_size=2, device=torch.device('cpu')),
    }
    monkeypatch.setattr(trainer_module.time, 'perf_counter', clock)
    monkeypatch.setattr(trainer_module, 'gather_object', lambda x: x)
    monkeypatch.setattr(trainer_module.Trainer, 'log', lambda *_: None)
    logs = {'loss': 1.}
    trainer.log(logs)
    # 10 steps in 5 seconds, of which each GPU had a half
    assert logs['tokens_per_second_per_gpu'] == 100 and logs['mfu'] == pytest.approx(0.2) and logs['tokens'] == 1000
    # bytes, where the system counts in KiB: a process with PyTorch has more than 50 MiB
    assert 0.05 < logs['memory_gib'] < 100
    # logging ended at 12; a save from 20 to 23; again at 28, 10 steps later
    trainer._save_checkpoint(None)
    trainer.state.global_step, logs = 20, {'loss': 1.}
    monkeypatch.setattr(trainer_module.time, 'perf_counter', lambda: 28.)
    trainer.log(logs)
    assert logs['tokens_per_second_per_gpu'] == pytest.approx(1000 / 13 / 2)


# ---- bad input

# eight documents
GOOD = '\n'.join(json.dumps({'text': 'abc ' * 40}) for _ in range(8))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def run(folder: Path, *flags: str, **options: str) -> int:
    options = {
        'model': 'kdn-tiny-diagonal', 'tokenizer': 'bytes', 'output_dir': str(folder / 'run'), 'seq_len': '64',
        'batch_tokens': '256', 'max_steps': '1', 'dataloader_num_workers': '0', 'disable_tqdm': 'true', **options,
    }
    return pretrain.main([*flags, *(x for name, value in options.items() for x in (f'--{name}', value))])


@pytest.mark.parametrize('options,message', [
    ({'data': '/no/such/file.jsonl'}, "--data: no file with one of the endings .parquet, .jsonl"),
    ({'data': './*.parquet'}, "--data: no file with one of the endings"),
    ({'data': 'EMPTY'}, '--data: lane 0 cannot be read on: no text for it: none at all, or fewer documents than lanes; lower'),
    ({'data': 'NOTHING'}, 'has no documents.'),
    ({'data': 'BLANK'}, '--data: lane 0 cannot be read on: no text for it'),
    ({'data': 'FEW'}, '--data: lane 2 cannot be read on: no text for it'),
    ({'data': 'LISTS'}, "must be text, its first value is of type list"),
    ({'data': 'nothing/'}, "--data: no file with one of the endings .parquet, .jsonl"),
    ({'data': 'BROKEN'}, 'could not be read'),
    ({'data': 'OTHER'}, "--data: '"),
    ({'data': 'GOOD', 'text_column': 'body'}, "has no column 'body', it has text"),
    ({'data': 'GOOD', 'config_overrides': '{"vocab_size": 100}'}, "has 258 tokens, the model's vocabulary 100; give the"),
    ({'data': 'GOOD', 'tokenizer': '/no/such'}, "--tokenizer: '/no/such' is not a folder or a name on the hub"),
    ({'data': 'GOOD', 'batch_tokens': '250'}, '--batch_tokens 250 is not a number of rows of --seq_len 64 for each of 1 pro'),
    ({'data': 'GOOD', 'per_device_train_batch_size': '3'}, '--per_device_train_batch_size 3 does not divide the 4 rows'),
    ({'data': 'GOOD', 'dataloader_num_workers': '3'}, '4 lanes, the common part of --lanes and the 4 rows of a step, cannot'),
    *(
        ({'data': 'GOOD', name: value}, f'--{name} {value} must be ')
        for name, value in (
            ('seq_len', '0'), ('batch_tokens', '-256'), ('per_device_train_batch_size', '-1'), ('lanes', '0'),
            ('shuffle_block', '0'), ('dataloader_num_workers', '-1'), ('save_total_limit', '-1'), ('data_seed', '-3'),
            ('train_tokens', 'nan'), ('tokens_per_second', '-3'), ('peak_tflops', 'inf'), ('save_steps', '0'),
            ('max_steps', '0'),
        )
    ),
    ({'data': 'GOOD', 'train_tokens': '1000'}, '--max_steps and --train_tokens both say how long'),
    ({'data': 'GOOD', 'gradient_accumulation_steps': '7'}, '--gradient_accumulation_steps follows from --batch_tokens'),
    ({'data': 'GOOD', 'num_train_epochs': '1'}, '--num_train_epochs follows from --train_tokens'),
    ({'data': 'GOOD', 'config_overrides': '{bad'}, "--config_overrides '{bad' is no JSON"),
    ({'data': 'GOOD', 'lr_scheduler_kwargs': '[1]'}, "--lr_scheduler_kwargs [1] must be fields with their values"),
    ({'data': 'GOOD', 'config_overrides': '{"info_scal": 1}'}, '--config_overrides: KDNConfig has no info_scal.'),
    ({'data': 'GOOD', 'config_overrides': '{"info_scale": "x"}'}, "--config_overrides {'info_scale': 'x'}: '<' not supported"),
    ({'data': 'GOOD', 'model': __file__}, f"--model: {__file__!r} has no config that transformers can read: "),
    ({'data': 'GOOD', 'max_steps': '-1'}, '--train_tokens: say how many tokens'),
    ({'data': 'GOOD', 'max_steps': '-1', 'train_tokens': '100'}, '--train_tokens 100 is less than one step'),
    ({'data': 'GOOD', 'model': 'kdn-2b'}, "--model: 'kdn-2b' is neither a file with a config nor a preset; presets: kdn-tiny"),
    ({'data': 'GOOD', 'resume_from_checkpoint': '/no/such'}, '--resume_from_checkpoint: /no/such is not a whole checkpoint'),
    ({}, '--data is missing'),
    ({'model': ''}, '--model is missing; presets: kdn-tiny'),
    ({'data': 'GOOD', 'output_dir': '/proc/no'}, '--output_dir: /proc/no cannot be written to: '),
    ({'data': 'GOOD', 'output_dir': __file__}, f'--output_dir: {__file__} cannot be written to: '),
    ({'data': 'GOOD', 'tokenizer': ''}, '--tokenizer is missing'),
])
def test_bad_input(options, message, tmp_path, capsys):
    files = {
        'EMPTY': ('empty.txt', ''),
        'NOTHING': ('nothing.jsonl', ''),
        'FEW': ('few.jsonl', '{"text": "a"}\n{"text": "b"}'),
        'BLANK': ('blank.jsonl', '{"text": ""}\n{"text": null}'),
        'BROKEN': ('broken.parquet', 'no parquet'),
        'LISTS': ('lists.jsonl', '{"text": ["a", "b"]}'),
        'OTHER': ('other.csv', 'text\nx'),
        'GOOD': ('good.jsonl', GOOD),
    }
    if options.get('data') in files:
        name, text = files[options['data']]
        options = {**options, 'data': write(tmp_path / name, text)}
    assert run(tmp_path, **options) == 2
    error = capsys.readouterr().err
    assert 'pretrain.py: error: ' in error and message in error


@pytest.mark.parametrize('workers', ['0', '1'])
def test_a_broken_line_far_into_the_data(tmp_path, capsys, workers):
    (tmp_path / 'data').mkdir()
    write(tmp_path / 'data' / '0.jsonl', GOOD)
    write(tmp_path / 'data' / '1.jsonl', '{"text": "a"}\n{"text": ')
    # a seed with which the good file comes first
    options = {'lanes': '1', 'data_seed': '1', 'shuffle_block': '8', 'max_steps': '9', 'save_steps': '1'}
    assert run(tmp_path, data=str(tmp_path / 'data'), dataloader_num_workers=workers, **options) == 2
    error = capsys.readouterr().err
    assert '--data: lane 0 cannot be read on: ' in error and 'JSON parse error' in error
    assert f'The last checkpoint is {tmp_path / "run" / "checkpoint-"}' in error


def test_interrupted(tmp_path, capsys, monkeypatch):
    def interrupt(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain.PretrainingTrainer, 'training_step', interrupt)
    data = write(tmp_path / 'good.jsonl', GOOD)
    assert run(tmp_path, data=data) == 130
    assert capsys.readouterr().err.endswith('pretrain.py: interrupted; the same command goes on from the last checkpoint\n')


def test_other_settings_do_not_go_on(tmp_path, capsys):
    """And the same ones, on a run that is at its end, have nothing to do."""
    data = write(tmp_path / 'good.jsonl', GOOD)
    assert run(tmp_path, data=data) == 0
    for options, message in (
        ({'seq_len': '32'}, 'seq_len was 64 and is now 32'),
        ({'model': 'kda-tiny'}, 'weights was '),
        ({'optim': 'adafactor'}, 'optim was adamw_torch_fused and is now adafactor'),
        # models of the same weights
        ({'config_overrides': '{"info_scale": 0.5}'}, 'config.info_scale was None and is now 0.5'),
    ):
        assert run(tmp_path, data=data, **options) == 2
        assert f'checkpoint-1 was made with other settings: {message}' in capsys.readouterr().err
    assert run(tmp_path, data=data) == 0
    assert 'checkpoint-1 is the end of this run' in capsys.readouterr().out


def test_fields_that_were_overridden_are_to_stay_so(tmp_path, capsys):
    data = write(tmp_path / 'good.jsonl', GOOD)
    assert run(tmp_path, data=data, config_overrides='{"norm_eps": 0.5}') == 0
    assert run(tmp_path, data=data) == 2
    assert 'config.norm_eps was 0.5 and is now 1e-06' in capsys.readouterr().err


def test_a_folder_is_of_one_run(tmp_path, capsys):
    data = write(tmp_path / 'good.jsonl', GOOD)
    code = (
        'import sys; from pathlib import Path; from pretraining.trainer import own; '
        'file = own(Path(sys.argv[1])); print(flush=True); input()'
    )
    command = [sys.executable, '-c', code, str(tmp_path / 'run')]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(pretrain.__file__).parent) as other:
        other.stdout.readline()
        assert run(tmp_path, data=data) == 2
        assert f'--output_dir: {tmp_path / "run"} is in use by another run' in capsys.readouterr().err
        other.kill()
    assert run(tmp_path, data=data) == 0


def test_processes_that_see_other_things(monkeypatch):
    settings = {'data': 'a', 'seq_len': 64}
    told = {
        'process 1: no file': [(None, settings), ('no file', None)],
        'process 1 has another data than process 0': [(None, settings), (None, {**settings, 'data': 'b'})],
    }
    for message, parts in told.items():
        monkeypatch.setattr(pretrain, 'gather_object', lambda _, parts=parts: parts)
        with pytest.raises(ValueError, match=message):
            pretrain.agree(*parts[0])
    monkeypatch.setattr(pretrain, 'gather_object', lambda x: 2 * x)
    pretrain.agree(None, settings)


def test_lanes_that_read_more_often_than_others(capsys):
    trainer = object.__new__(PretrainingTrainer)
    trainer.__dict__ |= {'has_warned': False, 'args': SimpleNamespace(process_index=0)}
    for epochs, most, warned in (([2, 3], 3, False), ([2, 4], 4, True), ([2, 5], 5, False)):
        trainer.batches = SimpleNamespace(positions={i: {'epoch': epoch} for i, epoch in enumerate(epochs)})
        assert trainer._data_epoch() == most
        assert ('some lanes have read their documents 4 times, others 2' in capsys.readouterr().err) == warned


def test_words_that_name_tokens_are_text():
    ids = byte_tokenizer()('a<eos>b<pad>', add_special_tokens=False)['input_ids']
    assert len(ids) == 12 and min(ids) > 1


@pytest.mark.parametrize('name', ['a[1].jsonl', '[x]/a.jsonl'])
def test_names_that_look_like_patterns(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"text": "a"}')
    for data in (path, path.parent):
        documents, _ = load_documents(str(data), None, 'train', 'text')
        assert list(documents) == [{'text': 'a'}]


def test_parquet_without_rows(tmp_path):
    """As Spark writes it."""
    for name, texts in (('0', []), ('1', ['a'])):
        parquet.write_table(pyarrow.table({'text': pyarrow.array(texts, pyarrow.string())}), tmp_path / f'{name}.parquet')
    documents, _ = load_documents(str(tmp_path), None, 'train', 'text')
    assert list(documents) == [{'text': 'a'}]
    (tmp_path / '1.parquet').unlink()
    with pytest.raises(ValueError, match='has no documents'):
        load_documents(str(tmp_path), None, 'train', 'text')


def test_bad_exports(tmp_path, capsys):
    assert pretrain.main(['export', str(tmp_path), str(tmp_path / 'out')]) == 2
    assert 'is not a checkpoint' in capsys.readouterr().err
    assert pretrain.main(['export', str(tmp_path)]) == 2
    assert 'export takes a checkpoint and a new folder' in capsys.readouterr().err


def test_documents_need_a_model_that_tells_them_apart(tmp_path, capsys):
    LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=264,
    ).save_pretrained(tmp_path / 'llama')
    data = write(tmp_path / 'good.jsonl', GOOD)
    assert run(tmp_path, data=data, model=str(tmp_path / 'llama')) == 2
    assert 'which LlamaForCausalLM does not know; use --packing concatenated' in capsys.readouterr().err
    # takes cu_seqlens, and passes over them
    Mamba2Config(
        hidden_size=32, num_heads=8, head_dim=8, state_size=8, num_hidden_layers=1, vocab_size=264,
    ).save_pretrained(tmp_path / 'mamba2')
    assert run(tmp_path, data=data, model=str(tmp_path / 'mamba2')) == 2
    assert 'which Mamba2ForCausalLM does not know' in capsys.readouterr().err


def test_costs_that_are_not_known(tmp_path, capsys):
    """A model of other blocks is not told to cost nothing, nor its log to have an mfu."""
    LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=264,
    ).save_pretrained(tmp_path / 'llama')
    assert pretrain.main([f'--model={tmp_path / "llama"}', '--dry_run', '--train_tokens=1e6']) == 0
    told = capsys.readouterr().out
    assert 'are not known for LlamaForCausalLM' in told and 'parameters' in told and 'state' not in told
    assert is_covered(meta_model(make_config('kdn-swa-tiny-diagonal'))) and is_covered(meta_model(make_config('kda-tiny')))


def test_presets_are_all_there():
    assert len(PRESETS) == 5 * len(SIZES)
