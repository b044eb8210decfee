"""Where files live: links, blanks, UTF-8, read-only inputs, full devices, killed runs, which checkpoint is the latest."""
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time

from tsrtest import Case, SANITIZED, TESSERA, TINY, f32, main, run, st, tree, write


def mount(*args):
    return subprocess.run(['mount', *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


class Snapshots(Case):
    def build(self):
        base = self.path('my models', '模型 é', 'models--x')
        snap = os.path.join(base, 'snapshots', 'r1')
        os.makedirs(snap)
        for name, data in (('model.safetensors', st([('a', 'F32', [1], f32(1))])), ('config.json', b'{}'), ('tokenizer.json', b'tok')):
            blob = hashlib.sha256(data).hexdigest()
            write(os.path.join(base, 'blobs', blob), data)
            os.symlink(f'../../blobs/{blob}', os.path.join(snap, name))
        return base, snap

    def test_links_blanks_and_utf8(self):
        base, snap = self.build()
        before = tree(base)
        self.ok('convert', snap, self.path('out ä'))
        self.assertEqual(tree(base), before)
        self.ok('diff', snap, self.path('out ä'))
        self.ok('convert', self.path('out ä'), self.path('back'))
        self.assertEqual(open(self.path('back', 'tokenizer.json')).read(), 'tok')
        self.assertNotIn('blobs', self.ok('ls', '-l', snap).text)

    def test_dangling_link(self):
        base, snap = self.build()
        os.symlink('../../blobs/gone', os.path.join(snap, 'model-2.safetensors'))
        self.fails(4, ['model-2.safetensors is a link to ../../blobs/gone, which does not exist'.split(' is')[0], 'is a link to',
                       'which does not exist'], 'convert', snap, self.path('out'))

    def test_read_only_input(self):
        base, snap = self.build()
        if not mount('-o', 'bind,ro', base, base):
            self.skipTest('bind mounts are not permitted here')
        try:
            mount('-o', 'remount,bind,ro', base)
            self.ok('convert', snap, self.path('out'))
            self.ok('verify', snap)
        finally:
            subprocess.run(['umount', base])

    def test_output_is_a_link_to_a_folder(self):
        _, snap = self.build()
        os.mkdir(self.path('real'))
        os.symlink('real', self.path('link'))
        self.ok('convert', snap, self.path('link'))
        self.assertTrue(os.path.islink(self.path('link')))
        self.ok('verify', self.path('real'))

    def test_output_exists(self):
        _, snap = self.build()
        write(self.path('out', 'precious'), b'data')
        self.fails(6, 'exists', 'convert', snap, self.path('out'))


class Assets(Case):
    def test_name_that_is_not_utf8(self):
        write(self.path('in', 'model.safetensors'), st([('a', 'F32', [1], f32(1))]))
        with open(os.path.join(os.fsencode(self.path('in')), b'caf\xe9.txt'), 'w') as f:
            f.write('x')
        r = run('convert', self.path('in'), self.path('out'))
        self.assertEqual(r.code, 3, repr(r))
        self.assertEqual(os.listdir(self.dir), ['in'])

    def test_config_that_is_not_strict_json(self):
        write(self.path('in', 'model.safetensors'), st([('a', 'F32', [1], f32(1))]))
        for text in ('{"a": NaN}', '{"a": 1, "a": 2}', 'not json'):
            write(self.path('in', 'config.json'), text)
            self.ok('convert', self.path('in'), self.path('out'))
            self.ok('verify', self.path('out'))
            self.ok('convert', self.path('out'), self.path('back'))
            self.same_tree(self.path('in'), self.path('back'))
            shutil.rmtree(self.path('out'))
            shutil.rmtree(self.path('back'))


class Full(Case):
    def small(self, n):
        return st([('a', 'U8', [n], os.urandom(n))])

    def test_full_device(self):
        d = self.path('disk')
        os.mkdir(d)
        if not mount('-t', 'tmpfs', '-o', 'size=256k', 'tmpfs', d):
            self.skipTest('tmpfs mounts are not permitted here')
        try:
            one = write(self.path('one.safetensors'), self.small(1000))
            big = write(self.path('big.safetensors'), self.small(300000))
            self.ok('convert', one, os.path.join(d, 'step-1'))
            self.fails(7, ['No space left on device: need', 'free', 'step-2'], 'convert', big, os.path.join(d, 'step-2'))
            self.ok('verify', os.path.join(d, 'step-1'))
            middle = write(self.path('middle.safetensors'), self.small(100000))
            self.ok('convert', middle, os.path.join(d, 'step-2'))
        finally:
            subprocess.run(['umount', d])

    def test_file_size_limit(self):
        import resource
        big = write(self.path('big.safetensors'), self.small(3 << 20))

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        before = tree(self.dir)
        r = run('convert', big, self.path('out'), preexec=limit)
        self.assertEqual(r.code, 7, repr(r))
        self.assertIn('error[E_IO]', r.error)
        self.assertEqual(tree(self.dir), before)
        self.ok('convert', big, self.path('out'))


class Latest(Case):
    def setUp(self):
        super().setUp()
        src = write(self.path('m.safetensors'), st([('w', 'F32', [5000], f32(*range(5000)))]))
        os.mkdir(self.path('run'))
        for i in (1, 2):
            self.ok('convert', src, self.path('run', f'step-{i}'))
        shutil.copytree(self.path('run', 'step-2'), self.path('run', 'step-3'))
        write(self.path('run', 'latest'), 'step-3\n')
        self.shard = self.path('run', 'step-3', 'dense-00000-of-00001.h5')

    def expect_step_2(self, word):
        r = run('verify', self.path('run'))
        self.assertEqual(r.code, 0, repr(r))
        text = r.err.decode()
        self.assertEqual(text.count('warning'), 1, text)
        self.assertIn('step-3', text)
        self.assertIn('step-2', text)
        self.assertIn(word, text)

    def test_cut_file(self):
        os.truncate(self.shard, os.path.getsize(self.shard) // 2)
        self.expect_step_2('dense-00000-of-00001.h5')
        self.assertEqual(run('ls', self.path('run', 'step-3')).code, 3)
        self.assertEqual(run('verify', self.path('run', 'step-3')).code, 1)

    def test_no_manifest(self):
        os.remove(self.path('run', 'step-3', 'manifest.json'))
        self.expect_step_2('manifest.json')
        self.assertEqual(run('ls', self.path('run', 'step-3')).code, 4)
        self.assertEqual(run('verify', self.path('run', 'step-3')).code, 4)

    def test_flipped_byte(self):
        with open(self.shard, 'r+b') as f:
            f.seek(os.path.getsize(self.shard) // 2)
            c = f.read(1)[0]
            f.seek(-1, 1)
            f.write(bytes([c ^ 4]))
        self.expect_step_2('step-3')
        r = run('verify', self.path('run', 'step-3'))
        self.assertEqual(r.code, 1)
        self.assertIn('dense-00000-of-00001.h5', r.text)
        self.assertEqual(run('cat', self.path('run', 'step-3'), 'w').code, 3)

    def test_empty_folder(self):
        shutil.rmtree(self.path('run', 'step-3'))
        os.mkdir(self.path('run', 'step-3'))
        self.expect_step_2('manifest.json')
        self.assertEqual(run('verify', self.path('run', 'step-3')).code, 4)

    def test_no_such_step(self):
        self.fails(4, 'step-9', 'ls', self.path('run', 'step-9'))
        self.fails(4, 'step-9', 'verify', self.path('run', 'step-9'))

    def test_ten_is_after_nine(self):
        os.rename(self.path('run', 'step-3'), self.path('run', 'step-10'))
        shutil.copytree(self.path('run', 'step-2'), self.path('run', 'step-9'))
        self.assertIn('step-10', self.ok('info', '-v', self.path('run')).text + self.ok('info', self.path('run', 'latest')).text)


class Killed(Case):
    def test_kill_and_continue(self):
        src = self.path('hf')
        shutil.copytree(TINY, src, ignore=shutil.ignore_patterns('expected.safetensors'))
        self.ok('convert', src, self.path('want'), '--experts', '4', '--compress')
        rng = random.Random(5)
        cmd = [TESSERA, 'convert', src, self.path('got'), '--experts', '4', '--compress']
        kills = 0
        for _ in range(30):
            p = subprocess.Popen(cmd, stderr=subprocess.PIPE)
            time.sleep(rng.uniform(0.001, 1.0 if SANITIZED else 0.12))
            p.send_signal(rng.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
            _, err = p.communicate()
            if p.returncode == 0:
                break
            self.assertIn(p.returncode, (-9, -2, -15, 130, 143), err)
            self.assertFalse(os.path.exists(self.path('got')))
            kills += 1
        if not os.path.exists(self.path('got')):
            self.assertEqual(run('convert', src, self.path('got'), '--experts', '2', '--compress').code,
                             6 if os.path.exists(self.path('.got.partial')) else 0)
            if not os.path.exists(self.path('got')):
                self.ok(*cmd[1:])
                shards = [{n: h for n, h in tree(self.path(x)).items() if n.endswith('.h5') or n.startswith('assets')} for x in ('want', 'got')]
                self.assertEqual(*shards)
        self.ok('verify', self.path('got'))
        self.assertFalse(os.path.exists(self.path('.got.partial')))

    def test_other_options_are_refused(self):
        src = write(self.path('big.safetensors'), st([(f't{i}', 'U8', [1 << 22], os.urandom(1 << 22)) for i in range(12)]))
        p = subprocess.Popen([TESSERA, 'convert', src, self.path('c')], stderr=subprocess.DEVNULL)
        while p.poll() is None and not os.path.exists(self.path('.c.partial', 'resume.txt')):
            time.sleep(0.001)
        p.kill()
        p.wait()
        if os.path.exists(self.path('c')):
            self.skipTest('the machine was faster than the signal')
        r = run('convert', src, self.path('c'), '--dense', '2')
        self.assertEqual(r.code, 6, repr(r))
        self.assertIn('--restart', r.error)
        self.ok('convert', src, self.path('c'), '--dense', '2', '--restart')
        self.ok('diff', src, self.path('c'))


if __name__ == '__main__':
    main()
