"""tessera train goes on where it stopped: the same samples, the same losses, the same bits, at every kind of place."""
import json
import math
import os

from traintest import TrainCase, lines_of, recipe, routing_rows, stage
from tsrtest import SANITIZED, main, run, write


class Equality(TrainCase):
    """Three stages of 5, 4 and 3 steps over two sources, several micro-batches a step."""

    def setUp(self):
        super().setUp()
        self.data(None, 'data', '--held-out', '0.2')
        self.data(['x y z ' * n for n in range(1, 9)], 'more')
        self.make()

    def make(self, **more):
        tree = recipe(data=('data', 'more'), eval={'every': 4, 'sequences': 4, 'buckets': 4}, **more)
        tree['stages'][1]['mix'] = {'data': 3, 'more': 1}
        tree['stages'][2]['mix'] = {'more': 1}
        write(self.path('r.yaml'), json.dumps(tree))

    def check(self, *stops):
        if not os.path.exists(self.path('straight')):
            self.train('straight')
        out = 'stopped-' + '-'.join(map(str, stops))
        for k in stops:
            r = self.train(out, '--stop-at', k)
            self.assertEqual(max(self.steps(out)), k)
            self.assertEqual(self.warnings(r), [])
            self.assertEqual(max(self.losses(out)), k)
        r = self.train(out)
        self.assertEqual(self.warnings(r), [])
        self.same_run('straight', out)

    def test_first_step(self):
        self.check(1)

    def test_within_a_stage(self):
        self.check(3)

    def test_last_step_of_a_stage(self):
        self.check(5)

    def test_first_step_of_a_stage(self):
        self.check(6)

    def test_last_step_but_one(self):
        self.check(11)

    def test_several_stops(self):
        self.check(2, 5, 6, 9, 10)

    def test_every_step(self):
        self.check(*range(1, 12, 4 if SANITIZED else 1))

    def test_finished(self):
        """A finished run has nothing to do, and loses nothing."""
        self.train('straight')
        self.train('again')
        r = self.train('again')
        self.assertEqual(self.warnings(r), [])
        self.same_run('straight', 'again')

    def test_from_an_earlier_step(self):
        self.train('straight')
        self.train('again')
        self.train('again', '--resume', 'step-5')
        self.same_run('straight', 'again')
        self.assertEqual(self.steps('again'), self.steps('straight'))

    def test_masters(self):
        """Parameters in bf16 with f32 masters go on bit for bit."""
        self.make(checkpoint={'every': 0, 'keep_last': 0, 'dtype': 'bf16'})
        self.check(4, 7)
        halves = [t for t in self.ok('ls', self.step('straight', 12), '--json').json()['tensors'] if t['dtype'] == 'bf16']
        self.assertGreater(len(halves), 10)

    def test_compressed_and_waited_for(self):
        self.make(checkpoint={'every': 2, 'keep_last': 2, 'compress': True, 'wait': True, 'experts': 4, 'files': 3})
        self.check(3)

    def test_adamw(self):
        self.make(optimizer={'matrices': {'kind': 'adamw', 'weight_decay': 0.3}})
        self.check(2, 9)


class Order(TrainCase):
    """Case A20: 20 documents of 9 equal letters, one a step, two epochs."""

    def setUp(self):
        super().setUp()
        self.data([chr(97 + d) * 9 for d in range(20)], 'data', '--no-eos')
        self.recipe(stage('only', 9, 40, 9), micro_tokens=0)
        self.train('straight', '--threads', 1)

    def taken(self, out):
        rows = lines_of(self.path(out, 'samples.jsonl'))
        self.assertEqual([r['step'] for r in rows], list(range(1, 41)))
        self.assertTrue(all(len(r['sequences']) == 1 for r in rows))
        return [r['sequences'][0] for r in rows]

    def test_epochs(self):
        taken = self.taken('straight')
        self.assertEqual([t['epoch'] for t in taken], [0] * 20 + [1] * 20)
        first, second = ([t['sequence'] for t in taken[a:a + 20]] for a in (0, 20))
        self.assertEqual(sorted(first), list(range(20)))
        self.assertEqual(sorted(second), list(range(20)))
        self.assertNotEqual(first, second)
        self.assertNotEqual(first, list(range(20)))
        self.assertEqual([m['tokens'] for m in self.metrics('straight') if 'loss' in m], list(range(9, 361, 9)))

    def test_stops(self):
        for k in (7, 20) if SANITIZED else (1, 7, 19, 20, 21, 39):
            with self.subTest(k=k):
                self.train(f'k{k}', '--stop-at', k)
                self.train(f'k{k}')
                self.assertEqual(self.taken(f'k{k}'), self.taken('straight'))
                self.assertEqual(self.losses(f'k{k}'), self.losses('straight'))
                self.same_run('straight', f'k{k}')

    def test_threads(self):
        for n in (2, 4):
            self.train(f't{n}', '--threads', n)
            self.same_run('straight', f't{n}')
        self.train('mixed', '--threads', 4, '--stop-at', 13)
        self.train('mixed', '--threads', 1)
        self.same_run('straight', 'mixed')


