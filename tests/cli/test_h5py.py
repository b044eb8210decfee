"""Shards are ordinary HDF5: h5py reads every data set, compressed ones through a public filter number, and the values
equal ours bit for bit."""
import json
import os
import shutil
import subprocess
import sys
import unittest

from tsrtest import Case, SANITIZED, TINY, main, st, write

PYTHON = '/usr/bin/python3' if os.path.exists('/usr/bin/python3') else sys.executable  # the distribution's, with its modules
READ = r'''
import h5py, json, sys
import numpy as np
out = {}
for path in sys.argv[1:]:
    with h5py.File(path, 'r') as f:
        ids = [int(i) for i in f['tessera/expert_ids'][...]] if 'tessera/expert_ids' in f else []
        for group in ('tensors', 'experts'):
            for name, d in f.get(group, {}).items():
                a = d[...]
                kind = d.attrs['dtype']
                kind = kind.decode() if isinstance(kind, bytes) else kind
                rows = [(None, a)] if group == 'tensors' else zip(ids, a)
                for e, v in rows:
                    v = np.asarray(v)
                    if kind in ('bf16', 'f8_e5m2'):      # a real float type: compare the values
                        v = v.astype('<f4')
                    out[name if e is None else name.replace('{e}', str(e))] = [kind, v.tobytes().hex()]
print(json.dumps(out))
'''


def has_h5py():
    return subprocess.run([PYTHON, '-c', 'import h5py'], stderr=subprocess.DEVNULL).returncode == 0


@unittest.skipUnless(has_h5py(), 'python3-h5py is not installed')
class H5py(Case):
    def read(self, path):
        files = sorted(os.path.join(path, n) for n in os.listdir(path) if n.endswith('.h5'))
        env = {**os.environ, 'HDF5_PLUGIN_PATH': os.environ['H5_PLUGIN_DIR']}
        env.pop('LD_PRELOAD', None)
        return json.loads(subprocess.run([PYTHON, '-c', READ, *files], stdout=subprocess.PIPE, check=True, env=env).stdout)

    def compare(self, path):
        seen = self.read(path)
        listed = self.ok('ls', '-r', '--json', path).json()['tensors']
        self.assertEqual(set(seen), {t['name'] for t in listed})
        for t in listed[:: max(1, len(listed) // 60)]:
            kind, value = seen[t['name']]
            self.assertEqual(kind, t['dtype'])
            as_float = ['--as', 'f32'] if kind in ('bf16', 'f8_e5m2') else []
            ours = self.ok('cat', '--format', 'raw', *as_float, path, t['name']).out.hex()
            self.assertEqual(ours, value, t['name'])

    def test_real_layout(self):
        for name, more in (('raw', []), ('zstd', ['--compress'])):
            self.ok('convert', TINY, self.path(name), '--experts', '4', *more)
            self.compare(self.path(name))

    def test_every_dtype(self):
        import random
        rng = random.Random(4)
        sizes = {'F64': 8, 'F32': 4, 'F16': 2, 'BF16': 2, 'F8_E4M3': 1, 'F8_E5M2': 1, 'F8_E8M0': 1, 'I64': 8, 'I32': 4, 'I16': 2,
                 'I8': 1, 'U64': 8, 'U32': 4, 'U16': 2, 'U8': 1}
        # exponents that no conversion between NaNs blurs: top bits stay below all ones
        data = {t: bytes(rng.randrange(256) & (0x3F if t in ('BF16', 'F8_E5M2') else 0xFF) for _ in range(6000 * n)) for t, n in sizes.items()}
        t = [(k.lower(), k, [60, 100], v) for k, v in data.items()] + [('flag', 'BOOL', [4], bytes([0, 1, 1, 0])), ('s', 'F32', [], bytes(4)),
                                                                       ('none', 'F32', [0, 3], b'')]
        src = write(self.path('x.safetensors'), st(t))
        for name, more in (('raw', []), ('zstd', ['--compress'])):
            self.ok('convert', src, self.path(name), *more)
            self.compare(self.path(name))


if __name__ == '__main__':
    main()
