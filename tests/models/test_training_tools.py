# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""Training with what people train with: transformers' `Trainer`, packed batches, PEFT, TRL, `torch.compile`, autocast.

The task is to count: each word is the number after the one before it.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import assert_close, rel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch._dynamo.backends.debugging import aot_eager
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)
from utils import OPTIONS, greedy, make_config, make_ids, make_model

from fla_kdn import KDNForCausalLM
from fla_kdn.models.optim import DecayByNameMixin

VARIANTS = ['diagonal', 'isotropic']
LOSSES = {
    'torch-loss': {'fuse_cross_entropy': False},
    'fused-loss': {'fuse_cross_entropy': True},
    'fused-linear-loss': {'fuse_cross_entropy': False, 'fuse_linear_cross_entropy': True},
}
NAMED_LOSSES = [pytest.param(options, id=name) for name, options in LOSSES.items()]
FIRST_WORD, LAST_WORD = 3, 49
# short ones fit into a convolution, and those of one token have no target
LENGTHS = [7, 1, 12, 2, 3, 20, 5, 4]
ONE_UPDATE = {'max_steps': 1, 'optim': 'sgd', 'learning_rate': 1.0, 'max_grad_norm': 0.0}


def new_model(seed: int = 0, **options) -> KDNForCausalLM:
    """A tiny model with the parameters that training starts from."""
    torch.manual_seed(seed)
    return KDNForCausalLM(make_config(pad_token_id=0, **options)).train()


def make_tokenizer(padding_side: str = 'left') -> PreTrainedTokenizerFast:
    """Words are the numbers of their own tokens."""
    vocab = {'<pad>': 0, '<unk>': 1, '</s>': 2, **{str(i): i for i in range(FIRST_WORD, LAST_WORD + 1)}}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token='<unk>'))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token='<pad>', unk_token='<unk>', eos_token='</s>', padding_side=padding_side)


def count(start: int, length: int) -> list[int]:
    return [FIRST_WORD + (start + t) % (LAST_WORD + 1 - FIRST_WORD) for t in range(length)]


