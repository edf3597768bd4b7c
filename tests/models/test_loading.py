# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""How a model comes into being: saved and loaded, of another type, kernel or device, resized, on `meta`, from a preset."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from conftest import assert_close, rel
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from utils import OPTIONS, make_config, make_ids, make_model

import fla_kdn.layers.attn as attn_module
from fla_kdn import KDNConfig, KDNForCausalLM, KDNModel
from fla_kdn.layers import Attention
from fla_kdn.models.kdn.configuration_kdn import CODE_FILE
from fla_kdn.models.kdn.model_card import TAGS
from fla_kdn.models.kdn.presets import PRESETS

HYBRID = OPTIONS['hybrid']
KINDS = [pytest.param(OPTIONS[name], id=name) for name in ('diagonal', 'isotropic', 'hybrid')]
TIED = pytest.mark.parametrize('tied', [False, True], ids=['untied', 'tied'])
IN_FP32 = ('A_log', 'dt_bias', 'prior_precision', 'log_info_scale')


@torch.no_grad()
def logits(model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    return model(ids, **kwargs).logits


def generate(model, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)


def check_same(model, other) -> None:
    """Logits, padded ones too, and generated tokens."""
    ids, mask = make_ids(2, 20), torch.ones(2, 20)
    mask[0, :5] = 0
    assert_close(logits(model.eval(), ids), logits(other, ids), 1e-6, 'logits')
    padded = [logits(m, ids, attention_mask=mask)[mask.bool()] for m in (model, other)]
    assert_close(*padded, 1e-6, 'logits of a padded batch')
    assert torch.equal(generate(model, ids), generate(other, ids))


# ---- weights


@TIED
def test_round_trip_of_a_hybrid(tmp_path, tied):
    model = make_model(**HYBRID, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / 'model.safetensors')
    missing = {name for name in model.state_dict() if name not in saved}
    assert missing == ({'lm_head.weight'} if tied else set()) and saved.keys() <= model.state_dict().keys()
    assert {name for name in saved if name.startswith('model.layers.0.attn.')} == {
        f'model.layers.0.attn.{name}' for name in (
            'q_proj.weight', 'q_proj.bias', 'k_proj.weight', 'k_proj.bias', 'v_proj.weight', 'v_proj.bias', 'o_proj.weight')}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is KDNForCausalLM and not any(info.values()), info
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) == tied
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x), name
    check_same(loaded, model)
    with torch.no_grad():
        loaded.model.embeddings.weight[3] += 1
    assert (rel(loaded.lm_head.weight, model.lm_head.weight) > 1e-2) == tied


@pytest.mark.parametrize(('spelling', 'saved'), [
    *(({name: x}, torch.float32) for name in ('dtype', 'torch_dtype') for x in (torch.bfloat16, 'bfloat16')),
    ({'dtype': 'auto'}, torch.bfloat16),
    ({}, torch.bfloat16),
], ids=str)
@pytest.mark.parametrize('options', KINDS)
def test_types(tmp_path, options, spelling, saved):
    """Of a loaded and of a new model: what is asked for, or that of the checkpoint, but for parameters that stay in fp32."""
    model, ids = make_model(**options).to(saved), make_ids(2, 20)
    model.save_pretrained(tmp_path)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path, **spelling).eval()]
    if saved == torch.float32:
        models.append(AutoModelForCausalLM.from_config(copy.deepcopy(model.config), **spelling))
    for other in models:
        assert other.dtype == torch.bfloat16
        for name, p in other.named_parameters():
            assert p.dtype == (torch.float32 if name.endswith(IN_FP32) else torch.bfloat16), name
        assert logits(other, ids).dtype == torch.bfloat16
    assert_close(logits(models[0], ids).float(), logits(model.float(), ids), 5e-2, 'logits')


@pytest.mark.parametrize('low', [False, True])
@pytest.mark.parametrize('options', KINDS)
def test_low_cpu_mem_usage(tmp_path, options, low):
    model = make_model(**options)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, low_cpu_mem_usage=low)
    assert not any(x.is_meta for x in loaded.state_dict().values())
    check_same(loaded, model)


# ---- kernels of attention


