"""tessera eval: the model against right answers, in every format, on every backend, in any pieces; its files and refusals."""
import array
import json
import math
import os
import shutil
import struct
import subprocess

from tsrtest import Case, DATA, TESSERA, TINY, f32, main, model_backends, run, st, st_load, write

EXPECTED = st_load(os.path.join(TINY, 'expected.safetensors'))
IDS = [str(i) for i in struct.unpack(f'<{EXPECTED["ids"][1][0]}q', EXPECTED['ids'][2])]


def floats(t):
    return array.array('f', t[2])


def far(a, b):
    """Relative distance (L2) of two lists of numbers."""
    d = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))
    return d / math.sqrt(sum(y * y for y in b))


def copy_of(to):
    shutil.copytree(TINY, to, ignore=shutil.ignore_patterns('expected.safetensors'))
    return to


class EvalCase(Case):
    count = 0

    def setUp(self):
        super().setUp()
        self.src = copy_of(self.path('hf'))

    def trace(self, path, *args, ids=None):
        """The bytes of trace.safetensors."""
        self.count += 1
        out = self.path(f't{self.count}')
        self.ok('eval', path, '--ids', ','.join(ids or IDS), '--trace', out, *args)
        blob = open(os.path.join(out, 'trace.safetensors'), 'rb').read()
        self.assertEqual(os.listdir(out), ['trace.safetensors'])
        shutil.rmtree(out)
        return blob

    def loaded(self, blob):
        return st_load(write(self.path('blob.safetensors'), blob))

    def compare(self, got, want=EXPECTED, limit=1e-5):
        self.assertEqual({k: v[:2] for k, v in got.items()}, {k: v[:2] for k, v in want.items()})
        for name, t in want.items():
            if t[0] != 'F32':
                self.assertEqual(got[name][2], t[2], name)
            else:
                self.assertLess(far(floats(got[name]), floats(t)), limit, name)


class Golden(EvalCase):
    def test_every_chunk_size(self):
        for n in range(1, len(IDS) + 1):
            self.compare(self.loaded(self.trace(self.src, '--prefill-chunk', n, '--backend', 'cpu')))

    def test_backends(self):
        for name in model_backends():
            for n in (1, 2, 5, 7, 16, 18, 512):
                self.compare(self.loaded(self.trace(self.src, '--prefill-chunk', n, '--backend', name)))

    def test_threads_do_not_matter(self):
        for name in model_backends():
            for chunk in (1, 7, 512):
                blobs = {self.trace(self.src, '--backend', name, '--threads', n, '--prefill-chunk', chunk) for n in (1, 2, 4)}
                self.assertEqual(len(blobs), 1, f'{name}, chunks of {chunk}')

    def test_cache_in_bf16(self):
        got = self.loaded(self.trace(self.src, '--cache-dtype', 'bf16', '--prefill-chunk', '3'))
        self.assertLess(far(floats(got['logits']), floats(EXPECTED['logits'])), 3e-2)
        self.assertGreater(far(floats(got['logits']), floats(EXPECTED['logits'])), 1e-5)


