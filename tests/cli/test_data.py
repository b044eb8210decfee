"""tessera data: text of every kind becomes tokens and comes back; hostile input, damage, killed builds."""
import bz2
import gzip
import io
import json
import lzma
import os
import random
import shutil
import signal
import struct
import subprocess
import tarfile
import time
import unittest

from tsrtest import Case, SANITIZED, TESSERA, main, run, tree, write

HEAD = 64


def lines(*texts, key='text'):
    return ''.join(json.dumps({key: t}, ensure_ascii=False) + '\n' for t in texts)


def tar_of(*members):
    blob = io.BytesIO()
    with tarfile.open(fileobj=blob, mode='w') as t:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return blob.getvalue()


def ids_of(folder, split='train', shard=0):
    """Documents of a shard of bytes as tokens, read by the page in docs/."""
    tok = open(os.path.join(folder, f'{split}-{shard:05}.tok'), 'rb').read()
    idx = open(os.path.join(folder, f'{split}-{shard:05}.idx'), 'rb').read()
    n, tokens = struct.unpack_from('<QQ', tok, 24)
    border = struct.unpack_from(f'<{n + 1}Q', idx, HEAD)
    ids = struct.unpack_from(f'<{tokens}H', tok, HEAD)
    return [ids[a:b] for a, b in zip(border, border[1:])]


class DataCase(Case):
    def build(self, *args, out='out', **kw):
        self.ok('data', 'build', *args, '--out', self.path(out), **kw)
        self.ok('data', 'verify', self.path(out))
        return self.path(out)

    def texts(self, folder, split='train'):
        out = []
        for i in range(self.ok('data', 'info', folder, '--json').json()[split]['documents']):
            out.append(self.ok('data', 'show', folder, '--doc', i, '--split', split).text)
        return out


class Formats(DataCase):
    def test_folder(self):
        for name, text in {'b.txt': 'second', 'a/z': 'first', 'c.md': 'third ü€😀', 'a.b': 'zero', 'empty': ''}.items():
            write(self.path('src', name), text)
        os.symlink(self.path('src', 'b.txt'), self.path('src', 'z-link'))
        out = self.build(self.path('src'))
        self.assertEqual(self.texts(out), ['first', 'zero', 'second', 'third ü€😀', 'second'])
        self.assertEqual([bytes(d[:-1]).decode() for d in ids_of(out)], self.texts(out))
        self.assertEqual({d[-1] for d in ids_of(out)}, {257})
        self.assertEqual(sorted(os.listdir(out)), ['data.json', 'train-00000.idx', 'train-00000.tok'])

    def test_lines(self):
        text = '\ufefftail'
        src = write(self.path('x.jsonl'), '\n' + lines('one', '', 'zwei\n"€"', '\u2028') + '  \r\n{"id": 99999999999999999999, "text": "crlf"}\r\n' +
                    json.dumps({'text': text}))
        out = self.build(src)
        self.assertEqual(self.texts(out), ['one', 'zwei\n"€"', '\u2028', 'crlf', text])
        shutil.copy(src, self.path('y.ndjson'))
        again = self.build(self.path('y.ndjson'), out='again')
        self.same_tree(out, again)

    def test_key(self):
        out = self.build(write(self.path('x.jsonl'), lines('one', 'two', key='body')), '--text-key', 'body')
        self.assertEqual(self.texts(out), ['one', 'two'])

    def test_compressed(self):
        plain, rows = 'häuser und höfe ' * 5000, lines('one', 'two ' * 9000, 'three')
        packers = {'gz': gzip.compress, 'xz': lzma.compress, 'bz2': bz2.compress}
        if shutil.which('zstd'):
            packers['zst'] = lambda b: subprocess.run(['zstd', '-qc'], input=b, stdout=subprocess.PIPE, check=True).stdout
        else:
            print('skipped: .zst, there is no zstd program')
        tar = tar_of(('a.txt', plain.encode()), ('d/b.jsonl', rows.encode()), ('c', b''))
        files = {'x.txt': plain.encode(), 'x.jsonl': rows.encode(), 'x.tar': tar}
        for name, blob in files.items():
            want = self.texts(self.build(write(self.path(name), blob), out='p' + name))
            self.assertEqual(want, {'x.txt': [plain], 'x.jsonl': ['one', 'two ' * 9000, 'three'],
                                    'x.tar': [plain, 'one', 'two ' * 9000, 'three']}[name])
            for ending, pack in packers.items():
                out = self.build(write(self.path(f'{name}.{ending}'), pack(blob)), out=f'o{name}{ending}')
                self.assertEqual(self.texts(out), want, ending)
        twice = self.build(write(self.path('two.gz'), gzip.compress(b'ab') + gzip.compress(b'cd')), out='twice')
        self.assertEqual(self.texts(twice), ['abcd'])

    def test_tokenizer_files_travel(self):
        import base64
        ranks = ''.join(f'{base64.b64encode(bytes([b])).decode()} {b}\n' for b in range(256))
        ranks += ''.join(f'{base64.b64encode(w).decode()} {256 + i}\n' for i, w in enumerate([b'th', b'the', b' the']))
        config = {'added_tokens_decoder': {'70000': {'content': '<end>', 'special': True}}, 'eos_token': '<end>'}
        write(self.path('tok', 'tiktoken.model'), ranks)
        write(self.path('tok', 'tokenizer_config.json'), json.dumps(config))
        write(self.path('tok', 'other.bin'), 'x')
        out = self.build(write(self.path('x.txt'), 'the the <end>'), '--tokenizer', self.path('tok'))
        facts = self.ok('data', 'info', out, '--json').json()
        self.assertEqual(facts['vocab'], 70001)
        self.assertEqual(facts['eos'], 70000)
        self.assertEqual(facts['train']['tokens'], 2 + 6 + 1)  # the, " the", " <end>" as text, the end
        self.assertEqual(self.texts(out), ['the the <end>'])
        self.assertEqual(sorted(os.listdir(os.path.join(out, 'tokenizer'))), ['tiktoken.model', 'tokenizer_config.json'])
        write(os.path.join(out, 'tokenizer', 'tiktoken.model'), ranks.replace(' 258', ' 259'))
        self.fails(3, 'tiktoken.model', 'data', 'verify', out)
        os.remove(os.path.join(out, 'tokenizer', 'tiktoken.model'))
        self.fails(4, 'tiktoken.model', 'data', 'verify', out)


