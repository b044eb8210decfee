"""tessera train and what goes wrong around it: damaged checkpoints, kills, signals, a full disk, wrong arguments."""
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time

from traintest import TrainCase, documents, h5py, lines_of, stage
from tsrtest import SANITIZED, TESSERA, main, run, tree, write

ROUNDS = int(os.environ.get('TSR_ROUNDS', '1' if SANITIZED else '5'))


class Damage(TrainCase):
    """Case A21 (a) to (d): the newest checkpoint is no good."""

    def setUp(self):
        super().setUp()
        self.data()
        self.recipe(stage('only', 16, 6, 32))
        self.train('straight')
        self.train('b', '--stop-at', 2)
        shutil.copytree(self.step('b', 2), self.path('b', 'step-3'))

    def largest(self):
        return max((os.path.join(self.path('b', 'step-3'), n) for n in os.listdir(self.path('b', 'step-3'))), key=os.path.getsize)

    def check(self, code, word):
        before = tree(self.path('b'))
        r = self.train('b', '--resume', 'step-3', code=code)
        self.assertIn(word, r.error)
        r = self.train('b', '--resume', 'step-9', code=4)
        self.assertIn('step-00000009: the run has no such checkpoint', r.error)
        self.train('b', '--resume', 'none', code=6)
        self.assertEqual({k: v for k, v in tree(self.path('b')).items() if k != '.lock'},
                         {k: v for k, v in before.items() if k != '.lock'})
        r = self.train('b', '--resume', 'auto')
        told = self.warnings(r)
        self.assertEqual(len(told), 1, told)
        for part in ('step-3 skipped', 'step-00000002', word):
            self.assertIn(part, told[0])
        self.same_run('straight', 'b')

    def test_cut(self):
        path = self.largest()
        os.truncate(path, os.path.getsize(path) // 2)
        self.check(3, os.path.basename(path))

    def test_no_manifest(self):
        os.remove(self.path('b', 'step-3', 'manifest.json'))
        self.check(4, 'manifest.json')

    def test_flipped_byte(self):
        path = self.largest()
        with open(path, 'r+b') as f:
            f.seek(os.path.getsize(path) // 2)
            byte = f.read(1)[0]
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte ^ 16]))
        self.check(3, os.path.basename(path))

    def test_empty_folder(self):
        shutil.rmtree(self.path('b', 'step-3'))
        os.mkdir(self.path('b', 'step-3'))
        self.check(4, 'step-3')

    def test_nothing_good(self):
        """Not begun anew: a run whose only checkpoint is damaged is refused, and stays as it is."""
        shutil.rmtree(self.step('b', 2))
        os.truncate(self.largest(), 1000)
        before = tree(self.path('b'))
        r = self.train('b', code=4)
        self.assertIn('no checkpoint here can be used', r.error)
        self.assertIn('step-3', r.error)
        self.assertEqual(tree(self.path('b')), before)

    def test_damaged_state(self):
        """Whole files whose state is not training's, or is not there."""
        shutil.rmtree(self.path('b', 'step-3'))
        src = self.path('plain')
        self.ok('convert', self.step('b', 2), src, '--to', 'safetensors')
        self.ok('convert', src, self.path('b', 'step-3'))
        r = self.train('b', '--resume', 'step-3', code=4)
        self.assertIn('holds no training state', r.error)

    def test_metrics_with_a_torn_line(self):
        shutil.rmtree(self.path('b', 'step-3'))
        for name in ('metrics.jsonl', 'samples.jsonl'):
            with open(self.path('b', name), 'a') as f:
                f.write('{"step":3,"loss":1}\n{"step":2,"lo')
        self.train('b')
        self.same_run('straight', 'b')

    def test_routing_with_a_torn_row(self):
        """As a kill leaves it: one more row, whose number was not written yet."""
        shutil.rmtree(self.path('b', 'step-3'))
        with h5py.File(self.path('b', 'routing.h5'), 'r+') as f:
            sets = []
            f.visititems(lambda name, item: sets.append(item) if isinstance(item, h5py.Dataset) else None)
            for item in sets:
                item.resize(3, axis=0)
        self.assertEqual(self.warnings(self.train('b')), [])
        self.same_run('straight', 'b')

    def test_routing_file_that_cannot_be_read(self):
        shutil.rmtree(self.path('b', 'step-3'))
        write(self.path('b', 'routing.h5'), b'no HDF5')
        told = self.warnings(self.train('b'))
        self.assertEqual(len(told), 1, told)
        self.assertIn('routing.h5', told[0])
        self.assertEqual(self.losses('b'), self.losses('straight'))


