"""Training by several processes: the same losses as one, resume on another number of them, ranks that die or hang."""
import json
import os
import random
import shutil
import signal
import subprocess
import time
import unittest

import tsrtest
import traintest
from traintest import TrainCase, documents, recipe, stage
from tsrtest import TESSERA, write

MPIRUN = shutil.which('mpirun')
PLUGIN = os.path.join(os.path.dirname(TESSERA), 'tessera-mpi.so')
ENV = {'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1', 'OMPI_MCA_rmaps_base_oversubscribe': '1',
       'OMPI_MCA_btl_vader_single_copy_mechanism': 'none', 'OMPI_MCA_mpi_yield_when_idle': '1'}
if tsrtest.SANITIZED:
    ENV['ASAN_OPTIONS'] = 'detect_leaks=0'  # MPI's own libraries keep what they have


@unittest.skipUnless(MPIRUN and os.path.exists(PLUGIN), 'mpirun or the plugin is not there: MPI was not found when this was built')
class MpiCase(TrainCase):
    def small(self, steps=20, **more):
        """Few tokens a step and a small rate: a token whose choice of experts flips by rounding would change everything after it."""
        parallel = more.pop('parallel', {})
        texts = documents(40, seed=3, most=200)
        if not os.path.exists(self.path('data')):
            self.data(texts)
        write(self.path('r.yaml'), json.dumps(recipe(
            stage('a', 64, steps // 2, 256, lr=1e-4), stage('b', 128, steps - steps // 2, 256, lr=1e-4, recompute=True),
            parallel=parallel, micro_tokens=0, **more)))

    def start(self, ranks, out, *args):
        return subprocess.Popen([MPIRUN, '-n', str(ranks), TESSERA, 'train', self.path('r.yaml'), '--out', self.path(out), '--threads', '1',
                                 *args], env={**os.environ, **ENV}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def many(self, ranks, out, *args, code=0):
        p = self.start(ranks, out, *args)
        try:
            o, e = p.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)
            raise
        self.assertEqual(p.returncode, code, (o + e).decode()[-2000:])
        return o.decode(), e.decode()

    def ranks_of(self, p):
        out = subprocess.run(['pgrep', '-P', str(p.pid)], capture_output=True, text=True).stdout.split()
        return [int(x) for x in out]

    def close(self, a, b, most=1e-5):
        x, y = ({m['step']: m['loss'] for m in self.metrics(r) if 'loss' in m} for r in (a, b))
        self.assertEqual(list(x), list(y))
        worst = max(abs(x[s] - y[s]) / x[s] for s in x)
        self.assertLessEqual(worst, most, b)
        self.assertEqual(*(traintest.lines_of(self.path(r, 'samples.jsonl')) for r in (a, b)))


class Layouts(MpiCase):
    def test_same_losses_as_one_process(self):
        self.small()
        self.train('one')
        for name, ranks, layout in (('dp2', 2, {}), ('dp4', 4, {}), ('ep2', 2, {'ep': 2}), ('ep4', 4, {'ep': 4}), ('ep2dp2', 4, {'ep': 2}),
                                    ('cp2', 2, {'cp': 2}), ('cp4', 4, {'cp': 4}), ('ep2cp2', 4, {'ep': 2, 'cp': 2})):
            with self.subTest(name):
                self.small(parallel=layout)
                self.many(ranks, name)
                self.close('one', name)
                self.ok('verify', self.step(name, 20))

    def test_held_out_and_routing_are_of_all_ranks(self):
        self.data(documents(40, seed=3, most=200), 'data', '--held-out', '0.3')
        self.small(steps=4, eval={'every': 2, 'sequences': 7, 'buckets': 4})
        self.train('one')
        for name, ranks, layout in (('dp2', 2, {}), ('cp2', 2, {'cp': 2}), ('ep2', 2, {'ep': 2})):
            self.small(steps=4, eval={'every': 2, 'sequences': 7, 'buckets': 4}, parallel=layout)
            self.many(ranks, name)
            a, b = ([m for m in self.metrics(r) if 'eval_loss' in m] for r in ('one', name))
            self.assertEqual([m['eval_tokens'] for m in a], [m['eval_tokens'] for m in b])
            self.assertEqual([[p['tokens'] for p in m['positions']] for m in a], [[p['tokens'] for p in m['positions']] for m in b])
            for x, y in zip(a, b):
                self.assertLess(abs(x['eval_loss'] - y['eval_loss']) / x['eval_loss'], 1e-5)
            x, y = (traintest.routing_rows(self.path(r, 'routing.h5')) for r in ('one', name))
            for key in x:
                if key.endswith('count'):
                    self.assertEqual(x[key].sum(), y[key].sum())

    def test_wrong_numbers_of_ranks(self):
        self.small(parallel={'ep': 4})
        _, err = self.many(2, 'run', code=2)
        self.assertIn('cannot be ep 4', err)
        self.assertEqual(err.count('error['), 1, err)


class Resume(MpiCase):
    def test_same_ranks_same_bits(self):
        self.small(steps=8, parallel={'ep': 2})
        self.many(4, 'straight')
        self.many(4, 'stopped', '--stop-at', '3')
        self.many(4, 'stopped')
        self.same_run('straight', 'stopped')

    def test_other_ranks_go_on_with_the_same_samples(self):
        self.small()
        self.train('one')
        self.train('other', '--stop-at', '7')
        self.many(2, 'other', '--stop-at', '13', '--override', 'parallel.ep=2')
        self.many(4, 'other', '--override', 'parallel.ep=1')
        self.close('one', 'other')
        self.many(2, 'back', '--stop-at', '11')
        self.train('back')
        self.close('one', 'back')


class Failures(MpiCase):
    def tail(self, out, step, seconds=60):
        until = time.time() + seconds
        while time.time() < until:
            try:
                if len(self.metrics(out)) >= step:
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.02)
        self.fail('the run does not get on')

    def test_a_rank_that_is_killed_ends_the_job(self):
        self.small(steps=400)
        p = self.start(2, 'run', '--set', 'checkpoint.every=1', '--set', 'checkpoint.keep_last=3')
        self.tail('run', 5)
        os.kill(self.ranks_of(p)[1], signal.SIGKILL)
        _, err = p.communicate(timeout=60)
        self.assertNotEqual(p.returncode, 0)
        self.assertIn(b'rank', err)
        done = len(self.metrics('run'))
        self.ok('verify', self.path('run'))
        self.many(2, 'run', '--stop-at', str(done + 3))
        self.many(2, 'straight', '--stop-at', str(done + 3))
        self.assertEqual(self.losses('run'), self.losses('straight'))

    def test_a_rank_that_hangs_is_named(self):
        self.small(steps=4000)
        p = self.start(2, 'run', '--timeout', '3')
        self.tail('run', 3)
        pid = self.ranks_of(p)[1]
        os.kill(pid, signal.SIGSTOP)
        try:
            _, err = p.communicate(timeout=60)
        finally:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
        self.assertEqual(p.returncode, 7, err)
        self.assertIn(b'rank 1: no answer for 3 s', err)


class Killed(MpiCase):
    def test_everybody_killed_at_random(self):
        rng, steps = random.Random(5), 12
        self.small(steps=steps, checkpoint={'every': 1, 'keep_last': 2})
        self.many(2, 'straight')
        for _ in range(int(os.environ.get('TSR_ROUNDS', '3'))):
            shutil.rmtree(self.path('run'), ignore_errors=True)
            while not (os.path.isdir(self.path('run')) and steps in self.steps('run')):
                p = self.start(2, 'run')
                try:
                    p.communicate(timeout=0.6 + rng.random() * 1.5)
                except subprocess.TimeoutExpired:
                    victims = self.ranks_of(p) or [p.pid]
                    for pid in victims if rng.random() < 0.5 else victims[:1]:
                        try:
                            os.kill(pid, signal.SIGKILL)
                        except ProcessLookupError:
                            pass
                    p.communicate(timeout=60)
            self.assertEqual(self.losses('run'), self.losses('straight'))
            self.same_checkpoint(self.step('run', steps), self.step('straight', steps))


if __name__ == '__main__':
    tsrtest.main()
