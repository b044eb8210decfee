"""tessera train: what a run writes for people and other programs, and checkpoints of training elsewhere."""
import glob
import json
import math
import os
import shutil
import struct

from traintest import TrainCase, lines_of, recipe, routing_rows, stage
from tsrtest import main, write

CRC = [0] * 256
for _i in range(256):
    _c = _i
    for _ in range(8):
        _c = _c >> 1 ^ (0x82f63b78 if _c & 1 else 0)
    CRC[_i] = _c


def crc32c(data):
    c = 0xffffffff
    for b in data:
        c = c >> 8 ^ CRC[(c ^ b) & 255]
    return c ^ 0xffffffff


def masked(data):
    c = crc32c(data)
    return ((c >> 15 | c << 17) + 0xa282ead8) & 0xffffffff


def records(blob):
    """Data of the records of a TFRecord file."""
    at = 0
    while at < len(blob):
        head = blob[at:at + 8]
        n, = struct.unpack('<Q', head)
        check, = struct.unpack('<I', blob[at + 8:at + 12])
        data = blob[at + 12:at + 12 + n]
        end, = struct.unpack('<I', blob[at + 12 + n:at + 16 + n])
        assert check == masked(head) and end == masked(data) and len(data) == n
        yield data
        at += 16 + n


def varint(blob, at):
    value = shift = 0
    while True:
        b = blob[at]
        value |= (b & 127) << shift
        at, shift = at + 1, shift + 7
        if b < 128:
            return value, at


