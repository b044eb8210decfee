"""Training on real text (the manuals of Perl, the help of Vim): slow. What the text shows is in docs/BENCHMARKS.md."""
import glob
import json
import os
import subprocess
import sys
import unittest

import tsrtest
import traintest
from traintest import TrainCase, numpy, stage
from tsrtest import write

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCES = {'manuals': '/usr/share/perl/5.*.*/pod/*.pod', 'help': '/usr/share/vim/vim*/doc/*.txt'}


def texts(pattern):
    out, seen = [], set()
    for path in sorted(glob.glob(pattern)):
        if os.path.basename(path) not in seen:
            seen.add(os.path.basename(path))
            blob = open(path, 'rb').read()
            try:
                out.append(blob.decode())
            except UnicodeDecodeError:
                pass
    return out


@unittest.skipUnless(all(glob.glob(p) for p in SOURCES.values()), 'the texts are not there: tools/setup.sh --text installs them')
class TextCase(TrainCase):
    def setUp(self):
        super().setUp()
        for name, pattern in SOURCES.items():
            self.data(texts(pattern), name, '--held-out', '0.05', '--seed', '3')

    def violation(self, out):
        """{layer: mean over the last fifth of the steps}, and the experts without a token in it."""
        rows = traintest.routing_rows(self.path(out, 'routing.h5'))
        last = len(rows['step']) * 4 // 5
        mean = {k: float(v[last:].mean()) for k, v in rows.items() if k.endswith('max_violation')}
        dead = sum(int((v[last:].sum(axis=0) == 0).sum()) for k, v in rows.items() if k.endswith('/count'))
        return mean, dead


class Balance(TextCase):
    def test_quantiles_against_sign_and_nothing(self):
        recipe = traintest.recipe(
            stage('a', 128, 80, 16384, schedule='wsd', lr=0.01, warmup=0.1, decay=0.5, lr_final=0.02), data=('manuals', 'help'),
            optimizer={'others': {'lr_scale': 0.3}}, micro_tokens=4096, log={'every': 10}, eval={'every': 0, 'sequences': 64})
        recipe['model'].update(layers=3, hidden=64, dense_width=128, kda_head_dim=32, full_attention_every=3, q_lora=32, kv_lora=32, qk_nope=16,
                               v_head=16, experts=64, top_k=4, latent=32)
        write(self.path('r.yaml'), json.dumps(recipe))
        loss, told = {}, {}
        for kind in ('quantile', 'sign', 'off'):
            self.train(kind, '--set', f'balance.kind={kind}', '--set', 'balance.rate=0.01')
            loss[kind] = [m['eval_loss'] for m in self.metrics(kind) if 'eval_loss' in m][-1]
            told[kind] = self.violation(kind)
            print(f'{kind}: held-out loss {loss[kind]:.4f}, violation by layer {told[kind][0]}, dead experts {told[kind][1]}')
        mean, dead = told['quantile']
        self.assertLessEqual(max(mean.values()), 0.3)
        self.assertEqual(dead, 0)
        self.assertGreater(min(told['off'][0].values()), 3)
        self.assertLessEqual(loss['quantile'], loss['sign'])


class Tiny(TextCase):
    def test_below_a_byte_model_and_longer_is_better(self):
        paths = [a for i, name in enumerate(SOURCES) for a in ('--set', f'data.sources.{i}.path={self.path(name)}')]
        out = self.path('run')
        self.ok('train', 'tiny', *paths, '--out', out)
        held = b''
        for i in range(1000):
            r = tsrtest.run('data', 'show', self.path('help'), '--split', 'held', '--doc', str(i))
            if r.code != 0:
                break
            held += r.out
        text = write(self.path('held.txt'), held[:200000])
        order3 = float(subprocess.run([sys.executable, os.path.join(ROOT, 'tools', 'byte_model.py'), *map(self.path, SOURCES), text],
                                      capture_output=True, check=True, text=True).stdout)
        bits = json.loads(self.ok('eval', out, '--text', text, '--context', '2048', '--json').out)['bits_per_byte']
        print(f'{bits:.4f} bits a byte; a byte model of order 3: {order3:.4f}')
        self.assertLess(bits, order3)
        ends = [m for m in self.metrics('run') if 'eval_loss' in m and m['step'] in (400, 430, 450, 462)]
        late = {m['step']: m['positions'][-1]['loss'] for m in ends}
        print('loss where 1024 to 2047 tokens of the document are in view, at the ends of the stages:', late)
        self.assertEqual(list(late), [400, 430, 450, 462])
        self.assertEqual(sorted(late.values(), reverse=True), list(late.values()))
        self.assertTrue(numpy.isfinite(list(self.violation('run')[0].values())).all())


if __name__ == '__main__':
    tsrtest.main()