class Formats(EvalCase):
    """The same numbers to the last bit, wherever the weights lie."""

    def test_equal_bytes(self):
        self.ok('convert', self.src, self.path('raw'), '--experts', '4')
        self.ok('convert', self.src, self.path('z'), '--experts', '2', '--compress')
        self.ok('reshard', self.path('raw'), self.path('r'), '--experts', '8')
        self.ok('pack', self.path('z'), self.path('z.tar'))
        self.ok('pack', self.path('r'), self.path('r.tar'))
        self.ok('convert', self.path('z'), self.path('back'))
        os.makedirs(self.path('run'))
        shutil.copytree(self.path('raw'), self.path('run', 'step-00000005'))
        places = ['hf', 'raw', 'z', 'r', 'z.tar', 'r.tar', 'back', 'run']
        for args in (['--prefill-chunk', '5'], ['--expert-cache', '100KiB', '--prefill-chunk', '2']):
            want = self.trace(self.src, *args)
            for p in places:
                self.assertEqual(self.trace(self.path(p), *args), want, p)

    def test_expert_cache(self):
        """Any size of the cache gives the same bits; too small a one is refused with the number that works."""
        want = self.trace(self.src, '--prefill-chunk', '6')
        one = 13056  # bytes of an expert
        for n in (4, 5, 8, 79, 80, 1000):
            self.assertEqual(self.trace(self.src, '--prefill-chunk', '6', '--expert-cache', n * one), want, n)
        r = self.fails(8, ['expert cache', str(4 * one)], 'eval', self.src, '--ids', '1', '--expert-cache', 4 * one - 1)
        self.assertIn('4 experts', r.error)
        r = self.ok('eval', self.src, '--ids', ','.join(IDS), '--expert-cache', 8 * one, '--json').json()
        self.assertGreater(r['experts']['misses'], 0)
        self.assertEqual(r['experts']['asked'], r['experts']['hits'] + r['experts']['misses'])
        self.assertEqual(r['experts']['bytes_read'] % one, 0)


class Numbers(EvalCase):
    def log_softmax(self, row, i):
        top = max(row)
        return row[i] - top - math.log(sum(math.exp(x - top) for x in row))

    def want(self):
        logits, ids = floats(EXPECTED['logits']), [int(i) for i in IDS]
        v = len(logits) // len(ids)
        return [self.log_softmax(logits[t * v:(t + 1) * v], ids[t + 1]) for t in range(len(ids) - 1)]

    def test_loss(self):
        want = self.want()
        r = self.ok('eval', self.src, '--ids', ','.join(IDS), '--json', '--logprobs', self.path('lp')).json()
        self.assertAlmostEqual(r['loss'], -sum(want) / len(want), places=4)
        self.assertAlmostEqual(r['perplexity'], math.exp(r['loss']), places=6)
        self.assertEqual((r['tokens'], r['scored'], r['windows'], r['bits_per_byte']), (18, 17, 1, None))
        lines = open(self.path('lp')).read().split('\n')
        self.assertEqual((lines[0], lines[-1], len(lines)), ('nan', '', 19))
        for a, b in zip(lines[1:], want):
            self.assertAlmostEqual(float(a), b, places=3)
        self.ok('eval', self.src, '--ids', ','.join(IDS), '--logprobs', self.path('lp.json'))
        rows = json.load(open(self.path('lp.json')))
        self.assertEqual([x['id'] for x in rows], [int(i) for i in IDS])
        self.assertEqual([x['logprob'] for x in rows], [None] + [float(x) for x in lines[1:-1]])
        text = self.ok('eval', self.src, '--ids', ','.join(IDS)).text
        self.assertIn('perplexity', text)

    def test_windows(self):
        """Each window starts anew and predicts the first token of the next one."""
        def scores(*args):
            self.count += 1
            self.ok('eval', self.src, '--backend', 'cpu', '--logprobs', self.path(f'{self.count}.json'), *args)
            return [x['logprob'] for x in json.load(open(self.path(f'{self.count}.json')))]
        whole = scores('--ids', ','.join(IDS), '--context', '7')
        parts = [scores('--ids', ','.join(IDS[a:a + 8]))[1:] for a in (0, 7, 14)]
        self.assertEqual(whole[1:], sum(parts, []))
        r = self.ok('eval', self.src, '--ids', ','.join(IDS), '--context', '7', '--json').json()
        self.assertEqual((r['windows'], r['scored']), (3, 17))
        with_bos = scores('--ids', ','.join(IDS), '--bos', '--context', '7')
        self.assertEqual(with_bos[:6], scores('--ids', ','.join(['1'] + IDS[:6]))[1:])
        self.assertEqual(with_bos[7:13], scores('--ids', ','.join(['1'] + IDS[6:13]))[2:])
        r = self.ok('eval', self.src, '--ids', ','.join(IDS), '--bos', '--context', '7', '--json').json()
        self.assertEqual((r['windows'], r['scored']), (3, 18))

    def test_text(self):
        text = b'Hello, \xff world: \xc3\xa9\n'
        r = self.ok('eval', self.src, '--text', write(self.path('t'), text), '--json')
        facts = r.json()
        self.assertIn('bytes are taken as tokens', r.err.decode())
        self.assertEqual(facts['tokens'], len(text))
        self.assertAlmostEqual(facts['bits_per_byte'], facts['loss'] / math.log(2), places=9)
        with open(self.path('t'), 'rb') as stdin:
            again = self.ok('eval', self.src, '--text', '-', '--json', stdin=stdin).json()
        self.assertEqual(again['loss'], facts['loss'])
        ids = self.ok('eval', self.src, '--ids', ','.join(str(b) for b in text), '--json').json()
        self.assertEqual(ids['loss'], facts['loss'])

    def test_one_token(self):
        r = self.ok('eval', self.src, '--ids', '7', '--json').json()
        self.assertEqual((r['scored'], r['loss'], r['perplexity']), (0, None, None))
        self.ok('eval', self.src, '--ids', '7')
        got = self.loaded(self.trace(self.src, ids=['1']))
        self.assertEqual(got['logits'][1], [1, 512])
        self.assertLess(far(floats(got['logits']), floats(EXPECTED['logits'])[:512]), 1e-5)
        self.assertEqual(self.ok('eval', self.src, '--ids', '7', '--bos', '--json').json()['scored'], 1)

    def test_routing(self):
        self.ok('eval', self.src, '--ids', ','.join(IDS), '--routing', self.path('r.json'), '--context', '5')
        got = json.load(open(self.path('r.json')))
        self.assertEqual((got['tokens'], got['experts'], got['top_k']), (18, 16, 4))
        self.assertEqual(sorted(got['layers']), ['1', '2', '3', '4', '5'])
        for counts in got['layers'].values():
            self.assertEqual((len(counts), sum(counts)), (16, 18 * 4))
        os.remove(self.path('r.json'))
        self.ok('eval', self.src, '--ids', ','.join(IDS), '--routing', self.path('r.json'))
        for layer, counts in json.load(open(self.path('r.json')))['layers'].items():
            ids = array.array('i', EXPECTED[f'route_ids.{layer}'][2])
            self.assertEqual(counts, [ids.count(e) for e in range(16)])


