"""tessera generate: what the model goes on with, its text, its states, its limits."""
import base64
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import time

from tinymodel import PREFIX, bf16, chain_model, change, change_config, random_model
from tsrtest import Case, SANITIZED, TESSERA, TINY, f32, main, model_backends, run, st_load, write

IDS = '1,5,77,300,12,511,9,9,200,41,7,100,33,250,499,2,64,128'


class GenerateCase(Case):
    def generate(self, path, *args, **kw):
        return self.ok('generate', path, '--json', *args, **kw).json()

    def tiny(self):
        shutil.copytree(TINY, self.path('hf'), ignore=shutil.ignore_patterns('expected.safetensors'))
        return self.path('hf')

    def logits(self, path, ids, *args):
        out = self.path('trace')
        self.ok('eval', path, '--ids', ','.join(map(str, ids)), '--trace', out, *args)
        t = st_load(os.path.join(out, 'trace.safetensors'))['logits']
        shutil.rmtree(out)
        v = t[1][1]
        return [struct.unpack(f'<{v}f', t[2][i * v * 4:(i + 1) * v * 4]) for i in range(t[1][0])]


class Greedy(GenerateCase):
    def test_most_probable(self):
        src = self.tiny()
        for name in model_backends():
            for chunk in (1, 7, 512):
                r = self.generate(src, '--ids', IDS, '-n', '12', '--ignore-eos', '--backend', name, '--prefill-chunk', chunk,
                                  '--logprobs', '3')
                rows = self.logits(src, r['prompt_ids'] + r['ids'], '--backend', name, '--prefill-chunk', '1')
                for row, id, lp in zip(rows[17:], r['ids'], r['logprobs']):
                    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
                    self.assertEqual(id, order[0])
                    self.assertEqual([t['id'] for t in lp['top']], order[:3])
                    top = max(row)
                    want = -math.log(sum(math.exp(x - top) for x in row))
                    self.assertAlmostEqual(lp['logprob'], want, places=3)
                    self.assertEqual(lp['logprob'], lp['top'][0]['logprob'])
        self.assertEqual((r['stop'], len(r['ids'])), ('length', 12))

    def test_stats(self):
        src = self.tiny()
        r = self.generate(src, '--ids', IDS, '-n', '5', '--ignore-eos', '--expert-cache', 8 * 13056)
        s = r['stats']
        self.assertEqual((s['prefill']['tokens'], s['decode']['tokens']), (18, 4))
        self.assertGreater(s['prefill']['tokens_per_second'], 0)
        self.assertGreater(s['first_token_seconds'], 0)
        for part in ('prefill', 'decode'):
            e = s[part]['experts']
            self.assertEqual(e['asked'], e['hits'] + e['misses'])
            self.assertAlmostEqual(e['bytes_read_per_token'], e['bytes_read'] / s[part]['tokens'])
        self.assertEqual(s['decode']['experts']['asked'], 4 * 5 * 4)  # tokens, layers, experts of a token
        self.assertIsNone(self.generate(src, '--ids', '1', '-n', '1')['stats']['decode']['experts'])
        r = self.ok('generate', src, '--ids', '1', '-n', '3', '--stats')
        for word in ('prefill', 'decode', 'tokens/s', 'first token'):
            self.assertIn(word, r.err.decode())

    def test_one_token_and_none(self):
        src = self.tiny()
        r = self.generate(src, '--ids', '7', '-n', '1', '--ignore-eos')
        self.assertEqual((len(r['ids']), r['stats']['decode']['tokens']), (1, 0))
        r = self.generate(src, '--ids', IDS, '-n', '0')
        self.assertEqual((r['ids'], r['text'], r['stop']), ([], '', 'length'))


class Drawing(GenerateCase):
    ARGS = ['--ids', '1,5,77', '-n', '40', '--ignore-eos', '--temperature', '1.1', '--top-k', '100', '--top-p', '0.95', '--min-p', '0.001']

    def test_seed_decides(self):
        src = self.tiny()
        for name in model_backends():
            want = self.generate(src, *self.ARGS, '--seed', '5', '--backend', name)['ids']
            for extra in (['--threads', '1'], ['--threads', '4'], ['--expert-cache', 5 * 13056], []):
                self.assertEqual(self.generate(src, *self.ARGS, '--seed', '5', '--backend', name, *extra)['ids'], want)
            self.assertNotEqual(self.generate(src, *self.ARGS, '--seed', '6', '--backend', name)['ids'], want)
        self.assertGreater(len(set(want)), 10)

    def test_narrow_filters_are_greedy(self):
        src = self.tiny()
        base = ['--ids', '1,5,77', '-n', '10', '--ignore-eos']
        want = self.generate(src, *base)['ids']
        for args in (['--top-k', '1'], ['--top-p', '0.000001'], ['--min-p', '1']):
            self.assertEqual(self.generate(src, *base, '--temperature', '1.5', '--seed', '9', *args)['ids'], want)