class Killed(TrainCase):
    """Case A21 (e): killed at random moments, again and again."""

    def test_kills(self):
        rng = random.Random(2026)
        self.data()
        self.recipe(stage('a', 16, 20, 32), stage('b', 32, 12, 64), checkpoint={'every': 1, 'keep_last': 2})
        self.train('straight', '--set', 'checkpoint.every=1')
        kills = resumed = 0
        for i in range(ROUNDS):
            out = f'k{i}'
            for _ in range(400):
                with open(self.path('log'), 'wb') as log:
                    p = subprocess.Popen([TESSERA, 'train', self.path('r.yaml'), '--out', self.path(out), '--set', 'checkpoint.every=1'],
                                         stdout=log, stderr=log)
                    time.sleep(rng.uniform(0.001, 0.3) * (10 if SANITIZED else 1))
                    if p.poll() is None:
                        p.kill()
                        kills += 1
                    code = p.wait()
                self.assertIn(code, (0, -9), open(self.path('log'), 'rb').read()[-2000:])
                self.assertNotIn(b'skipped', open(self.path('log'), 'rb').read())
                if code == 0:
                    break
                if os.path.isdir(self.path(out)) and self.steps(out):
                    r = self.ok('verify', self.path(out))
                    self.assertEqual(self.warnings(r), [])
                    resumed += 1
            self.train(out, '--set', 'checkpoint.every=1')
            self.same_run('straight', out)
            left = [n for n in os.listdir(self.path(out)) if n.startswith('.') and n != '.lock']
            self.assertEqual(left, [])
            shutil.rmtree(self.path(out))
        print(f'{kills} kills, {resumed} with checkpoints')
        self.assertGreater(resumed, 0)