def make_data(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Sequences of these lengths. The first token is marked as no target: older versions of `Trainer` count it as one."""
    sequences = [count(11 * i, length) for i, length in enumerate(lengths)]
    return [{'input_ids': ids, 'labels': [-100, *ids[1:]]} for ids in sequences]


class Recorder(DecayByNameMixin, Trainer):
    """Keeps the loss of each micro-batch, as it goes into the gradient."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses = []

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right."""
    T = max(len(row['input_ids']) for row in batch)
    fill = {'input_ids': 0, 'labels': -100}
    tensors = {name: torch.tensor([row[name] + [x] * (T - len(row[name])) for row in batch]) for name, x in fill.items()}
    lengths = torch.tensor([[len(row['input_ids'])] for row in batch])
    return {**tensors, 'attention_mask': (torch.arange(T) < lengths).long()}


def make_trainer(model, path, data=None, collator=collate, **options) -> Recorder:
    args = TrainingArguments(str(path), **{
        'use_cpu': True,
        'report_to': 'none',
        'disable_tqdm': True,
        'save_strategy': 'no',
        'max_steps': 12,
        'per_device_train_batch_size': 4,
        'per_device_eval_batch_size': 4,
        'learning_rate': 1e-2,
        'lr_scheduler_type': 'constant',
        **options,
    })
    data = make_data([16] * 16) if data is None else data
    return Recorder(model, args, data_collator=collator, train_dataset=data, eval_dataset=data)


def train(*args, **kwargs) -> list[float]:
    trainer = make_trainer(*args, **kwargs)
    trainer.train()
    return trainer.losses


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check_learning(losses: list[float]) -> None:
    assert all(map(math.isfinite, losses))
    assert abs(losses[0] - math.log(50)) < 0.4 and losses[-1] < losses[0] - 0.5, losses


def loss_and_gradients(model, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {'loss': loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def check(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tol: float = 2e-5) -> None:
    """Vectors get a tolerance of their own: their gradients are sums over all tokens whose terms nearly cancel."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert_close(got[name], x, 10 * tol if x.ndim == 1 else tol, name)


# ---- Trainer


@pytest.mark.parametrize('covariance', VARIANTS)
def test_trainer(covariance, tmp_path):
    """With gradient checkpointing, and without; and that the gradients of every parameter arrive."""
    losses = {}
    for checkpointing in (False, True):
        model, calls = new_model(covariance=covariance), []
        model.model.layers[0].attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        before = parameters(model)
        losses[checkpointing] = train(model, tmp_path, gradient_checkpointing=checkpointing)
        assert len(calls) == 12 * (1 + checkpointing)
        unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
        assert not unchanged, unchanged
        check_learning(losses[checkpointing])
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


@pytest.mark.parametrize('covariance', VARIANTS)
def test_trainer_in_bf16(covariance, tmp_path):
    losses = [train(new_model(covariance=covariance), tmp_path, bf16=bf16) for bf16 in (False, True)]
    check_learning(losses[1])
    assert losses[1] != losses[0], 'nothing was rounded'
    assert losses[1] == pytest.approx(losses[0], rel=5e-2)


@pytest.mark.parametrize('covariance', VARIANTS)
def test_gradient_accumulation(covariance, tmp_path):
    """Four micro-batches with unequal numbers of targets are one batch: they are divided by the number in all of them."""
    data = make_data([2, 3, 20, 8])
    changes, losses = [], []
    for size, steps in ((4, 1), (1, 4)):
        model = make_model(covariance=covariance)
        before = parameters(model)
        losses.append(train(
            model,
            tmp_path,
            data,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            **ONE_UPDATE,
        ))
        changes.append({name: p - before[name] for name, p in parameters(model).items()})
    assert [len(x) for x in losses] == [1, 4]
    assert sum(losses[1]) == pytest.approx(losses[0][0], rel=1e-5)
    check(changes[1], changes[0], 1e-4)
    means = [make_model(covariance=covariance)(**collate([row])).loss.item() for row in data]
    assert abs(sum(means) / 4 / losses[0][0] - 1) > 1e-3, 'the mean of the means would have done'


@pytest.mark.parametrize('covariance', VARIANTS)
def test_resume(covariance, tmp_path):
    options = {'max_steps': 6, 'save_strategy': 'steps', 'save_steps': 3, 'weight_decay': 0.1, 'lr_scheduler_type': 'linear'}
    whole = make_trainer(new_model(covariance=covariance), tmp_path, **options)
    whole.train()
    # other parameters, which the checkpoint has to replace
    rest = make_trainer(new_model(seed=1, covariance=covariance), tmp_path, **options)
    rest.train(resume_from_checkpoint=str(tmp_path / 'checkpoint-3'))
    assert len(whole.losses) == 6 and len(rest.losses) == 3
    assert rest.losses == pytest.approx(whole.losses[3:], rel=1e-6)
    check(parameters(rest.model), parameters(whole.model), 1e-6)


@pytest.mark.parametrize('covariance', VARIANTS)
def test_evaluation_and_prediction(covariance, tmp_path):
    model, data = make_model(covariance=covariance), make_data([16] * 6)
    # not by default: it is switched off in the configuration of a model that is trained
    trainer = make_trainer(model, tmp_path, data, use_cache=True)
    batch = collate(data)
    with torch.no_grad():
        want = model(**batch)
    assert want.past_key_values is not None, 'there is no cache that could be gathered'
    assert trainer.evaluate()['eval_loss'] == pytest.approx(want.loss.item(), rel=1e-5)
    output = trainer.predict(data)
    assert_close(torch.from_numpy(output.predictions), want.logits, 1e-5, 'predictions')
    assert torch.equal(torch.from_numpy(output.label_ids), batch['labels'])
    assert output.metrics['test_loss'] == pytest.approx(want.loss.item(), rel=1e-5)


@pytest.mark.parametrize('covariance', VARIANTS)
def test_pipeline(covariance, tmp_path):
    """One prompt, and two of which one is padded on the left."""
    model, tokenizer = make_model(covariance=covariance), make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generator = pipeline('text-generation', model=str(tmp_path), device='cpu')
    prompts = ['5 6 7 8 9', '40 12 33 7 8 20 21']
    ids = [torch.tensor([list(map(int, prompt.split()))]) for prompt in prompts]
    expected = [tokenizer.decode(greedy(model, x, 8)[0, -8:], skip_special_tokens=True).split() for x in ids]
    assert all(len(words) > 5 for words in expected)
    for batch_size in (1, 2):
        output = generator(prompts, batch_size=batch_size, max_new_tokens=8, do_sample=False, return_full_text=False)
        assert [x[0]['generated_text'].split() for x in output] == expected


def test_language_modeling_collator(tmp_path):
    tokenizer = make_tokenizer(padding_side='right')
    data = [{'input_ids': row['input_ids']} for row in make_data(LENGTHS)]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)(data)
    assert batch['attention_mask'][:, -1].sum() == 1
    model = make_model(pad_token_id=0)
    got = loss_and_gradients(model, **batch)
    check(got, loss_and_gradients(model, **collate(make_data(LENGTHS))))


# ---- packed sequences