class Text(GenerateCase):
    """A model that generates what a table says."""
    BYTES = {'tiktoken.model': b''.join(base64.b64encode(b) + f' {i}\n'.encode() for i, b in enumerate(
        [b'\xf0\x9f', b'\x98\x80', b'\xff', b'\xe2\x8c', b' '] + [bytes([i]) for i in range(256) if i != 32]))}

    def chain(self, ids, **more):
        """A model that says ids after 299, then the end token 298."""
        follows = dict(zip([299] + ids, ids + [298]))
        shutil.rmtree(self.path('m'), ignore_errors=True)
        chain_model(self.path('m'), follows, 300, self.BYTES, eos_token_id=298, **more)
        return self.path('m')

    def test_character_over_two_tokens(self):
        for ids, text in (([0, 1], b'\xf0\x9f\x98\x80'), ([0, 4], b'\xef\xbf\xbd '), ([2], b'\xef\xbf\xbd'), ([3], b'\xef\xbf\xbd')):
            src = self.chain(ids)
            self.assertEqual(self.ok('generate', src, '--ids', '299').out, text + b'\n')
            r = self.generate(src, '--ids', '299')
            self.assertEqual((r['text'], r['ids'], r['stop']), (text.decode(), ids + [298], 'end'))
            raw = b''.join([b'\xf0\x9f', b'\x98\x80', b'\xff', b'\xe2\x8c', b' '][i] for i in ids)
            self.assertEqual(self.ok('generate', src, '--ids', '299', '--raw-bytes').out, raw)
            p = subprocess.Popen([TESSERA, 'generate', src, '--ids', '299'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0)
            parts = iter(lambda: p.stdout.read(1), b'')
            self.assertEqual(b''.join(parts), text + b'\n')
            p.stdout.close()
            p.wait()

    def test_stop_texts(self):
        letter = lambda c: 4 if c == ' ' else 5 + ord(c) - (ord(c) > 32)
        src = self.chain([letter(c) for c in 'quick brown'])  # no letter twice
        for stops, text in ((['brown'], 'quick '), (['k b'], 'quic'), (['zzz'], 'quick brown'), (['quit', 'ck'], 'qui'),
                            (['q'], ''), (['brownie'], 'quick brown'), (['n', 'brow'], 'quick ')):
            args = sum((['--stop', s] for s in stops), [])
            r = self.generate(src, '--ids', '299', *args)
            self.assertEqual((r['text'], r['stop']), (text, 'end' if text == 'quick brown' else 'text'))
            self.assertEqual(self.ok('generate', src, '--ids', '299', *args).text, text + '\n')
        r = self.generate(src, '--ids', '299', '-n', '3')
        self.assertEqual((r['text'], r['stop']), ('qui', 'length'))
        r = self.generate(src, '--ids', '299', '-n', '13', '--ignore-eos')
        self.assertEqual((r['ids'][11:], r['stop']), ([298, 299], 'length'))

    def test_prompts(self):
        letter = lambda c: 4 if c == ' ' else 5 + ord(c) - (ord(c) > 32)
        src = self.chain([letter('x')], bos_token_id=299)
        want = [letter(c) for c in 'hi there']
        self.assertEqual(self.generate(src, '--prompt', 'hi there', '-n', '0')['prompt_ids'], want)
        self.assertEqual(self.generate(src, '--prompt', 'hi there', '-n', '0', '--bos')['prompt_ids'], [299] + want)
        self.assertEqual(self.generate(src, '-f', write(self.path('p'), 'hi there'), '-n', '0')['prompt_ids'], want)
        for args in (['-'], ['-f', '-']):
            with open(self.path('p'), 'rb') as stdin:
                self.assertEqual(self.generate(src, *args, '-n', '0', stdin=stdin)['prompt_ids'], want)
        r = self.generate(src, '--prompt', '')  # from the begin token
        self.assertEqual((r['prompt_ids'], r['text']), ([299], 'x'))
        self.assertEqual(self.generate(src, '-', '-n', '0')['prompt_ids'], [299])  # an empty input
        change_config(src, bos_token_id=None)
        self.fails(2, ['empty', 'begin token'], 'generate', src, '--prompt', '')
        self.fails(2, 'begin token', 'generate', src, '--prompt', 'x', '--bos')

    def test_chat(self):
        names = ['<|open|>', '<|close|>', '<|sep|>', '<|end_of_msg|>']
        added = {str(280 + i): {'content': n, 'special': False} for i, n in enumerate(names)}
        letter = lambda c: 4 if c == ' ' else 5 + ord(c) - (ord(c) > 32)
        answer = [letter(c) for c in 'yo']
        follows = {282: answer[0], answer[0]: answer[1], answer[1]: 281}  # after <|sep|>
        files = {**self.BYTES, 'tokenizer_config.json': json.dumps({'added_tokens_decoder': added})}
        chain_model(self.path('m'), follows, 300, files)
        r = self.generate(self.path('m'), '--chat', '--prompt', 'hi <|sep|>')
        self.assertEqual((r['text'], r['ids'], r['stop']), ('yo', answer + [281], 'end'))
        self.assertEqual((r['prompt_ids'][0], r['prompt_ids'].count(282)), (280, 4))
        self.fails(2, '--chat', 'generate', self.path('m'), '--chat', '--ids', '1')
        shutil.rmtree(self.path('m'))
        chain_model(self.path('m'), {}, 300, self.BYTES)
        self.fails(4, ['<|open|>', 'missing'], 'generate', self.path('m'), '--chat', '--prompt', 'hi')

    def test_control_bytes_stay_off_terminals(self):
        import pty
        letter = lambda c: 5 + ord(c) - (ord(c) > 32)
        src = self.chain([letter('\x1b'), letter('['), letter('\n'), letter('x')])
        master, slave = pty.openpty()
        p = subprocess.run([TESSERA, 'generate', src, '--ids', '299'], stdout=slave, stderr=subprocess.DEVNULL)
        os.close(slave)
        self.assertEqual(p.returncode, 0)
        self.assertEqual(os.read(master, 100).replace(b'\r', b''), b'\\x1b[\nx\n')
        os.close(master)
        self.assertEqual(self.ok('generate', src, '--ids', '299').out, b'\x1b[\nx\n')

    def test_text_without_tokenizer(self):
        chain_model(self.path('m'), {ord('a'): ord('b')}, 300)
        r = self.ok('generate', self.path('m'), '--prompt', 'za', '-n', '2')
        self.assertEqual(r.text, 'bc\n')
        self.assertIn('bytes are taken as tokens', r.err.decode())
        chain_model(self.path('s'), {}, 200)
        self.fails(5, ['tiktoken.model', '--ids'], 'generate', self.path('s'), '--prompt', 'a')
        self.assertEqual(self.ok('generate', self.path('s'), '--ids', '10', '-n', '3').text, '11,12,13\n')

    def test_tokenizer_travels(self):
        src = self.chain([0, 1])
        self.ok('convert', src, self.path('c'))
        self.ok('pack', self.path('c'), self.path('c.tar'))
        for p in ('c', 'c.tar'):
            self.assertEqual(self.ok('generate', self.path(p), '--ids', '299').out, b'\xf0\x9f\x98\x80\n')

    def test_signal(self):
        chain_model(self.path('m'), {}, 300, context=1 << 30)
        p = subprocess.Popen([TESSERA, 'generate', self.path('m'), '--ids', '1', '-n', '1000000000', '--allow-longer', '--context', '4000000'],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        p.stdout.read(5)
        p.send_signal(signal.SIGINT)
        p.stdout.read()
        self.assertEqual(p.wait(), 130, p.stderr.read())
        p.stdout.close()
        p.stderr.close()

    def test_pipe(self):
        chain_model(self.path('m'), {}, 300)
        p = subprocess.Popen([TESSERA, 'generate', self.path('m'), '--ids', '1', '-n', '100000', '--allow-longer'], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
        p.stdout.read(3)
        p.stdout.close()
        self.assertIn(p.wait(), (141, -signal.SIGPIPE))
        p.stderr.close()


class State(GenerateCase):
    FIRST, SECOND = '1,5,77,300,12,511,9', '9,200,41,7'

    def test_equals_uninterrupted(self):
        src = self.tiny()
        for name in model_backends():
            for cache in ('f32', 'bf16'):
                args = ['-n', '8', '--ignore-eos', '--backend', name, '--cache-dtype', cache, '--logprobs', '2', '--temperature', '1',
                        '--seed', '4', '--prefill-chunk', '1']
                whole = self.generate(src, '--ids', self.FIRST + ',' + self.SECOND, *args)
                state = self.path(f'{name}-{cache}')
                self.generate(src, '--ids', self.FIRST, *args[2:], '-n', '0', '--save-state', state)
                r = self.generate(src, '--ids', self.SECOND, *args, '--load-state', state)
                self.assertEqual((r['ids'], r['logprobs']), (whole['ids'], whole['logprobs']))
                self.ok('verify', state)
        self.assertIn('layers.0.state', self.ok('ls', state).text)
        tokens = self.ok('cat', state, 'tokens').text.split()
        self.assertEqual(','.join(tokens), self.FIRST)

    def test_after_generating(self):
        """The state holds what was made, the last token too; states of states hold everything."""
        src = self.tiny()
        args = ['--ignore-eos', '--prefill-chunk', '1', '--logprobs', '0']
        a = self.generate(src, '--ids', self.FIRST, '-n', '5', *args, '--save-state', self.path('s'))
        b = self.generate(src, '--ids', self.SECOND, '-n', '6', *args, '--load-state', self.path('s'), '--save-state', self.path('t'))
        seen = a['prompt_ids'] + a['ids'] + b['prompt_ids']
        whole = self.generate(src, '--ids', ','.join(map(str, seen)), '-n', '6', *args)
        self.assertEqual((b['ids'], b['logprobs']), (whole['ids'], whole['logprobs']))
        self.assertEqual([int(x) for x in self.ok('cat', self.path('t'), 'tokens').text.split()], seen + b['ids'])

    def test_refusals(self):
        src, s = self.tiny(), self.path('s')
        self.ok('generate', src, '--ids', self.FIRST, '-n', '0', '--save-state', s)
        self.fails(6, 'exists already', 'generate', src, '--ids', '1', '--save-state', s)
        self.fails(6, 'shape or dtype', 'generate', src, '--ids', '1', '--load-state', s, '--cache-dtype', 'bf16')
        self.fails(2, ['8 tokens', 'those of the state', '7'], 'generate', src, '--ids', '1', '--load-state', s, '--context', '7')
        self.fails(2, ['empty', 'state'], 'generate', src, '--prompt', '', '--load-state', s)
        self.fails(4, 'no such', 'generate', src, '--ids', '1', '--load-state', self.path('no such'))
        random_model(self.path('other'), 2)
        self.fails(6, 'another model', 'generate', self.path('other'), '--ids', '1', '--load-state', s)
        self.ok('convert', self.path('other'), self.path('c'))
        self.fails(3, 'not the state', 'generate', src, '--ids', '1', '--load-state', self.path('c'))
        self.ok('verify', s)
        os.truncate(self.path('s', 'dense-00000-of-00001.h5'), 2000)
        r = run('generate', src, '--ids', '1', '--load-state', s)
        self.assertIn(r.code, (3, 4, 6), repr(r))


class Refusals(GenerateCase):
    def test_usage(self):
        src = self.tiny()
        self.fails(2, 'needs one of', 'generate', src)
        self.fails(2, 'only one of', 'generate', src, '--prompt', 'a', '--ids', '1')
        self.fails(2, 'only one of', 'generate', src, '--prompt', 'a', '-')
        self.fails(2, 'one operand too many', 'generate', src, 'hello')
        self.fails(2, '--think', 'generate', src, '--prompt', 'a', '--think')
        self.fails(2, '--json', 'generate', src, '--ids', '1', '--logprobs', '2')
        self.fails(2, '--json', 'generate', src, '--ids', '1', '--raw-bytes', '--json')
        for opt, value in (('--temperature', '-1'), ('--temperature', 'nan'), ('--top-p', '0'), ('--top-p', '1.5'), ('--min-p', '2'),
                           ('--top-k', '-1'), ('--max-tokens', 'x'), ('--seed', '18446744073709551616'), ('--stop', ''),
                           ('--cache-dtype', 'f16'), ('--prefill-chunk', '0'), ('--context', '0'), ('--ids', '1,512')):
            args = [opt, value] if opt == '--ids' else ['--ids', '1', opt, value]
            self.fails(2, opt.strip('-'), 'generate', src, *args)
        self.fails(2, 'quantum', 'generate', src, '--ids', '1', '--backend', 'quantum')
        self.fails(4, 'nowhere', 'generate', src, '-f', self.path('nowhere'))

    def test_context(self):
        src = self.tiny()
        self.fails(2, ['18 tokens', '10'], 'generate', src, '--ids', IDS, '--context', '10')
        self.fails(2, ['--context 9999', '4096'], 'generate', src, '--ids', '1', '--context', '9999')
        random_model(self.path('m'), context=10)
        long = ','.join(['7'] * 12)
        self.fails(2, ['12 tokens', '10', '--allow-longer'], 'generate', self.path('m'), '--ids', long)
        r = self.generate(self.path('m'), '--ids', long, '-n', '3', '--ignore-eos', '--allow-longer')
        self.assertEqual((r['stop'], len(r['ids'])), ('length', 3))
        r = self.generate(self.path('m'), '--ids', '7,7,7,7,7,7,7', '-n', '9', '--ignore-eos')
        self.assertEqual((r['stop'], len(r['ids'])), ('context', 4))  # the last one needs no position
        r = self.generate(self.path('m'), '--ids', '7,7,7,7,7,7,7', '-n', '9', '--ignore-eos', '--save-state', self.path('s'))
        self.assertEqual(len(self.ok('cat', self.path('s'), 'tokens').text.split()), 10)

    def test_memory(self):
        src = self.tiny()
        self.fails(8, ['memory', 'allowed'], 'generate', src, '--ids', '1', '--mem-limit', '4MiB')
        self.fails(8, 'expert cache', 'generate', src, '--ids', '1', '--expert-cache', '1KiB')

    def test_broken_numbers(self):
        random_model(self.path('m'))
        change(self.path('m'), PREFIX + 'norm.weight', lambda t: (t[0], t[1], b'\x80\x7f' + t[2][2:]))
        self.fails(9, ['position 2', 'token'], 'generate', self.path('m'), '--ids', '1,2')

    def test_damage(self):
        random_model(self.path('m'), layers=2, dense_layers=1)
        self.ok('convert', self.path('m'), self.path('c'), '--experts', '2')
        os.remove(self.path('c', 'experts-00001-of-00002.h5'))
        self.fails(4, 'experts-00001-of-00002.h5', 'generate', self.path('c'), '--ids', '1,2,3', '--expert-cache', '64KiB')
        change(self.path('m'), PREFIX + 'layers.1.block_sparse_moe.experts.5.w2.weight_scale', None)
        self.fails(4, ['layer 1', '5'], 'generate', self.path('m'), '--ids', '1')
        self.fails(3, 'config.json', 'generate', self.broken_config(), '--ids', '1')

    def broken_config(self):
        random_model(self.path('b'))
        write(self.path('b', 'config.json'), '{')
        return self.path('b')

    def test_shapes_and_tokenizer(self):
        random_model(self.path('m'))
        change(self.path('m'), PREFIX + 'norm.weight', lambda t: (t[0], [16], t[2][:32]))
        self.fails(6, 'norm.weight', 'generate', self.path('m'), '--ids', '1')
        random_model(self.path('t'), files={'tiktoken.model': b'junk\n'})
        self.fails(3, 'tiktoken.model', 'generate', self.path('t'), '--ids', '1')

    def test_full_output(self):
        src = self.tiny()
        with open('/dev/full', 'w') as full:
            p = subprocess.run([TESSERA, 'generate', src, '--ids', '1', '-n', '2'], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(p.returncode, 7, p.stderr)


class TiedHead(GenerateCase):
    HEAD, EMBED = 'language_model.lm_head.weight', PREFIX + 'embed_tokens.weight'

    def test_four_variants(self):
        m = self.path('m')
        random_model(m)
        embed = st_load(os.path.join(m, 'model.safetensors'))[self.EMBED]
        change_config(m, tie_word_embeddings=True)
        change(m, self.HEAD, lambda t: embed)
        with_head = self.logits(m, [1, 2, 3])
        self.ok('convert', m, self.path('c1'))
        change(m, self.HEAD, None)
        self.ok('convert', m, self.path('c2'))
        for p in (m, self.path('c1'), self.path('c2')):
            self.assertEqual(self.logits(p, [1, 2, 3]), with_head)
        change(m, self.HEAD, lambda t: (embed[0], embed[1], bytes([embed[2][0] ^ 1]) + embed[2][1:]))
        r = self.fails(6, ['lm_head.weight', 'differ'], 'generate', m, '--ids', '1')
        if not SANITIZED:
            self.assertLess(r.seconds, 1)
        change_config(m, tie_word_embeddings=False)
        change(m, self.HEAD, None)
        self.fails(4, 'lm_head.weight missing and tie_word_embeddings is false', 'generate', m, '--ids', '1')
        self.ok('generate', m, '--ids', '1', '-n', '1', '--tie-head')
        self.assertEqual(self.logits(m, [1, 2, 3], '--tie-head'), with_head)

    def test_differing_head_in_a_checkpoint(self):
        m, config = self.path('m'), self.path('c', 'assets', 'config.json')
        random_model(m)
        change_config(m, tie_word_embeddings=False)
        self.ok('convert', m, self.path('c'))
        text = open(config).read()
        write(config, text.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true '))
        self.fails(6, ['head.weight', 'embed.weight', 'differ'], 'generate', self.path('c'), '--ids', '1')


class KimiOddities(GenerateCase):
    def test_same_logits(self):
        ids = list(range(1, 9))
        random_model(self.path('a'), a_log=4, tail=9.9, conv_rank=3)
        want = self.logits(self.path('a'), ids)
        for name, over in (('b', dict(tail=-3.5)), ('c', dict(conv_rank=2)), ('d', dict(a_log=[1, 1, 3, 1])), ('e', dict(a_log=3)),
                           ('f', dict(a_log=8, tail=1e30))):
            random_model(self.path(name), **over)
            self.assertEqual(self.logits(self.path(name), ids), want, over)
            self.ok('convert', self.path(name), self.path(name + 'c'))
            self.assertEqual(self.logits(self.path(name + 'c'), ids), want, over)

    def test_layer_lists_count_from_one(self):
        random_model(self.path('a'), kinds='KM', layers=2)
        self.assertIn('layer 0 KDA, layer 1 MLA', self.ok('info', self.path('a')).text)
        self.ok('generate', self.path('a'), '--ids', '1', '-n', '2')
        random_model(self.path('b'), kinds='MK', layers=2)
        config = json.load(open(self.path('a', 'config.json')))
        config['text_config']['linear_attn_config'] = json.load(open(self.path('b', 'config.json')))['text_config']['linear_attn_config']
        write(self.path('a', 'config.json'), json.dumps(config))
        r = run('generate', self.path('a'), '--ids', '1')
        self.assertIn(r.code, (4, 6), repr(r))

    def test_top_k_of_two(self):
        random_model(self.path('a'), top_k=2)
        self.ok('eval', self.path('a'), '--ids', '1,2,3', '--routing', self.path('r.json'))
        layers = json.load(open(self.path('r.json')))['layers']
        self.assertEqual([sum(c) for c in layers.values()], [6, 6, 6])


class ManyExperts(GenerateCase):
    """896 experts, 16 of them per token, and a cache that holds just 16, a quarter, or all."""

    def test_cache_sizes(self):
        p = random_model(self.path('m'), experts=896, top_k=16, layers=3, kinds='KKM')
        self.ok('convert', self.path('m'), self.path('c'), '--experts', '8')
        ids = ','.join(str(7 * i % 300) for i in range(1, 8))
        args = ['--ids', ids, '-n', '4', '--ignore-eos', '--logprobs', '5', '--prefill-chunk', '3']
        want = None
        for src in (self.path('m'), self.path('c')):
            plan = self.generate(src, *args)
            one = plan['stats']['expert_bytes_all'] // (896 * 2)
            for n in (16, 896 * 2 // 4, 896 * 2):
                r = self.generate(src, *args, '--expert-cache', n * one)
                want = want or (plan['ids'], plan['logprobs'])
                self.assertEqual((r['ids'], r['logprobs']), want, n)
                cached = r['stats']['decode']['experts']
                self.assertEqual(cached is None, n == 896 * 2)
            self.fails(8, ['16 experts', str(16 * one)], 'generate', src, *args, '--json', '--expert-cache', 16 * one - 1)
        self.assertEqual(p['experts'], 896)


if __name__ == '__main__':
    main()
