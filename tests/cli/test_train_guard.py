"""tessera train: what the guard does, what stays frozen, how experts are balanced, which checkpoints stay."""
import json
import os

from traintest import TrainCase, routing_rows, stage, tensors_of
from tsrtest import main


def short(name):
    """The parameter's name of a data set that tensors_of lists."""
    return name.split('/tensors/')[-1]


class Guard(TrainCase):
    def setUp(self):
        super().setUp()
        self.data()

    def wild(self, **guard):
        """The fifth step is the first whose loss is not finite, or nearly."""
        self.recipe(stage('calm', 16, 3, 32, lr=0.001), stage('wild', 16, 9, 32, schedule='constant', lr=100),
                    optimizer={'matrices': {'kind': 'adamw', 'lr_scale': 1000, 'weight_decay': 10},
                               'others': {'lr_scale': 1000, 'weight_decay': 10}, 'clip': 0, 'qk_clip': 0}, guard=guard)

    def test_stop(self):
        self.wild(nan='stop')
        r = self.train('b', code=9)
        self.assertIn('not finite', r.error)
        last = max(self.losses('b'))
        self.assertGreaterEqual(last, 3)
        self.assertLess(last, 12)
        self.assertIn(f'step {last + 1}:', r.error)
        self.assertEqual(max(self.steps('b')), last)
        self.assertEqual(self.warnings(self.ok('verify', self.path('b'))), [])
        self.assertEqual(json.load(open(os.path.join(self.step('b', last), 'train.json')))['step'], last)
        # again: the same end; without the guard's reason it goes on
        self.assertEqual(self.train('b', code=9).error, r.error)
        self.train('b', '--resume', 'step-3', '--override', 'stages.1.lr=1e-7')
        self.assertEqual(max(self.losses('b')), 12)
        self.assertTrue(all(m['loss'] is not None for m in self.metrics('b') if 'loss' in m))

    def test_skip(self):
        self.wild(nan='skip', skips=1000)
        r = self.train('b')
        rows = [m for m in self.metrics('b') if 'loss_hex' in m]
        self.assertEqual([m['step'] for m in rows], list(range(1, 13)))
        skipped = [m['step'] for m in rows if m.get('skipped')]
        self.assertTrue(skipped)
        self.assertEqual(len(self.warnings(r)), len(skipped))
        for m in rows:
            self.assertEqual(m['loss'] is None or m['grad_norm'] is None, m.get('skipped', False), m)
        train = json.load(open(os.path.join(self.step('b', 12), 'train.json')))
        self.assertEqual(train['skipped'], len(skipped))
        self.assertEqual(train['usual_updates'], 12 - len(skipped))
        self.ok('verify', self.path('b'))

    def test_too_many_in_a_row(self):
        self.wild(nan='skip', skips=2)
        r = self.train('b', code=9)
        self.assertEqual(len(self.warnings(r)), 2)
        rows = [m for m in self.metrics('b') if 'loss_hex' in m]
        self.assertEqual([m.get('skipped', False) for m in rows[-3:]], [False, True, True])
        self.assertEqual(max(self.steps('b')), rows[-1]['step'])
        self.assertEqual(self.train('b', code=9).error, r.error)

    def spike(self, **guard):
        self.recipe(stage('only', 16, 30, 16, schedule='constant', lr=0.5), guard=guard)

    def test_spikes_are_skipped(self):
        self.spike(spike='skip', spike_factor=1.1, skips=100)
        self.train('straight')
        mean, skipped = None, 0
        for m in self.metrics('straight'):
            if 'loss_hex' not in m:
                continue
            loss = float.fromhex(m['loss_hex'])
            jumped = mean is not None and loss > 1.1 * mean
            self.assertEqual(m.get('skipped', False), jumped, m)
            skipped += jumped
            if not jumped:
                mean = loss if mean is None else 0.98 * mean + (1 - 0.98) * loss
        self.assertGreater(skipped, 0)
        self.train('b', '--stop-at', 13)
        self.train('b', '--stop-at', 21)
        self.train('b')
        self.same_run('straight', 'b')

    def test_a_skipped_step_updates_nothing(self):
        self.spike(spike='skip', spike_factor=1.1, skips=100)
        self.train('straight')
        step = next(m['step'] for m in self.metrics('straight') if m.get('skipped'))
        self.train('before', '--stop-at', step - 1)
        self.train('behind', '--stop-at', step)
        self.assertEqual(tensors_of(self.step('before', step - 1)), tensors_of(self.step('behind', step)))

    def test_a_spike_stops(self):
        self.spike(spike='stop', spike_factor=1.1)
        r = self.train('b', code=9)
        self.assertIn('the loss jumped', r.error)
        self.assertEqual(max(self.steps('b')), max(self.losses('b')))
        self.ok('verify', self.path('b'))