class Calls:
    """In place of transformers' registry of attention functions: the names under which layers ask for one."""

    def __init__(self, monkeypatch):
        self.names = []
        monkeypatch.setattr(attn_module, 'ALL_ATTENTION_FUNCTIONS', self)

    def get_interface(self, name, default):
        self.names.append(name)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, default)
        assert (function is default) == (name == 'eager')
        return function


WAYS = {
    'from_pretrained': lambda path, name: AutoModelForCausalLM.from_pretrained(path, attn_implementation=name),
    'from_config': lambda path, name: AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(path), attn_implementation=name),
    'config': lambda path, name: KDNForCausalLM(make_config(**HYBRID, attn_implementation=name)),
    'set': lambda path, name: set_implementation(KDNForCausalLM.from_pretrained(path), name),
    'base-model': lambda path, name: KDNModel.from_pretrained(path, attn_implementation=name),
}


def set_implementation(model, name: str | None):
    if name is not None:
        model.set_attn_implementation(name)
    return model


@pytest.mark.parametrize('name', [None, 'sdpa', 'eager', 'counted'])
@pytest.mark.parametrize('way', WAYS)
def test_attn_implementation(monkeypatch, tmp_path, way, name):
    """What is asked for reaches every attention layer, sdpa if nothing is, and computes the same."""
    def counted(*args, **kwargs):
        used.append(1)
        return ALL_ATTENTION_FUNCTIONS['sdpa'](*args, **kwargs)

    # in the registry of this test alone
    monkeypatch.setattr(AttentionInterface, '_global_mapping', dict(AttentionInterface._global_mapping))
    AttentionInterface.register('counted', counted)
    model, ids, used = make_model(**HYBRID), make_ids(2, 20), []
    model.save_pretrained(tmp_path)
    want, tokens = logits(model, ids), generate(model, ids)
    other = WAYS[way](tmp_path, name).eval()
    calls = Calls(monkeypatch)
    if way == 'base-model':
        with torch.no_grad():
            got = model.lm_head(other(ids).last_hidden_state)
    else:
        other.load_state_dict(model.state_dict())
        got = logits(other, ids)
    assert other.config._attn_implementation == (name or 'sdpa')
    assert calls.names == [name or 'sdpa'] * 2 and len(used) == 2 * (name == 'counted')
    assert_close(got, want, 1e-5, 'logits')
    if way != 'base-model':
        calls.names.clear()
        assert torch.equal(generate(other, ids), tokens)
        assert set(calls.names) == {name or 'sdpa'}


def test_attn_implementation_is_not_saved(tmp_path):
    """It is a choice of the machine that runs the model."""
    WAYS['config'](None, 'eager').save_pretrained(tmp_path)
    assert 'eager' not in (tmp_path / 'config.json').read_text()
    assert KDNForCausalLM.from_pretrained(tmp_path).config._attn_implementation == 'sdpa'


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('options', KINDS)
def test_unknown_attn_implementation(tmp_path, options, way):
    make_model(**options).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='attn_implementation="fastest"'):
        WAYS[way](tmp_path, 'fastest')


@pytest.mark.parametrize('way', WAYS)
def test_flash_attention_that_is_not_installed(tmp_path, way):
    try:
        import flash_attn  # noqa: F401
        pytest.skip('flash-attn is installed')
    except ImportError:
        pass
    make_model(**HYBRID).save_pretrained(tmp_path)
    with pytest.raises(ImportError, match='(?i)flash'):
        WAYS[way](tmp_path, 'flash_attention_2')


# ---- devices


@pytest.mark.parametrize('device_map', ['auto', 'cpu', {'': 'cpu'}], ids=str)
@pytest.mark.parametrize('options', KINDS)
def test_device_map(tmp_path, options, device_map):
    pytest.importorskip('accelerate')
    model = make_model(**options)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    check_same(loaded.cpu(), model)


def offload(path, device_map, **kwargs) -> KDNForCausalLM:
    return AutoModelForCausalLM.from_pretrained(
        path / 'model', device_map=device_map, offload_folder=path / 'offloaded', **kwargs).eval()