def pack(data: list[dict[str, list[int]]], spelling: str) -> dict:
    """A batch without padding, whose sequences are told apart in one way."""
    flatten = DataCollatorWithFlattening(
        return_position_ids=spelling in ('position_ids', 'all'),
        return_flash_attn_kwargs=spelling in ('cu_seq_lens', 'all'),
        return_seq_idx=spelling == 'all',
    )
    batch = flatten(data)
    if spelling == 'cu_seqlens':
        lengths = torch.tensor([0, *(len(row['input_ids']) for row in data)])
        batch['cu_seqlens'] = lengths.cumsum(0).int()
    return batch


@pytest.mark.parametrize('spelling', ['position_ids', 'cu_seq_lens', 'cu_seqlens', 'all'])
@pytest.mark.parametrize('variant', [*VARIANTS, 'hybrid'])
def test_packed_sequences(variant, spelling):
    """Loss and gradients of the sequences one by one, in every spelling of their boundaries; without one they differ."""
    model, data = make_model(**OPTIONS[variant]).train(), make_data(LENGTHS)
    num_items = sum(LENGTHS) - len(LENGTHS)
    want = {}
    for row in data:
        if len(row['input_ids']) > 1:
            inputs = {name: torch.tensor([x]) for name, x in row.items()}
            for name, x in loss_and_gradients(model, **inputs, num_items_in_batch=num_items).items():
                want[name] = want.get(name, 0) + x
    batch = pack(data, spelling)
    assert batch['input_ids'].shape == (1, sum(LENGTHS))
    check(loss_and_gradients(model, **batch), want)

    mixed = loss_and_gradients(model, **pack(data, 'none'))
    assert all(rel(mixed[name], x) > 1e-3 for name, x in want.items()), 'a leak would not show'


@pytest.mark.parametrize('spelling', ['position_ids', 'cu_seq_lens', 'cu_seqlens'])
def test_packed_sequences_do_not_see_the_one_before(spelling):
    """Nor do the convolutions: logits of a sequence stay, whatever it is packed behind."""
    model = make_model().eval()
    batches = [
        pack([{'input_ids': first}, {'input_ids': count(20, 6)}], spelling) for first in (count(0, 9), count(33, 9))
    ]
    one, two = ({name: x for name, x in batch.items() if name != 'labels'} for batch in batches)
    assert not torch.equal(one['input_ids'], two['input_ids'])
    with torch.no_grad():
        got = [model(**batch).logits[:, 9:] for batch in (one, two)]
        want = model(torch.tensor([count(20, 6)])).logits
    assert_close(got[0], got[1], 1e-6, 'logits behind another sequence')
    assert_close(got[0], want, 1e-5, 'logits of a packed sequence')