class Options(DataCase):
    def source(self, n=400):
        r = random.Random(5)
        return write(self.path('x.jsonl'), lines(*(f'{i} ' + 'wort ' * r.randrange(60) for i in range(n))))

    def test_held_out(self):
        src = self.source()
        a, b = (self.build(src, '--held-out', '0.25', '--seed', seed, out=f'o{seed}') for seed in (1, 2))
        facts = self.ok('data', 'info', a, '--json').json()
        self.assertTrue(70 < facts['held']['documents'] < 130)
        numbers = [int(t.split()[0]) for t in self.texts(a) + self.texts(a, 'held')]
        self.assertEqual(sorted(numbers), list(range(400)))
        self.assertNotEqual(self.texts(a, 'held'), self.texts(b, 'held'))
        self.assertEqual(sum(facts['held']['lengths']['histogram']), facts['held']['documents'])
        written = json.load(open(os.path.join(a, 'data.json')))
        for split in ('train', 'held'):
            self.assertEqual(written['splits'][split]['lengths'], facts[split]['lengths'])

    def test_threads_do_not_matter(self):
        src = self.source(2000)
        want = tree(self.build(src, '--threads', 1, '--shard-tokens', 9000, '--held-out', '0.1', out='one'))
        for n, mem in ((2, '256M'), (4, '1M'), (4, '1G')):
            out = self.build(src, '--threads', n, '--mem-limit', mem, '--shard-tokens', 9000, '--held-out', '0.1', out=f'{n}{mem}')
            self.assertEqual(tree(out), want)
        self.assertGreater(len(want), 20)

    def test_no_eos(self):
        out = self.build(write(self.path('x'), 'abc'), '--no-eos')
        self.assertEqual(ids_of(out), [(97, 98, 99)])
        self.assertIsNone(self.ok('data', 'info', out, '--json').json()['eos'])

    def test_json(self):
        out, src = self.path('out'), write(self.path('x'), 'abc')
        facts = self.ok('data', 'build', src, src, '--out', out, '--json').json()
        self.assertEqual((facts['files'], facts['documents'], facts['train']), (2, 2, {'documents': 2, 'tokens': 8}))
        self.assertEqual(self.ok('data', 'info', out, '--json').json()['held']['lengths'], {'min': 0, 'mean': 0, 'max': 0, 'histogram': []})
        self.assertEqual(self.ok('data', 'verify', out, '--json').json()['tokens'], 8)
        self.assertEqual(self.ok('data', 'show', out, '--doc', 1, '--json').json()['text'], 'abc')
        self.assertIn('bytes, 512 ids', self.ok('data', 'info', out).text)

    def test_refused(self):
        src = write(self.path('x'), 'abc')
        out = self.build(src)
        new = self.path('new')
        self.fails(6, 'exists already', 'data', 'build', src, '--out', out)
        self.fails(2, '--out', 'data', 'build', src)
        self.fails(2, 'what to read', 'data', 'build', '--out', new)
        self.fails(2, 'build', 'data', 'bulid', src, '--out', new)
        self.fails(2, '--doc', 'data', 'show', out)
        self.fails(2, '--doc', 'data', 'info', out, '--doc', 1)
        self.fails(2, '--held-out', 'data', 'verify', out, '--held-out', 0)
        self.fails(2, 'one folder', 'data', 'verify', out, out)
        self.fails(2, '0.5', 'data', 'build', src, '--out', new, '--held-out', '0.6')
        self.fails(4, '0 held', 'data', 'show', out, '--doc', 0, '--split', 'held')
        self.fails(4, 'no such', 'data', 'build', self.path('no such'), '--out', new)
        self.fails(4, 'no such', 'data', 'info', self.path('no such'))
        self.fails(4, 'tiktoken.model', 'data', 'build', src, '--out', new, '--tokenizer', self.dir)
        os.mkdir(self.path('empty'))
        self.fails(4, 'no document', 'data', 'build', self.path('empty'), '--out', new)