class Changes(TrainCase):
    """Case A22: schedules go on; another recipe is told, not used; an override is used, and told."""

    def setUp(self):
        super().setUp()
        self.data()
        self.recipe(stage('only', 16, 20, 32, schedule='cosine', warmup=3, weight_decay_final=2, lr=0.01),
                    optimizer={'matrices': {'weight_decay': 0.1}, 'others': {'weight_decay': 0.1}})
        self.train('straight')
        self.train('b', '--stop-at', 5)

    def lr(self, out):
        return {m['step']: m['lr'] for m in self.metrics(out) if 'lr' in m}

    def lineage(self, out, n):
        return json.load(open(os.path.join(self.step(out, n), 'manifest.json')))['lineage']

    def test_other_values_are_a_warning(self):
        r = self.train('b', '--set', 'optimizer.matrices.weight_decay=0.5', '--set', 'stages.0.lr=0.02')
        told = self.warnings(r)
        self.assertEqual(len(told), 1, told)
        for word in ('optimizer.matrices.weight_decay', 'stages.0.lr', '--override'):
            self.assertIn(word, told[0])
        self.same_run('straight', 'b')

    def test_override(self):
        r = self.train('b', '--override', 'stages.0.lr=0.02')
        self.assertEqual(self.warnings(r), [])
        was, now = self.lr('straight'), self.lr('b')
        for n in range(1, 21):
            self.assertAlmostEqual(now[n], was[n] * (2 if n > 5 else 1), places=15)
        self.assertEqual(self.losses('b')[6], self.losses('straight')[6])
        self.assertNotEqual(self.losses('b')[7], self.losses('straight')[7])
        steps = [e for e in self.lineage('b', 20) if 'override' in e]
        self.assertEqual([e['override'] for e in steps], [{'stages.0.lr': '0.02'}])
        self.assertEqual(steps[0]['step'], 5)
        self.assertEqual(steps[0]['from'], 'step-00000005')
        self.assertNotIn('override', json.dumps(self.lineage('b', 5)))
        # and it stays: the next one resumes what was overridden
        self.train('c', '--stop-at', 5)
        self.train('c', '--stop-at', 9, '--override', 'stages.0.lr=0.02')
        told = self.warnings(self.train('c'))
        self.assertEqual(len(told), 1)
        self.assertIn('stages.0.lr', told[0])
        self.same_steps('b', 'c')

    def test_override_of_the_model(self):
        before = self.losses('b')
        r = run('train', self.path('r.yaml'), '--out', self.path('b'), '--override', 'model.hidden=64')
        self.assertEqual(r.code, 6, repr(r))
        self.assertEqual(self.losses('b'), before)
        self.train('b')
        self.same_run('straight', 'b')

    def test_override_of_a_wrong_key(self):
        self.train('b', '--override', 'stages.0.lrr=1', code=3)
        self.train('b')
        self.same_run('straight', 'b')

    def test_schedule(self):
        lr = self.lr('straight')
        for n in range(1, 21):
            want = 0.01 * n / 3 if n < 3 else 0.001 + 0.009 * (1 + math.cos(math.pi * (n - 3) / 17)) / 2
            self.assertAlmostEqual(lr[n], want, places=14)

    def test_routing_goes_on(self):
        self.train('b')
        x, y = (routing_rows(self.path(out, 'routing.h5')) for out in ('straight', 'b'))
        self.assertEqual(list(x['step']), list(range(1, 21)))
        for name in x:
            self.assertEqual(x[name].tobytes(), y[name].tobytes(), name)


if __name__ == '__main__':
    main()
