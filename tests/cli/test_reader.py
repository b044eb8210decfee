"""The reading library stands alone: a program linked with libc, zstd and xxHash only opens checkpoints and reads experts."""
import os
import subprocess

from tsrtest import Case, TINY, main


class Alone(Case):
    READER = os.environ.get('READ_EXPERT', '')

    def test_links_no_hdf5(self):
        libs = subprocess.run(['ldd', self.READER], stdout=subprocess.PIPE, check=True).stdout.decode()
        for word in ('hdf5', 'archive', 'jansson', 'yajl'):
            self.assertNotIn(word, libs)

    def test_reads_an_expert(self):
        for more in ([], ['--compress']):
            to = self.path('c' + ''.join(more))
            self.ok('convert', TINY, to, '--experts', '4', *more)
            r = subprocess.run([self.READER, to, '3', '9'], stdout=subprocess.PIPE, check=True)
            text = r.stdout.decode()
            self.assertEqual(text.count('layers.3.experts.9.'), 6)
            self.assertIn('layers.3.experts.9.gate.weight mxfp4 4096 bytes', text)
        bad = subprocess.run([self.READER, to, '3', '16'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual(bad.returncode, 4)
        self.assertIn(b'experts go from 0 to 15', bad.stderr)


if __name__ == '__main__':
    main()