@pytest.mark.parametrize('return_flash_attn_kwargs', [False, True], ids=['position-ids', 'flash-attn-kwargs'])
def test_trainer_without_padding(return_flash_attn_kwargs, tmp_path):
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=return_flash_attn_kwargs)
    losses, changes = [], []
    for collator in (collate, flatten):
        model = make_model()
        before = parameters(model)
        losses.append(train(model, tmp_path, make_data(LENGTHS), collator, per_device_train_batch_size=8, **ONE_UPDATE))
        changes.append({name: p - before[name] for name, p in parameters(model).items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    check(changes[1], changes[0], 1e-4)


# ---- adapters


@pytest.mark.parametrize('targets', [['q_proj', 'k_proj', 'v_proj', 'o_proj'], 'all-linear'], ids=['attention', 'all-linear'])
@pytest.mark.parametrize('covariance', VARIANTS)
def test_adapters(covariance, targets, tmp_path):
    """On a model loaded in bf16, whose fp32 parameters stay as they are."""
    peft = pytest.importorskip('peft')
    new_model(covariance=covariance, learn_info_scale=True).save_pretrained(tmp_path / 'model')

    def load():
        return AutoModelForCausalLM.from_pretrained(tmp_path / 'model', dtype=torch.bfloat16)

    torch.manual_seed(0)
    model = peft.get_peft_model(load(), peft.LoraConfig(r=8, lora_alpha=32, target_modules=targets, task_type='CAUSAL_LM'))
    adapted = {name.split('.lora_')[0].split('.')[-1] for name, p in model.named_parameters() if p.requires_grad}
    if targets == 'all-linear':
        assert adapted >= {'q_proj', 'o_proj', 'r_proj', 'gate_proj', 'down_proj'} and 'lm_head' not in adapted
    else:
        assert adapted == set(targets)
    before = parameters(model)
    losses = train(model, tmp_path, max_steps=30)
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.3, losses
    for name, p in model.named_parameters():
        assert p.requires_grad == ('lora_' in name) == (not torch.equal(p, before[name])), name
        kept = name.endswith(('A_log', 'dt_bias', 'prior_precision', 'log_info_scale')) or 'lora_' in name
        assert p.dtype == (torch.float32 if kept else torch.bfloat16), name

    ids = make_ids(2, 20)
    model = model.eval().float()
    with torch.no_grad():
        want = model(ids).logits
        assert rel(load().eval().float()(ids).logits, want) > 1e-2
        model.save_pretrained(tmp_path / 'adapter')
        loaded = peft.PeftModel.from_pretrained(load().float(), tmp_path / 'adapter').eval()
        assert torch.equal(loaded(ids).logits, want)
        merged = model.merge_and_unload()
        assert type(merged) is KDNForCausalLM and not any('lora_' in name for name, _ in merged.named_parameters())
        assert_close(merged(ids).logits, want, 1e-5, 'logits of the merged model')


# ---- TRL


@pytest.mark.parametrize('batches', ['padded', 'padding-free', 'packed', 'wrapped'])
@pytest.mark.parametrize('covariance', VARIANTS)
def test_sft(covariance, batches, tmp_path):
    """And a batch has the loss of its sequences one by one, or, if cut from one long text, of its rows."""
    trl, datasets = pytest.importorskip('trl'), pytest.importorskip('datasets')
    lengths = [5, 16, 9, 12, 16, 3, 8, 14]
    texts = [' '.join(map(str, count(11 * i, length))) for i, length in enumerate(lengths * 2)]
    args = trl.SFTConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to='none',
        disable_tqdm=True,
        save_strategy='no',
        logging_steps=1,
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type='constant',
        max_length=None if batches == 'padding-free' else 32,
        padding_free=batches == 'padding-free',
        packing=batches in ('packed', 'wrapped'),
        packing_strategy='wrapped' if batches == 'wrapped' else 'bfd',
    )
    model = new_model(covariance=covariance)
    trainer = trl.SFTTrainer(
        model, args, train_dataset=datasets.Dataset.from_dict({'text': texts}), processing_class=make_tokenizer())
    batch = next(iter(trainer.get_train_dataloader()))
    ids, labels = batch['input_ids'], batch['labels']
    assert ids.shape[0] == (1 if batches in ('padding-free', 'packed') else 4)
    with torch.no_grad():
        got = trainer.compute_loss(model, dict(batch))
        if 'position_ids' in batch:
            starts = (batch['position_ids'][0] == 0).nonzero().flatten().tolist()
            assert len(starts) >= 4
            rows = [slice(a, b) for a, b in zip(starts, [*starts[1:], None], strict=True)]
            rows = [(ids[:, row], labels[:, row]) for row in rows]
        else:
            rows = [(i[m][None], x[m][None]) for i, x, m in zip(ids, labels, batch['attention_mask'].bool(), strict=True)]
        loss = sum(F.cross_entropy(model(i).logits[0, :-1], x[0, 1:], reduction='sum') for i, x in rows)
    assert_close(got, loss / (labels[:, 1:] != -100).sum(), 1e-5, 'loss')

    trainer.train()
    check_learning([log['loss'] for log in trainer.state.log_history if 'loss' in log])


# ---- torch.compile


def storages(values) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in values if isinstance(x, torch.Tensor)]


class Graphs:
    """A backend of `torch.compile` that counts the graphs compiled, those that run, and the projections in them.

    No graph may end in two views of one new tensor: PyTorch's cache of graphs brings the second back with wrong shapes.
    """

    def __init__(self):
        self.compiled = self.run = self.projections = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        self.compiled += 1
        projections = sum(node.target is F.linear for node in module.graph.nodes)
        compiled = aot_eager(module, inputs)

        def run(*args):
            self.run += 1
            self.projections += projections
            outputs = compiled(*args)
            given = storages(args)
            made = [x for x in storages(outputs) if x not in given]
            assert len(set(made)) == len(made), module.print_readable(print_output=False)
            return outputs

        return run