@pytest.mark.parametrize('layer', [0, 1])
@pytest.mark.parametrize('options', [
    *KINDS,
    pytest.param({**HYBRID, 'fuse_swiglu': False, 'fuse_norm': False}, id='hybrid-unfused'),
    pytest.param({'tie_word_embeddings': True, 'learn_info_scale': True}, id='tied'),
])
def test_layer_on_disk(tmp_path, options, layer):
    """Its weights are there while the module that owns them runs, and only then: a module must not compute with those of
    another, whose memory is not initialised."""
    pytest.importorskip('accelerate')
    model = make_model(**options)
    model.save_pretrained(tmp_path / 'model')
    on_disk = f'model.layers.{layer}'
    device_map = {f'model.layers.{i}': 'cpu' for i in range(model.config.num_hidden_layers)}
    device_map |= {'model.embeddings': 'cpu', 'model.norm': 'cpu', 'lm_head': 'cpu', on_disk: 'disk'}
    loaded = offload(tmp_path, device_map)
    assert {name for name, p in loaded.named_parameters() if p.is_meta} == {
        name for name, _ in model.named_parameters() if name.startswith(f'{on_disk}.')}
    check_same(loaded, model)
    got, want = (m(make_ids(1, 9), output_uncertainty=True).uncertainty for m in (loaded, model.eval()))
    assert [x is None for x in got] == [x is None for x in want] and len(want) == model.config.num_hidden_layers
    for x, y in zip(got, want, strict=True):
        if x is not None:
            assert_close(x.read_variance, y.read_variance, 1e-6)


@pytest.mark.parametrize('options', KINDS)
def test_more_weights_than_memory(tmp_path, options):
    """What does not fit goes to disk; no layer is divided."""
    pytest.importorskip('accelerate')
    model = make_model(**{'num_hidden_layers': 3, **options})
    model.save_pretrained(tmp_path / 'model')
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    loaded = offload(tmp_path, 'auto', max_memory={'cpu': int(0.6 * size)})
    places = loaded.hf_device_map
    assert set(places.values()) == {'cpu', 'disk'}
    assert not [name for name in places if re.match(r'model\.layers\.\d+\.', name)], places
    check_same(loaded, model)


@pytest.mark.parametrize('how', ['apply', 'init_weights'])
def test_initial_values_of_a_hybrid_from_meta(how):
    """Every value is drawn anew, from the distribution of a model made at once; nothing lives outside the parameters."""
    config = make_config(**HYBRID, num_v_heads=16)
    torch.manual_seed(0)
    want = KDNForCausalLM(config)
    with torch.device('meta'):
        model = KDNForCausalLM(config)
    assert all(x.is_meta for x in model.state_dict().values()) and not list(model.buffers())
    model.to_empty(device='cpu')
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(math.nan)
    if how == 'apply':
        model.apply(model._init_weights)
    else:
        model.init_weights()
    layers = [layer.attn for layer in model.model.layers if isinstance(layer.attn, Attention)]
    assert len(layers) == 2
    for layer in layers:
        for name, p in layer.named_parameters():
            if name.endswith('bias'):
                assert not p.any(), name
            else:
                n = p.numel()
                assert abs(p.mean()) < 5 * 0.02 / n ** 0.5 and abs(p.std() / 0.02 - 1) < 5 / (2 * n) ** 0.5, name
    assert rel(layers[0].q_proj.weight, layers[1].q_proj.weight) > 1
    for (name, p), (_, q) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert p.isfinite().all() and p.dtype == q.dtype and (p.std() > 0) == (q.std() > 0), name
        assert abs(p.mean() - q.mean()) <= 6 * q.std() / p.numel() ** 0.5 and p.std() <= 2.5 * q.std(), name
    assert abs(model(make_ids(2, 30), labels=make_ids(2, 30)).loss - math.log(50)) < 0.2


# ---- vocabulary


