# Copyright (c) 2023-2026, Songlin Yang, Yu Zhang, Zhiyuan Li
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
# For a list of all contributors, visit:
#   https://github.com/fla-org/flash-linear-attention/graphs/contributors

"""
A page on what a KDN model makes of a text: which tokens surprised it, how sure it is of what it reads, how strongly it writes.

    python -m fla_kdn.inspect MODEL --text "the text"          or --file FILE, or the text on standard input
    python -m fla_kdn.inspect MODEL OTHER --file FILE          two models, or two variants, side by side

`inspect/index.html` holds everything and needs no other file; its pictures are beside it as PNGs.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from fla.models.cache_utils import Cache
from transformers import AutoModelForCausalLM, AutoTokenizer

import fla_kdn  # noqa: F401

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# of each token, layer and head: what it is called, and what it means
MEASURES = {
    'surprise': 'surprise: −log likelihood of the value, per channel (nats)',
    'read': 'read standard deviation: how unsure the read-out is',
    'write': 'write strength: share of the innovation that is written',
}
# of the heat maps: from dark to bright, readable in grey
COLOURS = 'magma'


class Trace(NamedTuple):
    """What a model made of a text."""

    name: str
    tokens: list[str]
    # of each token given those before it, in nats; 0 for the first
    loss: torch.Tensor
    layers: list[int]
    # by name, [layers, HV, T]
    values: dict[str, torch.Tensor]
    # after the last token, sorted, [layers, HV, K or 1]
    covariance: torch.Tensor


@torch.no_grad()
def trace(path: str, text: str, max_tokens: int, device: str) -> Trace:
    """Run a model over a text once."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).to(device).eval()
    if model.config.model_type != 'kdn':
        raise ValueError(f'MODEL: {path} is of type {model.config.model_type!r}; only KDN tracks uncertainty.')
    ids = tokenizer(text, return_tensors='pt').input_ids[:, :max_tokens].to(device)
    if not ids.shape[1]:
        raise ValueError('the text has no tokens')
    cache = Cache()
    output = model(ids, past_key_values=cache, use_cache=True, output_uncertainty='log_likelihood')
    layers = [i for i, x in enumerate(output.uncertainty) if x is not None]
    if not layers:
        raise ValueError(f'MODEL: {path} has no KDN layer.')

    def of_layers(value) -> torch.Tensor:
        return torch.stack([value(i, output.uncertainty[i])[0].T for i in layers]).float().cpu()

    values = {
        'surprise': of_layers(lambda i, x: -x.log_likelihood / model.model.layers[i].attn.head_v_dim),
        'read': of_layers(lambda i, x: x.read_variance.sqrt()),
        'write': of_layers(lambda i, x: x.write_strength),
    }
    loss = torch.nn.functional.cross_entropy(output.logits[0, :-1].float(), ids[0, 1:], reduction='none')
    cov = torch.stack([cache[i]['recurrent_state'][1][0].view(values['write'].shape[1], -1) for i in layers])
    return Trace(
        name=Path(path).name or path,
        tokens=[tokenizer.decode([i]) for i in ids[0].tolist()],
        loss=torch.cat((loss.new_zeros(1), loss)).cpu(),
        layers=layers,
        values=values,
        covariance=cov.float().cpu().sort(-1, descending=True).values,
    )


# ---- pictures


def heat_maps(traces: list[Trace]) -> Figure:
    """A row for each head, those of a layer together, over the tokens; a column for each model, with one scale for all."""
    from matplotlib.figure import Figure

    rows = max(x.values['write'].shape[0] * x.values['write'].shape[1] for x in traces)
    figure = Figure(figsize=(6.5 * len(traces) + 1, min(18, 1.2 + len(MEASURES) * max(2., 0.12 * rows))), layout='constrained')
    axes = figure.subplots(len(MEASURES), len(traces), squeeze=False)
    for row, (measure, title) in zip(axes, MEASURES.items(), strict=True):
        every = torch.cat([x.values[measure].flatten() for x in traces])
        # `quantile` takes no more
        every = every[::math.ceil(every.numel() / 2 ** 24)]
        low, high = every.quantile(0.01), every.quantile(0.99)
        for axis, x in zip(row, traces, strict=True):
            layers, heads, T = x.values[measure].shape
            image = axis.imshow(
                x.values[measure].view(-1, T), aspect='auto', interpolation='nearest', cmap=COLOURS, vmin=low, vmax=high)
            axis.set_yticks([heads * (i + 0.5) - 0.5 for i in range(layers)], [f'layer {i}' for i in x.layers])
            axis.hlines([heads * i - 0.5 for i in range(1, layers)], -0.5, T - 0.5, colors='white', linewidth=0.8)
            axis.set_title(f'{x.name} — {title.split(":")[0]}', fontsize=10)
            axis.set_xlabel('token')
        figure.colorbar(image, ax=list(row), shrink=0.9)
    return figure


