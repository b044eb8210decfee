"""Expert partitions with optimizer state: global ids, circles, impossible sizes, a rank's file overwritten."""
import json
import shutil

from tsrtest import Case, f32, main, run, st, write


class Experts(Case):
    def setUp(self):
        super().setUp()
        t = []
        for e in range(4):
            for name, value in (('', e + 1.0), ('optim.exp_avg.', 0.1 * (e + 1)), ('optim.exp_avg_sq.', 0.01 * (e + 1))):
                for part in ('gate', 'up', 'down'):
                    t.append((f'{name}layers.0.experts.{e}.{part}.weight', 'F32', [64, 32], f32(*[value] * 2048)))
        t.append(('embed.weight', 'F32', [4, 4], f32(*range(16))))
        t.append(('optim.step', 'I64', [], (7).to_bytes(8, 'little')))
        write(self.path('in', 'model.safetensors'), st(t))
        self.ok('convert', '--arch', 'canonical', self.path('in'), self.path('c1'))

    def test_circle(self):
        last = self.path('c1')
        for i, n in enumerate((2, 4, 1, 4, 2)):
            to = self.path(f'r{i}')
            self.ok('reshard', last, to, '--experts', n)
            self.ok('verify', '--deep', to)
            self.ok('diff', self.path('c1'), to)
            last = to
        text = self.ok('info', self.path('r0')).text
        self.assertIn('experts-00000-of-00002', text)
        self.assertRegex(text, r'experts-00000-of-00002.*\b0[-, ]+1\b')
        self.assertRegex(text, r'experts-00001-of-00002.*\b2[-, ]+3\b')
        self.ok('convert', last, self.path('back'))
        self.same_tree(self.path('in'), self.path('back'))
        self.assertEqual(self.ok('cat', last, 'optim.step').text.split(), ['7'])

    def test_impossible_sizes(self):
        self.fails(2, '4 experts: possible sizes 1, 2, 4', 'reshard', self.path('c1'), self.path('x'), '--experts', '3')
        self.ok('reshard', self.path('c1'), self.path('u'), '--experts', '3', '--uneven')
        self.ok('diff', self.path('c1'), self.path('u'))
        self.fails(2, '4 experts', 'reshard', self.path('c1'), self.path('x'), '--experts', '5', '--uneven')

    def test_map_by_hand(self):
        self.ok('reshard', self.path('c1'), self.path('m'), '--map', '0,3;1-2')
        self.ok('diff', self.path('c1'), self.path('m'))
        self.fails(2, 'expert 3', 'reshard', self.path('c1'), self.path('x'), '--map', '0;1-2')
        self.fails(2, 'expert 1', 'reshard', self.path('c1'), self.path('x'), '--map', '0-1;1-3')

    def test_one_rank_overwrites_another(self):
        self.ok('reshard', self.path('c1'), self.path('two'), '--experts', '2')
        shutil.copy(self.path('two', 'experts-00000-of-00002.h5'), self.path('two', 'experts-00001-of-00002.h5'))
        words = 'experts 2, 3 missing, 0, 1 twice'
        self.fails(4, words, 'reshard', self.path('two'), self.path('x'), '--experts', '4')
        r = run('verify', self.path('two'))
        self.assertEqual(r.code, 4, repr(r))
        self.assertIn(words, r.text)

    def test_lineage(self):
        self.ok('reshard', self.path('c1'), self.path('two'), '--experts', '2')
        ops = [s['op'] for s in json.load(open(self.path('two', 'manifest.json')))['lineage']]
        self.assertEqual(ops, ['convert', 'reshard'])


if __name__ == '__main__':
    main()