def fields(blob):
    """(number, value) of a protocol buffers message."""
    at = 0
    while at < len(blob):
        key, at = varint(blob, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(blob, at)
        elif kind == 2:
            n, at = varint(blob, at)
            value, at = blob[at:at + n], at + n
        else:
            n = {1: 8, 5: 4}[kind]
            value, at = struct.unpack('<d' if n == 8 else '<f', blob[at:at + n])[0], at + n
        yield key >> 3, value


def events(path):
    """(step, version, {tag: number}) of a TensorBoard file, in order."""
    for data in records(open(path, 'rb').read()):
        f = dict(fields(data))
        values = {}
        for number, value in fields(f.get(5, b'')):
            v = dict(fields(value))
            values[v[1].decode()] = v[2]
        yield f.get(2, 0), f.get(3), values


class Files(TrainCase):
    def setUp(self):
        super().setUp()
        self.data(None, 'data', '--held-out', '0.2')
        self.recipe(stage('a', 16, 5, 96, warmup=2), stage('b', 32, 4, 64), eval={'every': 3, 'sequences': 5, 'buckets': 4})
        self.r = self.train('b')

    def test_metrics(self):
        rows = self.metrics('b')  # strict JSON, or it is refused there
        steps = [m for m in rows if 'loss' in m]
        self.assertEqual([m['step'] for m in steps], list(range(1, 10)))
        self.assertEqual([m['stage'] for m in steps], ['a'] * 5 + ['b'] * 4)
        for m in steps:
            self.assertEqual(float.fromhex(m['loss_hex']), m['loss'])
            for key in ('step', 'loss', 'tokens', 'lr', 'grad_norm', 'tokens_per_s', 'maxvio', 'maxvio_mean'):
                self.assertTrue(math.isfinite(m[key]), key)
            self.assertGreater(m['tokens_per_s'], 0)
            self.assertGreater(m['grad_norm'], 0)
            self.assertLessEqual(m['maxvio_mean'], m['maxvio'] + 1e-12)
        self.assertLess(steps[-1]['loss'], steps[0]['loss'])
        held = [m for m in rows if 'eval_loss' in m]
        self.assertEqual([m['step'] for m in held], [0, 3, 5, 6, 9])
        for m in held:
            self.assertGreater(m['bits_per_byte'], 0)
            self.assertEqual(sum(b['tokens'] for b in m['positions']), m['eval_tokens'])
            mean = sum(b['loss'] * b['tokens'] for b in m['positions'] if b['tokens']) / m['eval_tokens']
            self.assertAlmostEqual(mean, m['eval_loss'], places=9)
            self.assertEqual([b['to'] for b in m['positions'][:-1]], [b['from'] for b in m['positions'][1:]])
        self.assertEqual(m['positions'][-1]['to'], 32)

    def test_log_every(self):
        self.recipe(stage('a', 16, 7, 32), log={'every': 3, 'tensorboard': False})
        self.train('c')
        self.assertEqual([m['step'] for m in self.metrics('c') if 'loss' in m], [3, 6, 7])
        self.assertFalse(os.path.exists(self.path('c', 'events')))
        self.assertFalse(os.path.exists(self.path('c', 'samples.jsonl')))
        self.assertEqual(list(routing_rows(self.path('c', 'routing.h5'))['step']), list(range(1, 8)))

    def test_tensorboard(self):
        self.assertEqual(crc32c(b'123456789'), 0xe3069283)
        path, = glob.glob(self.path('b', 'events', '*tfevents*'))
        rows = list(events(path))
        self.assertEqual(rows[0][1], b'brain.Event:2')

        def series(tag):
            return [(step, v[tag]) for step, _, v in rows if tag in v]

        def f32(x):
            return struct.unpack('<f', struct.pack('<f', x))[0]
        steps = [m for m in self.metrics('b') if 'loss' in m]
        for tag, key in (('train/loss', 'loss'), ('train/lr', 'lr'), ('train/grad_norm', 'grad_norm'),
                         ('train/tokens_per_s', 'tokens_per_s'), ('balance/maxvio', 'maxvio'), ('balance/maxvio_mean', 'maxvio_mean')):
            self.assertEqual(series(tag), [(m['step'], f32(m[key])) for m in steps], tag)
        held = [m for m in self.metrics('b') if 'eval_loss' in m]
        self.assertEqual(series('eval/loss'), [(m['step'], f32(m['eval_loss'])) for m in held])
        self.assertEqual(series('eval/bits_per_byte'), [(m['step'], f32(m['bits_per_byte'])) for m in held])

    def test_tensorboard_after_a_stop(self):
        self.train('c', '--stop-at', 4)
        self.train('c')
        paths = sorted(glob.glob(self.path('c', 'events', '*tfevents*')), key=lambda p: int(os.path.basename(p).split('.')[4]))
        self.assertEqual(len(paths), 2)
        rows = [(step, v['train/loss']) for p in paths for step, _, v in events(p) if 'train/loss' in v]
        path, = glob.glob(self.path('b', 'events', '*tfevents*'))
        self.assertEqual(rows, [(step, v['train/loss']) for step, _, v in events(path) if 'train/loss' in v])

    def test_routing(self):
        rows = routing_rows(self.path('b', 'routing.h5'))
        done = [m['tokens'] for m in self.metrics('b') if 'loss' in m]
        self.assertEqual(list(rows['step']), list(range(1, 10)))
        self.assertEqual(list(rows['tokens']), done)
        self.assertEqual(list(rows['stage']), [0] * 5 + [1] * 4)
        layers = sorted(n.split('/')[0] for n in rows if n.endswith('/count'))
        self.assertEqual(layers, ['layer_0001', 'layer_0002', 'layer_0003'])
        most = [0] * 9
        for n in layers:
            count = rows[n + '/count']
            self.assertEqual(count.shape, (9, 8))
            for t, (now, before) in enumerate(zip(done, [0] + done)):
                self.assertEqual(count[t].sum(), (now - before) * 2)
                self.assertAlmostEqual(float(rows[n + '/gate_mass'][t].sum()), now - before, delta=1e-3)
                vio = count[t].max() / count[t].mean() - 1
                self.assertAlmostEqual(rows[n + '/max_violation'][t], vio, places=12)
                most[t] = max(most[t], vio)
            self.assertEqual(abs(rows[n + '/bias'][0]).max(), 0)
        for m, vio in zip((m for m in self.metrics('b') if 'loss' in m), most):
            self.assertAlmostEqual(m['maxvio'], vio, places=12)

    def test_routing_in_checkpoints(self):
        """A checkpoint has the rows since the one before; together they are the run's."""
        whole = routing_rows(self.path('b', 'routing.h5'))
        parts = [routing_rows(os.path.join(self.step('b', n), 'assets', 'routing.h5')) for n in (5, 9)]
        for name in whole:
            self.assertEqual(b''.join(p[name].tobytes() for p in parts), whole[name].tobytes(), name)

    def test_output(self):
        text = self.r.text
        self.assertEqual(text.count('\nstep '), 9, text)
        self.assertIn('finished after step 9', text)
        self.assertEqual(text.count('held-out at step'), 5)
        got = self.train('c', '--json', '--quiet')
        facts = json.loads(got.out)
        self.assertEqual(facts, {'run': self.path('c'), 'step': 9, 'tokens': self.metrics('b')[-2]['tokens'],
                                 'loss': [m for m in self.metrics('b') if 'loss' in m][-1]['loss'], 'finished': True, 'skipped': 0})
        self.assertEqual(len(lines_of(self.path('c', 'samples.jsonl'))), 9)


class Elsewhere(TrainCase):
    """A checkpoint of training is a checkpoint like others."""

    def setUp(self):
        super().setUp()
        self.data()

    def begin(self, **checkpoint):
        self.recipe(stage('only', 16, 8, 32), checkpoint={'every': 0, 'keep_last': 0, **checkpoint})
        self.train('straight')
        self.train('b', '--stop-at', 5)
        return self.step('straight', 8)

    def test_commands(self):
        last = self.begin()
        facts = self.ok('info', last, '--json').json()
        self.assertIn('kimi-k3', json.dumps(facts))
        for args in (['verify', '--deep', last], ['ls', last], ['info', last], ['info', self.path('b')]):
            self.ok(*args)
        ids = [84, 104, 101, 32, 115]
        one = self.ok('generate', last, '--raw-bytes', '--prompt', 'the sea', '-n', 6).out
        self.assertEqual(one, self.ok('generate', self.path('straight'), '--raw-bytes', '--prompt', 'the sea', '-n', 6).out)
        self.ok('eval', last, '--ids', ','.join(map(str, ids)))

    def test_to_safetensors_and_back(self):
        last = self.begin()
        self.ok('convert', last, self.path('hf'), '--to', 'safetensors')
        self.ok('convert', self.path('hf'), self.path('back'))
        for out in ('one', 'two'):
            self.ok('eval', last if out == 'one' else self.path('back'), '--ids', '1,2,3,4', '--trace', self.path(out))
        self.same_tree(self.path('one'), self.path('two'))

    def test_reshard(self):
        """Case A19: spread anew, nothing changes, and training goes on from it to the same bits."""
        self.begin()
        src = self.step('b', 5)
        for chain in ((2, 4, 1), (4, 2)):
            with self.subTest(chain=chain):
                at = src
                for n in chain:
                    to = self.path(f'spread-{"-".join(map(str, chain))}-{n}')
                    self.ok('reshard', at, to, '--experts', n)
                    self.ok('diff', src, to)
                    self.ok('verify', to)
                    self.assertEqual(json.load(open(os.path.join(to, 'train.json')))['step'], 5)
                    parts = {f.split('-of-')[0] for f in os.listdir(to) if f.startswith('optim-experts-')}
                    self.assertEqual(len(parts), n)
                    at = to
                out = f'go{len(chain)}'
                os.mkdir(self.path(out))
                shutil.copytree(at, self.step(out, 5))
                self.train(out)
                self.assertEqual(self.losses(out), {k: v for k, v in self.losses('straight').items() if k > 5})
                self.same_checkpoint(self.step('straight', 8), self.step(out, 8))

    def test_many_partitions(self):
        """The same training from and to any spread of files."""
        self.begin()
        tree = recipe(stage('only', 16, 8, 32), checkpoint={'every': 0, 'keep_last': 0, 'experts': 4, 'files': 3})
        write(self.path('r.yaml'), json.dumps(tree))
        self.train('c', '--stop-at', 5)
        self.ok('diff', self.step('b', 5), self.step('c', 5))
        self.train('c')
        self.ok('diff', self.step('straight', 8), self.step('c', 8))
        self.same_steps('straight', 'c')


if __name__ == '__main__':
    main()