def histograms(traces: list[Trace]) -> Figure:
    """How strongly each layer writes, and the spectrum of its covariance after the text."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(traces), 7), layout='constrained')
    axes = figure.subplots(2, len(traces), squeeze=False, sharey='row')
    for (above, below), x in zip(axes.T, traces, strict=True):
        colours = colormaps['viridis'](torch.linspace(0, 0.9, len(x.layers)).numpy())
        for i, layer in enumerate(x.layers):
            above.hist(
                x.values['write'][i].flatten(), bins=50, range=(0, 1), histtype='step', density=True, color=colours[i],
                label=f'layer {layer}')
            spectrum = x.covariance[i]
            channels = range(1, spectrum.shape[1] + 1)
            if spectrum.shape[1] > 1:
                below.fill_between(channels, spectrum.amin(0), spectrum.amax(0), color=colours[i], alpha=0.12, linewidth=0)
                below.plot(channels, spectrum.median(0).values, color=colours[i])
            else:
                below.plot([i + 1] * len(spectrum), spectrum[:, 0], 'o', color=colours[i], alpha=0.6)
        above.set(title=f'{x.name} — write strengths', xlabel='write strength', ylabel='density')
        above.legend(fontsize=8, frameon=False, ncols=2)
        diagonal = x.covariance.shape[-1] > 1
        below.set(
            title='covariance after the text, ' + ('sorted: median and range of heads' if diagonal else 'of each head'),
            xlabel='channel' if diagonal else 'layer',
            ylabel='variance',
            yscale='log',
        )
    return figure


def png(figure: Figure, path: Path) -> str:
    """Save a figure, and give it as the source of an HTML image."""
    figure.savefig(path, dpi=110)
    return f'data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}'


# ---- page

STYLE = '''
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1500px; padding: 0 1.5em; color: #222 }
h1 { font-size: 1.5em; margin-bottom: .2em } h2 { font-size: 1.15em; margin-top: 2em }
.controls { position: sticky; top: 0; background: #fff; padding: .6em 0; border-bottom: 1px solid #ddd }
.controls label { margin-right: 1.2em } select { font: inherit }
.models { display: grid; gap: 2em; grid-auto-flow: column; grid-auto-columns: 1fr }
.tokens { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.tokens span { border-radius: 2px; padding: 1px 0 } .tokens span:hover { outline: 1px solid #222 }
.scale { display: inline-block; width: 12em; height: .8em; vertical-align: middle; border: 1px solid #ccc }
img { max-width: 100% } .note { color: #555 } #tip { color: #555; min-height: 1.5em; margin: .3em 0 0 }
'''

SCRIPT = '''
const data = JSON.parse(document.getElementById('data').textContent);
const pick = id => document.getElementById(id);
const colour = x => `rgba(214,69,32,${Math.min(1, Math.max(0, x)) * 0.85})`;
function draw() {
  const measure = pick('measure').value, layer = pick('layer').value;
  const series = data.map(model => {
    if (measure === 'loss') return model.loss;
    const rows = model.values[measure];
    const chosen = layer === 'all' ? rows : rows.filter((_, i) => model.layers[i] === Number(layer));
    // that layer of a hybrid is attention
    if (!chosen.length) return [];
    return model.loss.map((_, t) => chosen.reduce((sum, row) => sum + row[t], 0) / chosen.length);
  });
  const sorted = series.flat().sort((a, b) => a - b);
  const low = sorted[Math.floor(0.02 * (sorted.length - 1))], high = sorted[Math.ceil(0.98 * (sorted.length - 1))];
  pick('low').textContent = low.toPrecision(3);
  pick('high').textContent = high.toPrecision(3);
  data.forEach((model, m) => {
    [...pick('tokens' + m).children].forEach((span, t) => {
      const value = series[m][t];
      span.style.background = value === undefined ? '' : colour((value - low) / (high - low || 1));
      span.dataset.value = value === undefined ? 'no KDN layer' : value.toPrecision(3);
    });
  });
}
document.addEventListener('mouseover', event => {
  const span = event.target;
  if (!span.dataset || !span.dataset.value) return;
  const measure = pick('measure').selectedOptions[0].text;
  pick('tip').textContent = `token ${span.dataset.t}: ${JSON.stringify(span.textContent)} — ${measure}: ${span.dataset.value}`;
});
['measure', 'layer'].forEach(id => pick(id).addEventListener('change', draw));
draw();
'''


def make_page(traces: list[Trace], images: dict[str, str]) -> str:
    """One HTML file: tokens in colour, by measure and layer, and the pictures."""
    data = [
        {
            'layers': x.layers,
            'loss': [round(v, 4) for v in x.loss.tolist()],
            # the mean over the heads of a layer
            'values': {name: [[round(v, 5) for v in row] for row in y.mean(1).tolist()] for name, y in x.values.items()},
        }
        for x in traces
    ]
    measures = {**MEASURES, 'loss': 'loss: −log probability of the token under the model (nats)'}
    options = ''.join(f'<option value="{name}">{html.escape(title)}</option>' for name, title in measures.items())
    numbers = sorted({layer for x in traces for layer in x.layers})
    layers = ''.join(f'<option value="{layer}">layer {layer}</option>' for layer in numbers)
    columns = ''.join(
        f'<div><h2>{html.escape(x.name)}</h2><div class="tokens" id="tokens{m}">'
        + ''.join(f'<span data-t="{t}">{html.escape(token)}</span>' for t, token in enumerate(x.tokens))
        + '</div></div>'
        for m, x in enumerate(traces)
    )
    # "</" would end the script element
    encoded = json.dumps(data).replace('</', '<\\/')
    return f'''<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(" and ".join(x.name for x in traces))}</title>
<style>{STYLE}</style>
<h1>What {html.escape(" and ".join(x.name for x in traces))} made of {len(traces[0].tokens)} tokens</h1>
<div class="controls">
<label>colour by <select id="measure">{options}</select></label>
<label>of <select id="layer"><option value="all">all layers, on average</option>{layers}</select></label>
<span id="low"></span> <span class="scale" style="background: linear-gradient(90deg, #fff, rgba(214,69,32,.85))"></span>
<span id="high"></span>
<div id="tip">Point at a token.</div>
</div>
<div class="models">{columns}</div>
<h2>Every head over the text</h2><img alt="heat maps" src="{images['heat_maps']}">
<h2>Write strengths and covariances</h2><img alt="histograms" src="{images['histograms']}">
<p class="note">Variances rank tokens better than they measure them: the diagonal and the isotropic covariance drop
correlations between channels, and <code>info_scale</code> counts evidence more than once.</p>
<script type="application/json" id="data">{encoded}</script><script>{SCRIPT}</script></html>
'''


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='python -m fla_kdn.inspect', description='A page on what a KDN model makes of a text.')
    parser.add_argument('models', metavar='MODEL', nargs='+', help='folder or name on the Hugging Face hub; one or two')
    source = parser.add_mutually_exclusive_group()
    source.add_argument('--text', help='the text itself')
    source.add_argument('--file', type=Path, help='a file with the text; without --text and --file, standard input')
    parser.add_argument('--max-tokens', type=int, default=1024, help='of the text, at most; default: %(default)s')
    parser.add_argument('--output', type=Path, default=Path('inspect'), help='folder; default: %(default)s')
    parser.add_argument(
        '--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='default: %(default)s')
    args = parser.parse_args(argv)
    try:
        if len(args.models) > 2:
            raise ValueError('MODEL: at most two models stand side by side')
        if args.max_tokens < 1:
            raise ValueError(f'--max-tokens: {args.max_tokens} must be positive')
        if args.text is not None:
            text = args.text
        else:
            text = sys.stdin.read() if args.file is None else args.file.read_text(encoding='utf-8', errors='replace')
        args.output.mkdir(parents=True, exist_ok=True)
        traces = [trace(path, text, args.max_tokens, args.device) for path in args.models]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    images = {f.__name__: png(f(traces), args.output / f'{f.__name__}.png') for f in (heat_maps, histograms)}
    page = args.output / 'index.html'
    page.write_text(make_page(traces, images), encoding='utf-8')
    sys.stdout.write(f'{page}\n')


if __name__ == '__main__':
    main()
