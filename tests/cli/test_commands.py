"""Every command: help, man page, completion, strict JSON, usage errors, closed and full outputs."""
import json
import os
import signal
import subprocess

from tsrtest import Case, TESSERA, TINY, f32, main, run, st, write

COMMANDS = ['convert', 'reshard', 'pack', 'unpack', 'ls', 'info', 'verify', 'diff', 'cat', 'index', 'plan', 'generate', 'eval', 'data', 'backends']


class Help(Case):
    def test_every_command(self):
        top = self.ok('--help').text
        for c in COMMANDS:
            self.assertIn(c, top)
            for flag in ('--help', '-h'):
                text = self.ok(c, flag).text
                self.assertIn(f'tessera {c}', text)
                self.assertIn('--json', text) if c not in ('pack', 'unpack', 'cat') else None
            man = self.ok('help', '--man', c).text
            for section in ('NAME', 'SYNOPSIS', 'DESCRIPTION', 'OPTIONS', 'EXIT STATUS'):
                self.assertIn(section, man)
        self.assertRegex(self.ok('--version').text, r'^tessera \d+\.\d+')
        for shell in ('bash', 'zsh'):
            self.assertIn('reshard', self.ok('completion', shell).text)

    def test_bash_accepts_the_completion(self):
        script = self.ok('completion', 'bash').out
        self.assertEqual(subprocess.run(['bash', '-n'], input=script).returncode, 0)


class Usage(Case):
    def test_refusals(self):
        for args in (['frobnicate'], [], ['ls'], ['ls', 'a', '--frob'], ['convert', 'a'], ['convert', 'a', 'b', '--experts', 'x'],
                     ['convert', 'a', 'b', '--mem-limit', '5Q'], ['convert', 'a', 'b', '--mem-limit', '-1'], ['cat', 'x', '--slice'],
                     ['ls', 'a', '--mem-limit', '99999999999999999999G']):
            r = run(*args)
            self.assertEqual(r.code, 2, f'{args}: {r!r}')
            self.assertTrue(r.error.startswith('error[E_USAGE]') or not args, repr(r))
        self.assertIn('--experts', run('convert', 'a', 'b', '--expert', '4').error)

    def test_missing_path(self):
        for args in (['ls'], ['info'], ['verify'], ['cat', 'PATH', 'x'], ['convert', 'PATH', 'out'], ['reshard', 'PATH', 'out', '--experts', '1'],
                     ['pack', 'PATH', 'out.tar'], ['index', 'PATH']):
            args = [self.path('no such') if a == 'PATH' else a for a in (args if 'PATH' in args else args + ['PATH'])]
            args = [self.path(a) if a in ('out', 'out.tar') else a for a in args]
            self.fails(4, 'no such', *args)

    def test_not_ours(self):
        src = write(self.path('x.bin'), b'GGUF' + bytes(100))
        self.fails(5, 'GGUF', 'ls', src)
        os.mkdir(self.path('empty'))
        r = run('info', self.path('empty'))
        self.assertIn(r.code, (4, 5), repr(r))


class Json(Case):
    def test_strict(self):
        src = write(self.path('x.safetensors'), st([('w"\\\n<b>', 'F32', [2], f32(float('nan'), float('inf'))), ('v', 'F32', [1], f32(2))]))
        other = write(self.path('y.safetensors'), st([('w"\\\n<b>', 'F32', [2], f32(1, 2)), ('v', 'F32', [1], f32(1))]))
        self.ok('convert', '--json', src, self.path('c'))
        for args in (['ls', '--json', self.path('c')], ['info', '--json', self.path('c')], ['verify', '--json', self.path('c')],
                     ['index', '--json', self.path('c')], ['ls', '--json', src], ['info', '--json', src],
                     ['plan', '--json', os.path.join(TINY, 'config.json')]):
            self.ok(*args).json()
        r = run('diff', '--values', '--json', src, other)
        self.assertEqual(r.code, 1)
        r.json()
        for line in self.ok('ls', '--jsonl', self.path('c')).text.strip().split('\n'):
            json.loads(line)


