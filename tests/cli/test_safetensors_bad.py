"""Files that are not what their name says, headers that lie, shards that are missing: one line, the right exit code."""
import os

from tsrtest import Case, f32, main, st, st_raw, write


class NotSafetensors(Case):
    def bad(self, data, code, words):
        src = write(self.path('in', 'model.safetensors'), data)
        for command in (['convert', src, self.path('out')], ['ls', src], ['info', src], ['verify', src], ['diff', src, src]):
            self.fails(code, words, *command)

    def test_lfs_pointer(self):
        text = 'version https://git-lfs.github.com/spec/v1\noid sha256:' + 'a' * 64 + '\nsize 4281343\n'
        self.bad(text.encode(), 4, 'Git LFS pointer, the real file has 4281343 bytes')

    def test_html(self):
        self.bad(b'<!DOCTYPE html><html><body>Sign in</body></html>', 3, 'looks like HTML')
        self.bad(b'\n  <html lang="en">', 3, 'looks like HTML')

    def test_cut_one_byte(self):
        whole = st([('a', 'F32', [2], f32(1, 2)), ('last', 'F32', [1], f32(3))])
        self.bad(whole[:-1], 3, [f'file has {len(whole) - 1} bytes, header promises {len(whole)}', 'last'])

    def test_cut_in_header(self):
        self.bad(st([('a', 'F32', [2], f32(1, 2))])[:30], 3, 'cut inside the header')

    def test_short(self):
        self.bad(b'1234567', 3, '7 bytes')
        self.bad(b'', 3, '0 bytes')
        self.bad(b'\xff' * 100, 3, 'not a safetensors file')


class Ranges(Case):
    def bad(self, header, data, words, code=3):
        src = write(self.path('in', 'x.safetensors'), st_raw(header, data))
        self.fails(code, words, 'convert', '--arch', 'raw', src, self.path('out'))
        self.fails(code, words, 'ls', src)

    def pair(self, a, b, n, words):
        e = '"%s":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
        self.bad('{' + e % ('a', *a) + ',' + e % ('b', *b) + '}', bytes(n), words)

    def test_ranges(self):
        self.pair((0, 4), (2, 6), 6, ['overlap', 'a', 'b'])
        self.pair((0, 4), (8, 12), 12, ['hole', 'a', 'b'])
        self.pair((0, 4), (4, 8), 12, ['trailing bytes', 'b'])
        self.pair((0, 4), (0, 4), 4, ['same range', 'a', 'b'])

    def test_trailing_accepted_on_request(self):
        src = write(self.path('in.safetensors'), st([('a', 'F32', [1], f32(1))]) + b'tail')
        self.fails(3, 'trailing bytes', 'convert', src, self.path('o'))
        r = self.ok('convert', '--allow-trailing', src, self.path('o'))
        self.assertIn(b'warning', r.err)

    def test_unordered_header_is_fine(self):
        h = '{"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        src = write(self.path('in.safetensors'), st_raw(h, f32(1, 2)))
        self.ok('convert', src, self.path('out'))
        self.assertEqual(self.ok('cat', self.path('out'), 'b').text.split(), ['2'])

    def test_duplicate_key(self):
        e = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
        self.bad('{"w":' + e % (0, 4) + ',"w":' + e % (4, 8) + '}', bytes(8), ['w', 'duplicate key'])
        self.bad('{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4), 'duplicate key')

    def test_size_mismatch(self):
        self.bad('{"w":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}}', bytes(4), ['w', 'size mismatch'])
        self.bad('{"scaled_fp8":{"dtype":"F16","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[1],'
                 '"data_offsets":[0,0]}}', b'', ['a', 'shape needs 4 bytes, range has 0'])
        self.bad('{"w":{"dtype":"F64","shape":[1099511627776,1099511627776],"data_offsets":[0,4]}}', bytes(4), 'w')

    def test_values_of_the_wrong_kind(self):
        for bad in ('{"w":1}', '[]', '{"w":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}}',
                    '{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', '{"w":{"dtype":"F32","shape":[1]}}',
                    '{"w":{"dtype":"F32","shape":"x","data_offsets":[0,4]}}', '{"w":null}', '{"w":{}} x',
                    '{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}',
                    '{"w":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}', '{"w":'):
            self.bad(bad, bytes(4), 'x.safetensors')
        self.bad('{"w":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}', bytes(8), ['w', 'C64'], code=5)
        src = write(self.path('in', 'x.safetensors'), st_raw(b'{"\xc0\xaf":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b'a'))
        self.fails(3, 'x.safetensors', 'ls', src)


class Shards(Case):
    def three(self, present):
        weight_map = {n: f'model-0000{i}-of-00003.safetensors' for i, n in enumerate('abc', 1)}
        for i, n in enumerate('abc', 1):
            if i in present:
                write(self.path('in', weight_map[n]), st([(n, 'F32', [1], f32(i))]))
        import json
        write(self.path('in', 'model.safetensors.index.json'), json.dumps({'metadata': {}, 'weight_map': weight_map}))
        return self.path('in')

    def test_missing_shards(self):
        src = self.three({1})
        words = '2 of 3 shards missing: model-00002-of-00003.safetensors, model-00003-of-00003.safetensors'
        self.fails(4, words, 'convert', src, self.path('out'))
        self.fails(4, words, 'verify', src)

    def two(self, extra_map=None, extra_tensor=False):
        import json
        names = {'a': 'model-00001-of-00002.safetensors', 'b': 'model-00002-of-00002.safetensors'}
        write(self.path('in', names['a']), st([('a', 'F32', [1], f32(1))]))
        more = [('x', 'F32', [1], f32(7))] if extra_tensor else []
        write(self.path('in', names['b']), st([('b', 'F32', [1], f32(2))] + more))
        write(self.path('in', 'model.safetensors.index.json'),
              json.dumps({'metadata': {}, 'weight_map': {**names, **(extra_map or {})}}))
        return self.path('in')

    def test_ghost_entry(self):
        src = self.two({'mtp.fc.weight': 'model-00002-of-00002.safetensors'})
        self.fails(4, ['mtp.fc.weight', 'model-00002-of-00002.safetensors'], 'convert', src, self.path('out'))

    def test_tensor_not_in_the_index(self):
        src = self.two(extra_tensor=True)
        r = self.ok('convert', src, self.path('out'))
        self.assertIn(b'1 tensor not in the index is ignored: x', r.err)
        from tsrtest import run
        r = run('verify', src)
        self.assertEqual(r.code, 1, repr(r))
        self.ok('convert', self.path('out'), self.path('back'), '--shard-size', '4')
        from tsrtest import st_load
        held = {}
        for name in os.listdir(self.path('back')):
            if name.endswith('.safetensors'):
                held.update({t: name for t in st_load(self.path('back', name))})
        import json
        index = json.load(open(self.path('back', 'model.safetensors.index.json')))
        self.assertEqual(index['weight_map'], held)

    def test_map_leaves_the_folder(self):
        src = self.two({'z': '../evil.safetensors'})
        self.fails(3, 'weight_map', 'convert', src, self.path('out'))

    def test_hostile_index(self):
        src = self.two()
        write(self.path('in', 'model.safetensors.index.json'), '{"weight_map":' + '[' * 100000)
        self.fails(3, 'index.json', 'ls', src)


if __name__ == '__main__':
    main()