@pytest.mark.parametrize('size', [64, 40])
@TIED
@pytest.mark.parametrize('options', KINDS)
def test_resize_token_embeddings(tmp_path, options, tied, size):
    model, ids = make_model(**options, tie_word_embeddings=tied), make_ids(2, 20).clamp(max=39)
    old = {name: x.clone() for name, x in model.state_dict().items()}
    want, kept = logits(model, ids), min(size, 50)
    assert model.resize_token_embeddings(size) is model.get_input_embeddings()
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    assert model.config.vocab_size == model.vocab_size == model.lm_head.out_features == size
    for name, x in model.state_dict().items():
        if name in ('lm_head.weight', 'model.embeddings.weight'):
            assert x.shape == (size, 32) and torch.equal(x[:kept], old[name][:kept]) and x.isfinite().all()
        else:
            assert torch.equal(x, old[name]), name
    output = model(ids, labels=ids)
    assert output.logits.shape == (2, 20, size) and torch.equal(output.logits[..., :kept], want[..., :kept])
    output.loss.backward()
    assert model.lm_head.weight.grad.shape == (size, 32) and all(p.grad is not None for p in model.parameters())
    if size > 50:
        assert logits(model, torch.full_like(ids, size - 1)).isfinite().all()

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == size
    assert torch.equal(logits(loaded.eval(), ids), logits(model, ids))
    assert generate(loaded, ids).max() < size


# ---- the folder of a checkpoint


def read_card(path) -> ModelCard:
    """Its front matter is YAML between two rules, of nothing but known fields."""
    card = ModelCard.load(path)
    assert card.content.startswith('---\n') and card.content.count('\n---\n') == 1 and '---' not in card.text
    assert card.data.to_dict() == {'library_name': 'transformers', 'pipeline_tag': 'text-generation', 'tags': TAGS}
    assert all(isinstance(tag, str) and re.fullmatch(r'[a-z0-9-]+', tag) for tag in card.data.tags)
    return card


@pytest.mark.parametrize('options', KINDS)
def test_contents_of_the_folder(tmp_path, options):
    model = make_model(**options)
    for name in (tmp_path / 'a', str(tmp_path / 'b' / 'c')):
        model.save_pretrained(name)
    for path in (tmp_path / 'a', tmp_path / 'b' / 'c'):
        assert {file.name for file in path.iterdir()} == {
            'README.md', 'config.json', 'generation_config.json', 'model.safetensors', 'auto_kdn.py'}
    path = tmp_path / 'a'
    config = json.loads((path / 'config.json').read_text())
    assert config['auto_map'] == {
        'AutoConfig': 'auto_kdn.KDNConfig',
        'AutoModel': 'auto_kdn.KDNModel',
        'AutoModelForCausalLM': 'auto_kdn.KDNForCausalLM',
    }
    assert config['model_type'] == 'kdn' and config['architectures'] == ['KDNForCausalLM']
    assert (path / 'auto_kdn.py').read_text() == CODE_FILE.read_text()

    card = read_card(path / 'README.md')
    attention = sum(isinstance(layer.attn, Attention) for layer in model.model.layers)
    assert f'{sum(p.numel() for p in model.parameters()):,} parameters' in card.text
    assert f'KDN layers: {len(model.model.layers) - attention} ({model.config.covariance} covariance)' in card.text
    assert ('softmax attention' in card.text) == (attention > 0)
    assert attention == 0 or f'softmax attention: {attention}' in card.text
    card.save(tmp_path / 'copy.md')
    assert read_card(tmp_path / 'copy.md').content == card.content


def test_card_of_sharded_weights(tmp_path):
    """DeepSpeed empties parameters, keeps their shapes beside them, and gives the weights to be saved."""
    model = make_model()
    state, count = {name: x.clone() for name, x in model.state_dict().items()}, sum(p.numel() for p in model.parameters())
    for p in model.parameters():
        p.ds_shape, p.data = p.shape, p.data.new_empty(0)
    model.save_pretrained(tmp_path, state_dict=state)
    assert f'{count:,} parameters' in read_card(tmp_path / 'README.md').text


def test_code_of_the_card(tmp_path):
    """Runs as it stands, once the folder is named."""
    model = make_model(**HYBRID, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    (code,) = re.findall('```python\n(.*?)```', (tmp_path / 'README.md').read_text(), re.DOTALL)
    assert code.count('this folder or repository') == 1
    found = {}
    exec(code.replace('this folder or repository', str(tmp_path)), found)
    check_same(found['model'], model)


def test_a_card_that_is_there_stays(tmp_path):
    model = make_model()
    (tmp_path / 'README.md').write_text('of its owner')
    for _ in range(2):
        model.save_pretrained(tmp_path)
    assert (tmp_path / 'README.md').read_text() == 'of its owner'
    KDNForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path / 'other')
    read_card(tmp_path / 'other' / 'README.md')


