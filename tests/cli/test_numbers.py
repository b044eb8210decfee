"""Values: nibble order, scale codes, rounding, NaN and negative zero."""
import struct

from tsrtest import Case, f32, main, run, st, write


class Numbers(Case):
    def put(self, *entries):
        return write(self.path('x.safetensors'), st(list(entries)))

    def test_nibble_order(self):
        src = self.put(('t.weight_packed', 'U8', [1, 16], bytes.fromhex('1032547698badcfeefcdab8967452301')),
                       ('t.weight_scale', 'U8', [1, 1], b'\x7f'))
        up = ['0', '0.5', '1', '1.5', '2', '3', '4', '6', '-0', '-0.5', '-1', '-1.5', '-2', '-3', '-4', '-6']
        self.ok('convert', '--arch', 'raw', src, self.path('c'))
        for where in (src, self.path('c')):
            self.assertEqual(self.ok('cat', '--mxfp4', where, 't.weight_packed').text.split(), up + up[::-1])

    def test_scale_codes(self):
        src = self.put(('t.weight_packed', 'U8', [6, 16], b'\x22' * 96), ('t.weight_scale', 'U8', [6, 1], bytes([0, 1, 127, 134, 254, 255])),
                       ('h.weight_packed', 'U8', [1, 16], b'\x11' * 16), ('h.weight_scale', 'U8', [1, 1], b'\0'),
                       ('o.weight_packed', 'U8', [1, 16], b'\x77' * 16), ('o.weight_scale', 'U8', [1, 1], b'\xfe'))

        def codes(name, dtype):
            text = self.ok('cat', '--mxfp4', '--as', dtype, '--format', 'hex', src, name).text
            return [line.split()[0] for line in text.strip().split('\n')]
        self.assertEqual(codes('t.weight_packed', 'f32')[:5], ['00400000', '00800000', '3f800000', '43000000', '7f000000'])
        self.assertEqual(codes('t.weight_packed', 'bf16')[:5], ['0040', '0080', '3f80', '4300', '7f00'])
        for dtype, mask, exponent in (('f32', 0x7fffffff, 0x7f800000), ('bf16', 0x7fff, 0x7f80)):
            self.assertGreater(int(codes('t.weight_packed', dtype)[5], 16) & mask, exponent)
        self.assertEqual(codes('h.weight_packed', 'f32'), ['00200000'])
        self.assertEqual(codes('h.weight_packed', 'bf16'), ['0020'])
        r = run('cat', '--mxfp4', '--as', 'f32', src, 'o.weight_packed')
        self.assertEqual(r.code, 9, repr(r))
        self.assertIn('o.weight_packed: row 0', r.error)
        self.ok('cat', '--mxfp4', '--as', 'f32', '--saturate', src, 'o.weight_packed')
        r = run('verify', src)
        self.assertEqual(r.code, 0, repr(r))
        self.assertIn('32 NaN in row 5', (r.out + r.err).decode())
        self.ok('convert', '--arch', 'raw', src, self.path('c'))
        self.ok('diff', src, self.path('c'))

    def test_e4m3_table(self):
        src = self.put(('w', 'F8_E4M3', [12], bytes.fromhex('38010708707879 7e7f80feff'.replace(' ', ''))))
        text = self.ok('cat', src, 'w').text.split()
        self.assertEqual([float(v) for v in text[:8]], [1, 2**-9, 0.013671875, 2**-6, 128, 256, 288, 448])
        self.assertEqual(text[8:], ['nan', '-0', '-448', 'nan'])

    def test_bf16_rounding(self):
        bits = [0x7F800001, 0xFF800001, 0x3E89CCD5, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x80000000, 1, 0x80000001]
        src = self.put(('f', 'F32', [9], struct.pack('<9I', *bits)))
        r = self.ok('cat', '--as', 'bf16', '--format', 'hex', src, 'f')
        self.assertEqual(r.text.split(), ['7fc0', 'ffc0', '3e8a', '3f80', '3f82', '7f80', '8000', '0000', '8000'])
        self.assertIn('1 value became Inf', r.err.decode())

    def test_diff_semantics(self):
        a = write(self.path('a.safetensors'), st([('z', 'F32', [1], f32(0.0)), ('n', 'U8', [1], b'\1'), ('q', 'F32', [1], b'\x01\0\xc0\x7f')]))
        b = write(self.path('b.safetensors'), st([('z', 'F32', [1], f32(-0.0)), ('n', 'U8', [1], b'\1'), ('q', 'F32', [1], b'\x01\0\xc0\x7f')]))
        self.assertEqual(run('diff', a, b).code, 1)
        self.ok('diff', '--values', a, b)
        self.ok('diff', a, a)
        c = write(self.path('c.safetensors'), st([('z', 'F32', [1], f32(1.0)), ('q', 'F64', [1], bytes(8)), ('m', 'U8', [2], b'ab')]))
        r = run('diff', '--values', '--json', a, c)
        self.assertEqual(r.code, 1)
        rows = {t['name']: t for t in r.json()['differences']}
        self.assertEqual(rows['z']['max_abs'], 1.0)
        self.assertIn('only in', rows['m']['state'])
        self.assertIn('dtype', rows['q']['state'])

    def test_slices_and_formats(self):
        src = self.put(('m', 'I32', [3, 4], struct.pack('<12i', *range(12))), ('v', 'F32', [2, 2, 2], f32(*range(8))))
        self.assertEqual(self.ok('cat', '--slice', '1:3,-2:', src, 'm').text, '6 7\n10 11\n')
        self.assertEqual(self.ok('cat', '--slice', '1', src, 'm').text, '4 5 6 7\n')
        self.assertEqual(self.ok('cat', '--format', 'raw', src, 'm').out, struct.pack('<12i', *range(12)))
        npy = self.ok('cat', '--format', 'npy', src, 'v').out
        self.assertTrue(npy.startswith(b'\x93NUMPY\x01\x00') and npy.endswith(f32(*range(8))))
        self.assertIn(b"'shape': (2, 2, 2)", npy)
        for bad in ('5', '1,2,3', 'x', '0:1:2'):
            self.assertEqual(run('cat', '--slice', bad, src, 'm').code, 2, bad)
        self.assertEqual(run('cat', src, 'nothing').code, 4)


if __name__ == '__main__':
    main()