class Frozen(TrainCase):
    def check(self, patterns, held, **more):
        """held: whether a parameter's name is among the frozen."""
        self.data()
        self.recipe(stage('only', 16, 6, 32, freeze=patterns, lr=0.02), **more)
        self.train('b', '--stop-at', 1)
        self.train('b')
        first, last = (tensors_of(self.step('b', n)) for n in (1, 6))
        self.assertEqual(set(first), set(last))
        stayed = {short(n) for n in first if not short(n).startswith('optim.') and first[n] == last[n]}
        want = {short(n) for n in first if not short(n).startswith('optim.') and held(short(n))}
        self.assertTrue(want)
        self.assertEqual(want - stayed, set())
        moved = {short(n) for n in first if not short(n).startswith('optim.')} - stayed
        self.assertGreater(len(moved), 20)
        self.assertIn('layers.3.mlp_norm.weight', moved)

    def test_names(self):
        self.check(['embed.weight', 'layers.1.attn*'], lambda n: n == 'embed.weight' or n.startswith('layers.1.attn'))

    def test_experts(self):
        self.check(['layers.2.moe*', 'layers.?.attn.q*'],
                   lambda n: n.startswith('layers.2.moe') or n[:7] == 'layers.' and n[8:].startswith('.attn.q'))

    def test_against_logit_clipping(self):
        self.check(['layers.1.*'], lambda n: n.startswith('layers.1.'), optimizer={'qk_clip': 1e-4})

    def test_then_not(self):
        """A stage without it trains everything again, with the bias correction of its own number of updates."""
        self.data()
        self.recipe(stage('a', 16, 4, 32, freeze=['head.weight']), stage('b', 16, 4, 32))
        self.train('straight')
        a, b = (tensors_of(self.step('straight', n)) for n in (4, 8))
        head = next(n for n in a if short(n) == 'head.weight')
        self.assertNotEqual(a[head], b[head])
        self.assertEqual(json.load(open(os.path.join(self.step('straight', 8), 'train.json')))['updates'], {'head.weight': 4})
        for k in (3, 4, 6):
            self.train(f'k{k}', '--stop-at', k)
            self.train(f'k{k}')
            self.same_run('straight', f'k{k}')


class Balance(TrainCase):
    def check(self, kind, **more):
        self.data()
        self.recipe(stage('a', 16, 12, 64), stage('b', 32, 6, 64), balance={'kind': kind, **more})
        self.train('straight', '--threads', 2)
        self.train('b', '--stop-at', 7, '--threads', 1)
        self.train('b', '--threads', 1)
        self.same_run('straight', 'b')
        rows = routing_rows(self.path('straight', 'routing.h5'))
        return rows, [n.split('/')[0] for n in rows if n.endswith('/bias')]

    def test_off(self):
        rows, layers = self.check('off')
        for n in layers:
            self.assertEqual(abs(rows[n + '/bias']).max(), 0)

    def test_sign(self):
        rows, layers = self.check('sign', rate=0.01, centre=False)
        for n in layers:
            bias, count = rows[n + '/bias'].astype('f8'), rows[n + '/count']
            mean = count.mean(axis=1, keepdims=True)
            for t in range(len(bias) - 1):
                move = bias[t + 1] - bias[t]
                for e in range(8):
                    sign = (count[t, e] < mean[t, 0]) * 1 - (count[t, e] > mean[t, 0]) * 1
                    self.assertAlmostEqual(move[e], 0.01 * sign, delta=1e-6)

    def balanced(self, rows, layers):
        for n in layers:
            v = rows[n + '/max_violation']
            self.assertNotEqual(abs(rows[n + '/bias'][-1]).max(), 0)
            self.assertAlmostEqual(float(rows[n + '/bias'][-1].mean()), 0, delta=1e-6)
            self.assertLess(v[4:].mean(), 1.5)

    def test_quantile(self):
        self.balanced(*self.check('quantile'))

    def test_exact(self):
        self.balanced(*self.check('exact'))


class Retention(TrainCase):
    def setUp(self):
        super().setUp()
        self.data()

    def test_the_last(self):
        self.recipe(stage('only', 16, 10, 32), checkpoint={'every': 1, 'keep_last': 3})
        self.train('b')
        self.assertEqual(self.steps('b'), [8, 9, 10])
        self.assertEqual(open(self.path('b', 'latest')).read(), 'step-00000010\n')
        self.ok('verify', '--all', self.path('b'))

    def test_multiples(self):
        self.recipe(stage('only', 16, 10, 32), checkpoint={'every': 1, 'keep_last': 1, 'keep_every': 4})
        self.train('b')
        self.assertEqual(self.steps('b'), [4, 8, 10])

    def test_all(self):
        self.recipe(stage('a', 16, 3, 32), stage('b', 16, 4, 32), checkpoint={'every': 2, 'keep_last': 0})
        self.train('b')
        self.assertEqual(self.steps('b'), [2, 3, 4, 6, 7])


if __name__ == '__main__':
    main()