def test_folder_of_another_process(tmp_path):
    """Of many that save one model, the main one writes."""
    make_model().save_pretrained(tmp_path, is_main_process=False)
    # before 5.23 transformers has each one write its weights
    assert not [file for file in tmp_path.iterdir() if file.suffix != '.safetensors']
    shutil.rmtree(tmp_path)
    make_model().config.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {'config.json', 'auto_kdn.py'}


def test_a_configuration_is_pushed_with_its_code_file(tmp_path, monkeypatch):
    uploads = []

    def upload(self, folder, *args, **kwargs):
        uploads.append({file.name for file in Path(folder).iterdir()})

    monkeypatch.setattr(PreTrainedConfig, '_upload_modified_files', upload)
    monkeypatch.setattr(huggingface_hub.HfApi, 'create_repo', lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id))
    make_model().config.save_pretrained(str(tmp_path / 'mine'), push_to_hub=True)
    assert uploads == [{'config.json', 'auto_kdn.py'}]


def test_tags_are_not_shared():
    first, second = make_model(), make_model()
    for model in (first, first.model):
        assert model.model_tags == TAGS
        model.add_model_tags(['mine', TAGS[0]])
    assert first.model_tags == first.model.model_tags == [*TAGS, 'mine']
    assert second.model_tags == second.model.model_tags == make_model().model_tags == TAGS
    assert 'mine' not in TAGS and KDNForCausalLM.model_tags is None and KDNModel.model_tags is None


# ---- presets


@pytest.mark.parametrize('size,layers,parameters,spread', [
    ('tiny', 2, 0.12e6, 2e-2), ('0.1b', 12, 101e6, 1.3e-3), ('0.4b', 12, 401e6, 8e-4), ('750m', 12, 752e6, 3e-4),
    ('1.3b', 18, 1302e6, 3e-4),
])
def test_presets(size, layers, parameters, spread):
    """Every other layer attends to a window where the name says so, and all of a size have as many parameters."""
    names = [f'kdn{swa}-{size}-{covariance}' for swa in ('', '-swa') for covariance in ('isotropic', 'diagonal')]
    assert [name for name in PRESETS if f'-{size}-' in name] == names
    sizes = {}
    for name in names:
        config = KDNConfig.from_preset(name)
        assert config.covariance == name.split('-')[-1]
        with torch.device('meta'):
            model = KDNForCausalLM(config)
        mixers = [layer.attn for layer in model.model.layers]
        assert len(mixers) == layers
        attention = [i for i, mixer in enumerate(mixers) if isinstance(mixer, Attention)]
        assert attention == (list(range(1, layers, 2)) if '-swa-' in name else [])
        assert all(mixers[i].window_size == (64 if size == 'tiny' else 2048) for i in attention)
        outside = {id(model.model.embeddings.weight), id(model.lm_head.weight)}
        sizes[name] = sum(p.numel() for p in model.parameters() if id(p) not in outside)
    assert max(sizes.values()) / min(sizes.values()) - 1 < spread, sizes
    assert all(abs(x / parameters - 1) < 3e-2 for x in sizes.values()), sizes


def test_options_of_a_preset(tmp_path):
    config = KDNConfig.from_preset('kdn-swa-1.3b-diagonal', vocab_size=99, fuse_norm=False, attn=None)
    assert (config.vocab_size, config.fuse_norm, config.attn) == (99, False, None)
    changed = KDNConfig.from_preset('kdn-swa-1.3b-diagonal')
    changed.attn['layers'].clear()
    changed.attn['window_size'] = 1
    config = KDNConfig.from_preset('kdn-swa-1.3b-diagonal')
    assert config.attn['layers'] == list(range(1, 18, 2)) and config.attn['window_size'] == 2048
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == config.to_dict() | {'_name_or_path': str(tmp_path)}


@pytest.mark.parametrize('name', ['kdn-1.3b', 'KDN-1.3B-diagonal', ''])
def test_unknown_preset(name):
    with pytest.raises(ValueError, match=f'{name!r}; there are kdn-tiny-isotropic'):
        KDNConfig.from_preset(name)


def test_loading_warns_of_nothing(tmp_path):
    make_model(**HYBRID).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        AutoModelForCausalLM.from_pretrained(tmp_path)