@pytest.mark.parametrize('covariance', VARIANTS)
def test_compile(covariance):
    """Each op and each fused module breaks the graph, as in FLA's models: 24 graphs a layer, and 3 around the layers.

    What is between them is compiled, all layers share it, and a deeper model compiles no more.
    """
    torch._dynamo.reset()
    graphs, ids = Graphs(), make_ids(2, 40)
    runs = {}
    for num_layers in (2, 3):
        model = make_model(covariance=covariance, num_hidden_layers=num_layers).train()
        want = model(ids, labels=ids).logits.detach().clone(), loss_and_gradients(model, input_ids=ids, labels=ids)
        compiled = torch.compile(model, backend=graphs)
        graphs.run = graphs.projections = 0
        logits = compiled(ids, labels=ids).logits.detach().clone()
        runs[num_layers] = graphs.run
        # all but `down_proj`, which is part of a fused module, and the head
        projections = sum(isinstance(module, nn.Linear) for module in model.modules()) - num_layers - 1
        assert graphs.projections == projections, f'{projections - graphs.projections} projections were not compiled'
        assert_close(logits, want[0], 1e-6, 'logits')
        got = loss_and_gradients(compiled, input_ids=ids, labels=ids)
        check({name.removeprefix('_orig_mod.'): x for name, x in got.items()}, want[1])
        if num_layers == 2:
            distinct = graphs.compiled
    torch._dynamo.reset()
    assert 0 < runs[3] - runs[2] <= 24 and runs[2] <= 2 * 24 + 3, runs
    assert graphs.compiled == distinct


@pytest.mark.parametrize('use_cache', [False, True])
def test_layers_share_graphs_in_inference(use_cache):
    """Also with a cache, which each layer asks for its own state."""
    compiled = []
    for num_layers in (2, 4):
        torch._dynamo.reset()
        graphs = Graphs()
        model = make_model(num_hidden_layers=num_layers).eval()
        with torch.no_grad():
            want = model(make_ids(2, 40), use_cache=use_cache).logits
            got = torch.compile(model, backend=graphs)(make_ids(2, 40), use_cache=use_cache).logits
        assert_close(got, want, 1e-6, 'logits')
        compiled.append(graphs.compiled)
    torch._dynamo.reset()
    assert compiled[0] == compiled[1] > 0


# ---- losses


@pytest.mark.parametrize('num_items', [None, 5, torch.tensor(0)], ids=['mean', 'accumulated', 'nothing-accumulated'])
@pytest.mark.parametrize('loss', NAMED_LOSSES)
@pytest.mark.parametrize('covariance', VARIANTS)
def test_nothing_to_learn(covariance, loss, num_items):
    """All labels ignored, as in prompts cut before their answers: no loss and no gradient, and neither is NaN.

    `Trainer` passes the number of targets in all micro-batches, which may be 0.
    """
    model, ids = make_model(covariance=covariance, **loss).train(), make_ids(2, 20)
    inputs = {'input_ids': ids, 'labels': torch.full_like(ids, -100), 'num_items_in_batch': num_items}
    for name, x in loss_and_gradients(model, **inputs).items():
        assert (x == 0).all(), name
    assert loss_and_gradients(model, input_ids=ids, labels=ids)['loss'] > 1


@pytest.mark.parametrize('loss', NAMED_LOSSES)
@pytest.mark.parametrize('covariance', VARIANTS)
def test_logits_in_training(covariance, loss):
    model, ids = make_model(covariance=covariance, **loss), make_ids(2, 20)
    with torch.no_grad():
        want = model.eval()(ids).logits
    output = model.train()(ids)
    assert output.loss is None and output.logits.requires_grad and output.past_key_values is None
    assert_close(output.logits, want, 1e-5, 'logits')


# ---- low precision


@pytest.mark.parametrize('autocast', [torch.bfloat16, torch.float16], ids=['autocast-bf16', 'autocast-fp16'])
@pytest.mark.parametrize('weights', [torch.bfloat16, torch.float16, torch.float32], ids=['bf16', 'fp16', 'fp32'])
@pytest.mark.parametrize('covariance', VARIANTS)
def test_autocast(covariance, weights, autocast):
    """Tolerances are twice the worst error of six seeds at the most, of all gradients taken together."""
    model, ids = make_model(covariance=covariance).train(), make_ids(2, 70)
    logits = model(ids).logits.detach()
    want = loss_and_gradients(model, input_ids=ids, labels=ids)
    model.to(weights)
    with torch.autocast('cpu', dtype=autocast):
        output = model(ids).logits
        got = loss_and_gradients(model, input_ids=ids, labels=ids)
    assert output.dtype == autocast
    tolerances = (4e-2, 2e-3, 0.2) if torch.bfloat16 in (weights, autocast) else (6e-3, 3e-4, 2e-2)
    for name, x in got.items():
        assert x.isfinite().all() and x.any(), name
    assert_close(output.float(), logits, tolerances[0], 'logits')
    assert_close(got.pop('loss').float(), want.pop('loss'), tolerances[1], 'loss')
    flat = [torch.cat([x.float().flatten() for x in gradients.values()]) for gradients in (got, want)]
    assert_close(*flat, tolerances[2], 'gradients')