class Hostile(DataCase):
    def refused(self, name, blob, *words, code=3):
        path = write(self.path(name), blob)
        self.fails(code, [name, *words], 'data', 'build', path, '--out', self.path('out'))
        os.remove(path)

    def test_text(self):
        self.refused('x.txt', b'abc\0def', 'byte 3', 'NUL')
        self.refused('x.txt', b'a' * 500000 + b'\0', 'byte 500000', 'NUL')
        for bad in (b'\xff', b'\xc0\x80', b'\xed\xa0\x80', b'\xf4\x90\x80\x80', b'\xe2\x82', b'\xe2\x82x', b'\x80', b'\xf8\x88\x80\x80\x80'):
            self.refused('x.txt', b'ab' + bad, 'byte 2', 'UTF-8')
            self.refused('x.tar', tar_of(('ok', b'fine'), ('in/side', b'ab' + bad)), 'in/side', 'byte 2', 'UTF-8')
            self.refused('x.jsonl', b'{"text": "' + bad + b'"}', 'line 1')

    def test_lines(self):
        good = lines('fine').encode()
        for bad, word in ((b'{', 'JSON'), (b'[1]', 'object'), (b'{"text": 1}', 'no string'), (b'{"txet": "a"}', '--text-key'), (b'{"text": "a\\u0000"}', 'JSON'),
                          (b'{"text": "\\ud800"}', 'JSON'), (b'{"text": "a"} x', 'JSON'), (b'{"text": "a\0"}', 'NUL'), (b'[' * 100000, 'JSON'), (b'"s"', 'JSON')):
            self.refused('x.jsonl', good + bad + b'\n' + good, 'line 2', word)
        self.refused('x.jsonl', good + b'{"text": "' + b'a' * (40 << 20) + b'"}', 'line 2', '--mem-limit', code=8)

    def test_archives(self):
        packed = gzip.compress(os.urandom(100000).hex().encode())
        self.refused('x.txt.gz', packed[:len(packed) // 2], 'damaged')
        self.refused('x.txt.gz', b'plain text', '.gz')
        self.refused('x.txt.gz', b'', '.gz')
        self.refused('x.txt.gz', gzip.compress(gzip.compress(b'twice')), 'more than once')
        self.refused('x.txt.xz', packed, '.xz')
        self.refused('x.txt.xz', lzma.compress(b'abc' * 999)[:-20], 'damaged')
        tar = tar_of(('a', b'x' * 5000))
        self.refused('x.tar', tar[:3000], 'damaged')
        self.refused('x.tar', b'no tar at all' * 100)
        blob = io.BytesIO()
        with tarfile.open(fileobj=blob, mode='w') as t:
            link = tarfile.TarInfo('link')
            link.type, link.linkname = tarfile.SYMTYPE, '/etc/passwd'
            t.addfile(link)
        self.refused('x.tar', blob.getvalue(), 'link', code=5)

    def test_folders(self):
        src = self.path('src')
        write(os.path.join(src, 'a'), 'text')
        os.symlink(src, os.path.join(src, 'loop'))
        self.fails(5, 'loop', 'data', 'build', src, '--out', self.path('out'))
        os.remove(os.path.join(src, 'loop'))
        os.symlink('nowhere', os.path.join(src, 'dangling'))
        self.fails(4, 'dangling', 'data', 'build', src, '--out', self.path('out'))
        os.remove(os.path.join(src, 'dangling'))
        os.mkfifo(os.path.join(src, 'pipe'))
        self.fails(5, 'pipe', 'data', 'build', src, '--out', self.path('out'))


class Damage(DataCase):
    def setUp(self):
        super().setUp()
        self.out = self.build(write(self.path('x.jsonl'), lines(*(f'document {i}' for i in range(50)))), '--held-out', '0.2')

    def copy(self):
        shutil.rmtree(self.path('bad'), ignore_errors=True)
        return shutil.copytree(self.out, self.path('bad'))

    def test_cut_and_missing(self):
        for name in os.listdir(self.out):
            blob = open(os.path.join(self.out, name), 'rb').read()
            for n in {0, 1, 63, 64, 65, len(blob) // 2, len(blob) - 1}:
                bad = self.copy()
                write(os.path.join(bad, name), blob[:n])
                self.fails(3, name, 'data', 'info', bad)
            bad = self.copy()
            if name != 'data.json':
                write(os.path.join(bad, name), blob + b'\0')
                self.fails(3, name, 'data', 'info', bad)
            os.remove(os.path.join(bad, name))
            self.fails(4, name, 'data', 'info', bad)

    def test_every_byte(self):
        r = random.Random(3)
        for name in os.listdir(self.out):
            blob = open(os.path.join(self.out, name), 'rb').read()
            at = set(range(min(HEAD, len(blob)))) | {r.randrange(len(blob)) for _ in range(60)}
            for k in at:
                bad = self.copy()
                write(os.path.join(bad, name), blob[:k] + bytes([blob[k] ^ 1 << r.randrange(8)]) + blob[k + 1:])
                result = run('data', 'verify', bad)
                white = name == 'data.json' and blob[k:k + 1] in b' \n'
                self.assertIn(result.code, (0, 3) if white else (3, 5), f'{name}: byte {k}: {result!r}')

    def test_borders(self):
        """Borders that are wrong though every checksum is right."""
        name = 'train-00000.idx'
        blob = open(os.path.join(self.out, name), 'rb').read()
        n = (len(blob) - HEAD) // 8
        border = list(struct.unpack_from(f'<{n}Q', blob, HEAD))
        for k, value in ((0, 1), (1, 0), (2, 1 << 63), (n - 1, border[-1] - 1), (n - 1, border[-1] + 1), (3, border[2]), (5, 2**64 - 1)):
            bad, other = self.copy(), list(border)
            other[k] = value
            write(os.path.join(bad, name), blob[:HEAD] + struct.pack(f'<{n}Q', *other))
            self.fails(3, [name, 'border'], 'data', 'info', bad)

    def test_json(self):
        text = open(os.path.join(self.out, 'data.json')).read()

        def changed(*keys, to):
            facts = json.loads(text)
            at = facts
            for k in keys[:-1]:
                at = at[k]
            at[keys[-1]] = to
            return json.dumps(facts)
        shard = ('splits', 'train', 'shards', 0)
        for bad in ('', '[]', '{', '{}', text + 'x', changed('version', to='1'), changed('vocab', to=0), changed('vocab', to=1 << 40),
                    changed('eos', to=512), changed('eos', to=-2), changed('eos', to=None), changed('dtype', to='u32'), changed('format', to='x'),
                    changed('splits', to=[]), changed('splits', 'train', 'shards', to={}), changed('splits', 'held', 'documents', to=10**6),
                    changed(*shard, 'documents', to=2**62), changed(*shard, 'tokens', to=2**63 - 1), changed(*shard, 'documents', to=0),
                    changed(*shard, 'tokens', to=-1), changed(*shard, 'tok', to='../x.tok'), changed(*shard, 'tok_xxh3', to='0' * 15),
                    changed(*shard, 'idx_xxh3', to='0' * 16), changed('hash', to='0' * 16), changed('check', to='0' * 16), changed('options', 'seed', to='7'),
                    changed('tokenizer', to=None), changed('tokenizer', 'files', to=[{'name': '../../x', 'bytes': 1, 'xxh3': '0' * 16}])):
            folder = self.copy()
            write(os.path.join(folder, 'data.json'), bad)
            self.fails(3, 'data.json', 'data', 'info', folder)
        folder = self.copy()
        write(os.path.join(folder, 'data.json'), changed('version', to=2))
        self.fails(5, 'version 2', 'data', 'info', folder)
        write(os.path.join(folder, 'data.json'), changed('tokenizer', 'kind', to='sentencepiece'))
        self.fails(5, 'sentencepiece', 'data', 'info', folder)


class Resume(DataCase):
    def source(self, n, words):
        r = random.Random(8)
        return write(self.path('src', 'x.jsonl'), lines(*(f'{i} ' + 'some words ' * r.randrange(words) for i in range(n))))

    def test_killed(self):
        src = self.source(20000, 100)
        options = [src, '--shard-tokens', '100000', '--held-out', '0.05']
        want = tree(self.build(*options, out='whole'))
        killed, out, begin = 0, self.path('out'), time.monotonic()
        wait = 0.02
        while not os.path.exists(out):
            p = subprocess.Popen([TESSERA, 'data', 'build', *options, '--out', out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                self.assertEqual(p.wait(wait), 0)
            except subprocess.TimeoutExpired:
                p.send_signal(signal.SIGKILL)
                killed += p.wait() == -signal.SIGKILL
                wait *= 1.5
            self.assertLess(time.monotonic() - begin, 300)
        self.assertGreater(killed, 1)
        self.assertEqual(tree(out), want)
        self.assertEqual([n for n in os.listdir(self.dir) if n.startswith('.')], [])

    def stopped(self, *args):
        """A build that ended by a signal after its first shard."""
        p = subprocess.Popen([TESSERA, 'data', 'build', *args, '--out', self.path('out')], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while p.poll() is None and not os.path.exists(self.path('.out.partial', 'train-00001.tok')):
            time.sleep(0.001)
        p.send_signal(signal.SIGTERM)
        message = p.communicate()[1].decode()
        if os.path.exists(self.path('out')):
            raise unittest.SkipTest('the build was faster than the signal')
        self.assertIn('goes on', message)

    def test_other_options(self):
        src = self.source(20000, 200)
        options = [src, '--shard-tokens', '50000']
        self.stopped(*options)
        for more in (['--seed', '1'], ['--held-out', '0.1'], ['--no-eos'], ['--text-key', 'x']):
            self.fails(6, '--restart', 'data', 'build', *options, *more, '--out', self.path('out'))
        os.utime(src, (1, 1))
        self.fails(6, '--restart', 'data', 'build', *options, '--out', self.path('out'))
        facts = self.ok('data', 'build', *options, '--restart', '--out', self.path('out'), '--json').json()
        self.assertEqual((facts['resumed_documents'], facts['documents']), (0, 20000))

    def test_goes_on(self):
        src = self.source(20000, 200)
        options = [src, '--shard-tokens', '50000']
        self.stopped(*options)
        facts = self.ok('data', 'build', *options, '--out', self.path('out'), '--json').json()
        self.assertGreater(facts['resumed_documents'], 0)
        self.same_tree(self.path('out'), self.build(*options, out='whole'))

    def test_damaged_partial(self):
        src = self.source(20000, 200)
        options = [src, '--shard-tokens', '50000', '--out', self.path('out')]
        self.stopped(*options[:3])
        partial = self.path('.out.partial')
        os.truncate(os.path.join(partial, 'train-00000.tok'), 100)
        self.fails(3, ['train-00000.tok', '--restart'], 'data', 'build', *options)
        write(os.path.join(partial, 'build.json'), '{"key"')
        self.fails(3, 'build.json', 'data', 'build', *options)
        self.ok('data', 'build', *options, '--restart')

    def test_inside_its_input(self):
        """A partial folder below the input is not read."""
        write(self.path('src', 'a'), 'text')
        self.ok('data', 'build', '.', '--out', 'out', cwd=self.path('src'))
        os.mkdir(self.path('src', '.new.partial'))
        shutil.rmtree(self.path('src', 'out'))
        write(self.path('src', '.new.partial', 'train-00000.tok'), b'\0')
        self.ok('data', 'build', '.', '--out', 'new', cwd=self.path('src'))


if __name__ == '__main__':
    main()