class Outputs(Case):
    def test_full_output(self):
        src = write(self.path('x.safetensors'), st([('w', 'F32', [100], f32(*range(100)))]))
        for args in (['ls', src], ['cat', src, 'w'], ['info', src]):
            with open('/dev/full', 'w') as full:
                p = subprocess.run([TESSERA, *args], stdout=full, stderr=subprocess.PIPE)
            self.assertEqual(p.returncode, 7, p.stderr)

    def test_closed_pipe(self):
        src = write(self.path('x.safetensors'), st([('w', 'F32', [400, 1000], bytes(1600000))]))
        p = subprocess.Popen([TESSERA, 'cat', src, 'w'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        p.stdout.read(10)
        p.stdout.close()
        err = p.stderr.read().decode()
        p.wait()
        p.stderr.close()
        self.assertNotIn('Traceback', err)
        self.assertIn(p.returncode, (7, 141, -signal.SIGPIPE))

    def test_quiet_in_pipes(self):
        r = self.ok('convert', TINY, self.path('c'))
        self.assertNotIn(b'\r', r.err)
        self.assertNotIn(b'\x1b', r.err + r.out)


class Index(Case):
    def test_rebuild(self):
        self.ok('convert', TINY, self.path('c'), '--experts', '2')
        good = open(self.path('c', 'index.tsx'), 'rb').read()
        os.remove(self.path('c', 'index.tsx'))
        self.fails(4, 'tessera index --rebuild', 'ls', self.path('c'))
        self.ok('index', '--rebuild', self.path('c'))
        self.assertEqual(open(self.path('c', 'index.tsx'), 'rb').read(), good)
        write(self.path('c', 'index.tsx'), good[:-100] + b'x' * 100)
        self.ok('index', '--rebuild', self.path('c'))
        self.assertEqual(open(self.path('c', 'index.tsx'), 'rb').read(), good)

    def test_hostile_tars(self):
        import io
        import tarfile
        self.ok('convert', TINY, self.path('c'))

        def build(name, change):
            with tarfile.open(self.path(name), 'w') as t:
                for n in ('manifest.json', 'index.tsx'):
                    t.add(self.path('c', n), 'c/' + n)
                change(t)
            return self.path(name)

        def member(t, name, **kw):
            info = tarfile.TarInfo(name)
            for k, v in kw.items():
                setattr(info, k, v)
            info.size = 3 if info.type == tarfile.REGTYPE else 0
            t.addfile(info, io.BytesIO(b'abc') if info.size else None)
        for name, change in (('up.tar', lambda t: member(t, 'c/../../evil')), ('abs.tar', lambda t: member(t, '/evil')),
                             ('link.tar', lambda t: member(t, 'c/x', type=tarfile.SYMTYPE, linkname='/etc/passwd')),
                             ('hard.tar', lambda t: member(t, 'c/x', type=tarfile.LNKTYPE, linkname='c/manifest.json')),
                             ('twice.tar', lambda t: member(t, 'c/manifest.json'))):
            tar = build(name, change)
            self.fails(3, name, 'unpack', tar, self.path('out'))
            self.fails(3, name, 'ls', tar)
        cut = self.path('cut.tar')
        self.ok('pack', self.path('c'), cut)
        os.truncate(cut, os.path.getsize(cut) - 3000000)
        self.fails(3, 'cut.tar', 'unpack', cut, self.path('out'))
        self.fails(3, 'cut.tar', 'verify', cut)


class Limits(Case):
    def test_memory_limit(self):
        src = write(self.path('x.safetensors'), st([('a', 'U8', [20 << 20], bytes(20 << 20))]))
        before = os.listdir(self.dir)
        r = run('convert', src, self.path('c'), '--mem-limit', '4MiB')
        self.assertEqual(r.code, 8, repr(r))
        self.assertIn('--mem-limit', r.error)
        self.assertEqual(os.listdir(self.dir), before)
        self.ok('convert', src, self.path('c'), '--mem-limit', '64MiB', '--threads', '1')
        many = write(self.path('y.safetensors'), st([(f'{i}' + 'n' * 80, 'U8', [0], b'') for i in range(20000)]))
        self.assertEqual(run('ls', many, '--mem-limit', '1MiB').code, 8)
        self.ok('ls', many)

    def test_hostile_counts_take_no_memory(self):
        import struct
        src = write(self.path('x.safetensors'), struct.pack('<Q', 1 << 62) + b'{}')
        self.fails(3, 'x.safetensors', 'ls', src)


class Plan(Case):
    def test_sizes(self):
        r = self.ok('plan', os.path.join(TINY, 'config.json'), '--json').json()
        self.assertEqual(r['bytes_experts'], 5 * 16 * 13056)  # five MoE layers, as the checkpoint's own shards hold
        self.assertEqual(r['tensors'], 636)
        self.ok('plan', os.path.join(TINY, 'config.json'), '--experts-per-rank', '4')
        self.assertEqual(run('plan', os.path.join(TINY, 'config.json'), '--experts-per-rank', '0').code, 2)


if __name__ == '__main__':
    main()