class Refusals(EvalCase):
    def test_usage(self):
        self.fails(2, 'needs one of', 'eval', self.src)
        self.fails(2, 'only one', 'eval', self.src, '--ids', '1', '--text', 'x')
        for ids in ('1,,2', ',1', '1,', 'a', '-1', '1 2', '512', '99999999999999999999999', '1,512'):
            self.fails(2, '--ids', 'eval', self.src, '--ids', ids)
        self.fails(2, ['--context 5000', '4096'], 'eval', self.src, '--ids', '1', '--context', '5000')
        self.ok('eval', self.src, '--ids', '1', '--context', '5000', '--allow-longer')
        self.fails(2, ['18 tokens', 'window of 10'], 'eval', self.src, '--ids', ','.join(IDS), '--context', '10', '--trace', self.path('t'))
        self.fails(2, 'one token', 'eval', self.src, '--ids', '1,2', '--context', '1', '--bos')
        self.fails(2, ['quantum', 'tessera backends'], 'eval', self.src, '--ids', '1', '--backend', 'quantum')
        self.fails(2, 'empty', 'eval', self.src, '--text', write(self.path('e'), ''))

    def test_files(self):
        for opt in ('--logprobs', '--routing'):
            taken = write(self.path('taken'), 'x')
            self.fails(6, 'taken', 'eval', self.src, '--ids', '1,2', opt, taken)
            self.fails(4, 'no', 'eval', self.src, '--ids', '1,2', opt, self.path('no', 'x'))
        write(self.path('d', 'trace.safetensors'), 'x')
        self.fails(6, 'trace.safetensors', 'eval', self.src, '--ids', '1', '--trace', self.path('d'))
        self.fails(4, 'no', 'eval', self.src, '--ids', '1', '--trace', self.path('no', 'x'))
        self.fails(4, 'nowhere', 'eval', self.src, '--text', self.path('nowhere'))
        self.fails(4, 'no such', 'eval', self.path('no such'), '--ids', '1')
        with open('/dev/full', 'w') as full:
            p = subprocess.run([TESSERA, 'eval', self.src, '--ids', '1,2'], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(p.returncode, 7, p.stderr)

    def test_memory(self):
        self.fails(8, ['memory', 'allowed'], 'eval', self.src, '--ids', '1', '--mem-limit', '4MiB')
        self.ok('eval', self.src, '--ids', '1', '--mem-limit', '64MiB')

    def test_not_a_model(self):
        bag = write(self.path('bag', 'model.safetensors'), st([('w', 'F32', [2], f32(1, 2))]))
        self.fails(4, 'config.json', 'eval', os.path.dirname(bag), '--ids', '1')
        write(self.path('bag', 'config.json'), '{"model_type": "llama"}')
        self.fails(5, 'llama', 'eval', os.path.dirname(bag), '--ids', '1', '--arch', 'raw')
        write(self.path('bag', 'config.json'), '{"model_type": ')
        self.fails(3, 'config.json', 'eval', os.path.dirname(bag), '--ids', '1', '--arch', 'raw')

    def test_broken_numbers(self):
        """A NaN in a norm comes out as a numeric error that names the position, not as a loss."""
        name = 'language_model.model.layers.2.input_layernorm.weight'
        self.change(name, lambda d: b'\xc0\x7f' + d[2:])
        self.fails(9, ['position 1', 'not a number'], 'eval', self.src, '--ids', '1,2,3')

    def change(self, name, how):
        for f in os.listdir(self.src):
            path = os.path.join(self.src, f)
            if f.endswith('.safetensors'):
                held = st_load(path)
                if name in held:
                    d = held[name]
                    held[name] = (d[0], d[1], how(d[2]))
                    write(path, st([(k, *v) for k, v in held.items()]))


class Backends(Case):
    def test_table(self):
        r = self.ok('backends', '--json').json()
        self.assertEqual([b['name'] for b in r['backends']], ['cpu', 'avx2', 'avx512', 'cuda'])
        self.assertEqual(sum(b['auto'] for b in r['backends']), 1)
        self.assertTrue(r['backends'][0]['usable'])
        self.assertEqual(r['ops']['gemm_nt']['cpu'], 'plain')
        text = self.ok('backends').text
        for op in r['ops']:
            self.assertIn(op, text)
        for b in r['backends']:
            if not b['in_build']:
                self.assertIn('not in this build', self.fails(5, b['name'], 'eval', TINY, '--ids', '1', '--backend', b['name']).error)
            elif not b['usable']:
                self.assertIn(b['name'], b['why_not'])
                self.assertIn(b['why_not'], text)
                self.assertIn(b['why_not'], self.fails(5, b['name'], 'eval', TINY, '--ids', '1', '--backend', b['name']).error)

    def test_plugin(self):
        """Whatever is said to be the plugin, the program starts, lists the backends and says what is wrong."""
        junk = os.path.join(self.dir, 'junk.so')
        write(junk, b'not a library')
        for path in (junk, os.path.join(self.dir, 'absent.so')):
            cuda = self.ok('backends', '--json', env={'TESSERA_CUDA_PLUGIN': path}).json()['backends'][3]
            self.assertFalse(cuda['usable'])
            if cuda['in_build']:
                self.assertIn(os.path.basename(path), cuda['why_not'])


if __name__ == '__main__':
    main()