class Signals(TrainCase):
    def setUp(self):
        super().setUp()
        self.data()
        self.recipe(stage('only', 16, 300 if SANITIZED else 1000, 32), checkpoint={'every': 0, 'keep_last': 0})

    def begin(self, out='b', upto=20):
        """A run that has done some steps and works on."""
        p = subprocess.Popen([TESSERA, 'train', self.path('r.yaml'), '--out', self.path(out)], stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE)
        self.addCleanup(p.stderr.close)
        path = self.path(out, 'metrics.jsonl')
        for _ in range(6000):
            if os.path.exists(path) and open(path, 'rb').read().count(b'\n') >= upto:
                break
            self.assertIsNone(p.poll(), 'ended by itself')
            time.sleep(0.005)
        return p

    def wait_for(self, condition):
        for _ in range(6000):
            if condition():
                return
            time.sleep(0.005)
        self.fail('waited for too long')

    def end(self, p, code):
        err = p.stderr.read().decode()
        self.assertEqual(p.wait(), code, err)
        return err

    def test_save_and_go_on(self):
        p = self.begin()
        os.kill(p.pid, signal.SIGUSR1)
        self.wait_for(lambda: self.steps('b'))
        at = self.steps('b')[0]
        self.ok('verify', self.step('b', at))
        self.end(p, 0)
        self.train('straight')
        self.assertLess(at, max(self.steps('b')))
        self.same_run('straight', 'b')

    def test_save_and_end(self):
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            out = f's{code}'
            p = self.begin(out)
            os.kill(p.pid, number)
            err = self.end(p, code)
            self.assertEqual(len(self.steps(out)), 1)
            self.assertEqual(max(self.losses(out)), self.steps(out)[0])
            self.assertIn(f'step-{self.steps(out)[0]:08}', err)
            self.train(out)
            if not os.path.exists(self.path('straight')):
                self.train('straight')
            self.same_run('straight', out)

    def test_one_run_a_folder(self):
        p = self.begin()
        os.kill(p.pid, signal.SIGSTOP)
        try:
            for args in ((), ('--resume', 'none'), ('--resume', 'step-1')):
                r = self.train('b', *args, code=6)
                self.assertIn('another run is at work', r.error)
        finally:
            os.kill(p.pid, signal.SIGCONT)
        self.end(p, 0)
        self.train('straight')
        self.same_run('straight', 'b')

    def test_stopped_right_at_the_start(self):
        """A signal before the first step ends the run all the same, or comes too early to be seen at all."""
        p = subprocess.Popen([TESSERA, 'train', self.path('r.yaml'), '--out', self.path('b')], stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
        self.wait_for(lambda: os.path.exists(self.path('b', '.lock')))
        p.terminate()
        self.assertIn(p.wait(), (143, -15))
        self.train('b')
        self.train('straight')
        self.same_run('straight', 'b')


class Refusals(TrainCase):
    def setUp(self):
        super().setUp()
        self.data()
        self.recipe(stage('only', 16, 6, 32))

    def refused(self, code, words, *args, out='b', file='r.yaml'):
        r = self.train(out, *args, code=code, file=file)
        for word in [words] if isinstance(words, str) else words:
            self.assertIn(word, r.error)
        self.assertNotIn('metrics.jsonl', os.listdir(self.path(out)) if os.path.exists(self.path(out)) else [])

    def test_arguments(self):
        self.refused(2, 'KEY=VALUE', '--set', 'seed')
        self.refused(2, 'KEY=VALUE', '--set', '=1')
        self.refused(2, 'KEY=VALUE', '--override', 'seed')
        self.refused(2, 'step-N', '--resume', 'newest')
        self.refused(2, 'step-N', '--resume', 'step-x')
        self.refused(2, 'step-N', '--resume', 'step-3x')
        self.refused(2, '', '--stop-at', '0')
        self.assertEqual(run('train', self.path('r.yaml')).code, 2)
        self.refused(4, 'none.yaml', file='none.yaml')

    def test_unknown_keys(self):
        write(self.path('w.yaml'), open(self.path('r.yaml')).read().replace('"context"', '"contxt"'))
        self.refused(3, ['contxt: unknown key', 'did you mean context?'], file='w.yaml')
        self.refused(3, ['unknown key', 'did you mean lr?'], '--set', 'stages.0.lrr=1')
        self.refused(3, '', '--set', 'stages.0.lr=fast')
        self.refused(3, '', '--set', 'stages.7.lr=1')

    def test_data(self):
        write(self.path('w.yaml'), open(self.path('r.yaml')).read().replace('"path": "data"', '"path": "nowhere"'))
        self.refused(4, ['data source data', 'nowhere'], file='w.yaml')
        self.refused(6, ['ids up to', 'vocabulary has 256'], '--set', 'model.vocab=256')
        os.truncate(self.path('data', 'train-00000.tok'), 70)
        self.refused(3, 'train-00000.tok')

    def test_no_such_step(self):
        self.refused(4, 'no such checkpoint', '--resume', 'step-9')
        self.assertEqual(self.steps('b') if os.path.exists(self.path('b')) else [], [])

    def test_data_that_changed(self):
        self.train('b', '--stop-at', 3)
        before = tree(self.path('b'))
        shutil.rmtree(self.path('data'))
        self.data(documents(24, seed=2))
        r = self.train('b', code=6)
        self.assertIn('is not what the checkpoint was trained on', r.error)
        self.assertEqual(tree(self.path('b')), before)

    def test_run_with_checkpoints(self):
        self.train('b', '--stop-at', 3)
        before = tree(self.path('b'))
        r = self.train('b', '--resume', 'none', code=6)
        self.assertIn('has checkpoints already', r.error)
        self.assertEqual(tree(self.path('b')), before)

    def test_out_is_a_file(self):
        write(self.path('b'), 'text')
        self.assertIn(self.train('b', code=7).code, (7,))

    def full_disk(self, limit, *args):
        """A file cannot become large enough: the older checkpoint stays good, and the run goes on when there is room."""
        self.train('straight', *args)
        self.train('b', '--stop-at', 3, *args)

        def preexec():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        # libhdf5 itself loses a buffer when it cannot write at the end
        quiet = write(self.path('leaks'), 'leak:libhdf5\n')
        r = self.train('b', *args, code=7, preexec=preexec, env={'LSAN_OPTIONS': f'suppressions={quiet}:print_suppressions=0'})
        self.assertTrue(r.error.startswith('error[E_IO]'), repr(r))
        self.assertEqual(self.steps('b'), [3])
        self.assertEqual(self.warnings(self.ok('verify', self.path('b'))), [])
        self.train('b', *args)
        self.same_run('straight', 'b')
        return r

    def test_full_disk(self):
        size = ('--set', 'model.vocab=16384')
        self.assertIn('step-00000006', self.full_disk(2 << 20, *size).error)

    def test_full_disk_for_routing(self):
        self.assertIn('routing.h5', self.full_disk(100 << 10).error)

    def test_start(self):
        """--start takes weights only; a run that has checkpoints goes on from them."""
        self.train('b', '--stop-at', 3)
        self.train('c', '--start', self.step('b', 3))
        self.assertEqual(sorted(self.losses('c')), [1, 2, 3, 4, 5, 6])
        lineage = json.load(open(os.path.join(self.step('c', 6), 'manifest.json')))['lineage']
        self.assertEqual([e['op'] for e in lineage][-1], 'start')
        self.refused(4, 'none', '--start', self.path('none'), out='d')
        self.assertEqual(len(lines_of(self.path('c', 'samples.jsonl'))), 6)


if __name__ == '__main__':
    main()
