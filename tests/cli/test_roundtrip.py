"""There and back: safetensors -> Tessera -> reshard -> pack -> safetensors gives the same bytes and the same files."""
import json
import os
import shutil
import struct
import subprocess
import sys
import time

from tsrtest import Case, TESSERA, TINY, f32, main, run, st, st_load, tree, write


def source_files(path):
    return {n: h for n, h in tree(path).items() if n != 'expected.safetensors'}


class RealLayout(Case):
    """The small checkpoint in the released Kimi K3 layout."""

    def setUp(self):
        super().setUp()
        self.src = self.path('hf')
        shutil.copytree(TINY, self.src, ignore=shutil.ignore_patterns('expected.safetensors'))

    def test_circle_of_partitions(self):
        self.ok('convert', self.src, self.path('c1'), '--experts', '1')
        last = self.path('c1')
        for n in (4, 2, 16, 1):
            to = self.path(f'c{n}-')
            self.ok('reshard', last, to, '--experts', n)
            self.ok('verify', to)
            last = to
        r = self.ok('convert', last, self.path('back'), '--json')
        self.assertTrue(r.json()['identical_files'])
        self.same_tree(self.src, self.path('back'))
        self.ok('diff', self.src, last)

    def test_compressed_in_a_tar(self):
        self.ok('convert', self.src, self.path('c'), '--experts', '4', '--compress')
        self.ok('pack', self.path('c'), self.path('c.tar'))
        self.ok('verify', self.path('c.tar'))
        self.ok('diff', self.src, self.path('c.tar'))
        self.ok('convert', self.path('c.tar'), self.path('back'))
        self.same_tree(self.src, self.path('back'))
        self.ok('unpack', self.path('c.tar'), self.path('u'))
        self.same_tree(self.path('c'), self.path('u'))
        self.ok('reshard', self.path('c.tar'), self.path('r'), '--experts', '2')
        self.ok('diff', self.src, self.path('r'))
        self.ok('verify', '--deep', self.path('r'))

    def test_families_differ(self):
        self.ok('convert', self.src, self.path('c'))
        shutil.copytree(self.src, self.path('linear'))
        config = self.path('linear', 'config.json')
        with open(config) as f:
            text = f.read()
        write(config, text.replace('"kimi_k3"', '"kimi_linear"', 1))
        r = run('diff', self.path('c'), self.path('linear'), '--json')
        self.assertEqual(r.code, 1, repr(r))
        self.assertTrue(r.json()['arch_differs'])
        self.assertIn('arch: differs', run('diff', self.path('c'), self.path('linear')).text)
        r = run('diff', self.path('c'), self.path('linear'), '*final_norm*', '--json')
        self.assertFalse(r.json()['arch_differs'], 'of no interest with a glob')
        r = run('diff', self.path('c'), self.path('linear'), '--arch', 'kimi-k3', '--json')
        self.assertFalse(r.json()['arch_differs'], repr(r))

    def test_tar_through_pipes(self):
        self.ok('convert', self.src, self.path('c'))
        with open(self.path('c.tar.zst'), 'wb') as out:
            subprocess.run([TESSERA, 'pack', self.path('c'), '-', '--zstd'], stdout=out, check=True)
        with open(self.path('c.tar.zst'), 'rb') as stdin:
            self.ok('unpack', '-', self.path('u'), stdin=stdin)
        self.same_tree(self.path('c'), self.path('u'))
        subprocess.run(['tar', 'cf', self.path('plain.tar'), '-C', self.dir, 'c'], check=True)
        self.ok('verify', self.path('plain.tar'))
        self.fails(5, 'unpack', 'ls', self.path('c.tar.zst'))

    def test_export_is_deterministic(self):
        self.ok('convert', self.src, self.path('c'))
        for name in 'ab':
            self.ok('convert', self.path('c'), self.path(name), '--shard-size', '1MiB')
        self.same_tree(self.path('a'), self.path('b'))
        got, want = {}, {}
        for path, to in ((self.path('a'), got), (self.src, want)):
            for name in os.listdir(path):
                if name.endswith('.safetensors'):
                    to.update(st_load(os.path.join(path, name)))
        self.assertEqual(got, want)
        index = json.load(open(self.path('a', 'model.safetensors.index.json')))
        self.assertEqual(set(index['weight_map']), set(want))

    def test_equal_input_gives_equal_shards(self):
        for name in 'ab':
            self.ok('convert', self.src, self.path(name), '--experts', '2', '--compress')
            time.sleep(1.1)  # no clock may leave its mark
        shards = [{n: h for n, h in tree(self.path(x)).items() if n.endswith('.h5')} for x in 'ab']
        self.assertEqual(*shards)

    def test_written_anew(self):
        """Compressing a checkpoint keeps what it is: arch, assets, history; the files still come back."""
        self.ok('convert', self.src, self.path('c'), '--experts', '2')
        self.ok('convert', self.path('c'), self.path('z'), '--to', 'tessera', '--compress', '--experts', '4')
        self.ok('diff', self.path('c'), self.path('z'))
        manifest = json.load(open(self.path('z', 'manifest.json')))
        self.assertEqual(manifest['arch'], 'kimi-k3')
        self.assertEqual([s['op'] for s in manifest['lineage']], ['convert', 'convert'])
        self.ok('convert', self.path('z'), self.path('back'))
        self.same_tree(self.src, self.path('back'))

    def test_part_of_it(self):
        self.ok('convert', self.src, self.path('c'), '--include', '*layers.2.*', '--exclude', '*experts*')
        names = self.ok('ls', self.path('c')).text
        self.assertIn('layers.2.attn.q.weight', names)
        self.assertNotIn('layers.1.', names)
        self.assertNotIn('experts', names)
        self.ok('convert', self.src, self.path('st'), '--to', 'safetensors', '--shard-size', '2MiB')
        self.ok('diff', self.src, self.path('st'))

    def test_ls_and_info(self):
        self.ok('convert', self.src, self.path('c'), '--experts', '4')
        self.assertIn('layers.1.experts.{e}.gate.weight', self.ok('ls', self.path('c')).text)
        one = self.ok('ls', '-l', self.path('c'), 'layers.1.experts.7.*').text
        self.assertIn('layers.1.experts.7.gate.weight', one)
        self.assertIn('mxfp4', one)
        info = self.ok('info', self.path('c')).text
        self.assertIn('experts-00000-of-00004.h5', info)
        self.assertIn('kimi-k3', info)
        self.assertEqual(self.ok('info', '--json', self.path('c')).json()['arch'], 'kimi-k3')
        self.ok('ls', '--json', self.path('c'))
        self.ok('ls', self.src)

    def test_dry_run_writes_nothing(self):
        before = tree(self.dir)
        r = self.ok('convert', '--dry-run', '--json', self.src, self.path('c'))
        self.assertEqual(tree(self.dir), before)
        plan = r.json()
        index = json.load(open(os.path.join(self.src, 'model.safetensors.index.json')))
        self.assertEqual(plan['tensors_in'], len(index['weight_map']))
        self.assertEqual(plan['tensors_ignored'], 0)

    def test_missing_expert(self):
        name = 'model-00002-of-000004.safetensors'
        held = st_load(os.path.join(self.src, name))
        gone = 'language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight_packed'
        self.assertIn(gone, held)
        write(os.path.join(self.src, name), st([(k, *v) for k, v in held.items() if k != gone]))
        index = json.load(open(os.path.join(self.src, 'model.safetensors.index.json')))
        del index['weight_map'][gone]
        write(os.path.join(self.src, 'model.safetensors.index.json'), json.dumps(index))
        self.fails(4, ['layer 2', 'experts 5 missing'], 'convert', self.src, self.path('out'))


class RawBags(Case):
    def circle(self, data, name='x.safetensors'):
        src = write(self.path('in', name), data)
        self.ok('convert', '--arch', 'raw', self.path('in'), self.path('c'))
        self.ok('verify', '--deep', self.path('c'))
        self.ok('convert', self.path('c'), self.path('back'))
        self.same_tree(self.path('in'), self.path('back'))
        self.ok('diff', self.path('in'), self.path('c'))
        return src

    def test_zero_elements_and_scalars(self):
        self.circle(st([('scaled_fp8', 'F16', [0], b''), ('a', 'F32', [2, 0, 3], b''), ('s', 'F32', [], f32(9)),
                        ('w', 'F32', [1], f32(1))]))
        rows = {r['name']: r['shape'] for r in self.ok('ls', '--json', self.path('c')).json()['tensors']}
        self.assertEqual(rows, {'scaled_fp8': [0], 'a': [2, 0, 3], 's': [], 'w': [1]})
        self.assertEqual(self.ok('cat', self.path('c'), 's').text.split(), ['9'])

    def test_every_dtype(self):
        sizes = {'F64': 8, 'F32': 4, 'F16': 2, 'BF16': 2, 'F8_E4M3': 1, 'F8_E5M2': 1, 'F8_E8M0': 1, 'I64': 8, 'I32': 4,
                 'I16': 2, 'I8': 1, 'U64': 8, 'U32': 4, 'U16': 2, 'U8': 1, 'BOOL': 1}
        self.circle(st([(t.lower(), t, [3, 2], os.urandom(6 * n) if t != 'BOOL' else bytes([0, 1] * 3))
                        for t, n in sizes.items()] + [('four', 'F4', [2, 4], os.urandom(4))]))

    def test_odd_names_and_big_metadata(self):
        names = ['a/b', '.', '..', '%2F', 'ünï', 'line\nbreak', 'x' * 1000, '{e}', '<script>', 'with "quote"']
        self.circle(st([(n, 'U8', [1], bytes([i])) for i, n in enumerate(names)]))

    def test_two_thousand_long_names(self):
        long = [(f'{i:04d}' + 'n' * 96, 'U8', [1], bytes([i % 256])) for i in range(2000)]
        self.circle(st(long, meta={'big': 'm' * 100000}))

    def test_bfloat16_bits(self):
        bits = struct.pack('<5H', 0x7FC1, 0xFFC0, 0x7F81, 0x8000, 0x0001)
        self.circle(st([('b', 'BF16', [5], bits)]))
        hexes = self.ok('cat', '--format', 'hex', self.path('c'), 'b').text.split()
        self.assertEqual(hexes, ['7fc1', 'ffc0', '7f81', '8000', '0001'])

    def test_expert_order_is_numeric(self):
        order = ['0', '1', '10', '11'] + [str(i) for i in range(2, 10)]
        entries = [(f'layers.10.experts.{e}.w1.weight', 'F32', [1, 2], f32(int(e), int(e))) for e in order]
        write(self.path('in', 'model-00001-of-00002.safetensors'), st([entries[2], entries[3]] + entries[4:8]))
        write(self.path('in', 'model-00002-of-00002.safetensors'), st(entries[:2] + entries[8:]))
        self.ok('convert', '--arch', 'canonical', self.path('in'), self.path('c'))
        for e in range(12):
            self.assertEqual(self.ok('cat', self.path('c'), f'layers.10.experts.{e}.w1.weight').text.split(), [str(e)] * 2)
        self.ok('reshard', self.path('c'), self.path('d'), '--experts', '3')
        self.ok('convert', self.path('d'), self.path('back'))
        self.same_tree(self.path('in'), self.path('back'))

    def test_single_file_out(self):
        src = self.circle(st([('a', 'F32', [2], f32(1, 2)), ('b', 'U8', [3], b'xyz')], meta={'k': 'v'}))
        self.ok('convert', self.path('c'), self.path('one.safetensors'))
        self.assertEqual(st_load(self.path('one.safetensors')), st_load(src))


class KimiOddities(Case):
    def build(self, a_log_shape, conv_shape, tail=9.9):
        k = 'language_model.model.'
        D, H, hd, V = 8, 3, 4, 4
        w, layers = H * hd, []
        mat = lambda o, i: bytes(range(256))[:1] * (o * i * 4)
        t = [(k + 'embed_tokens.weight', 'F32', [V, D], mat(V, D)), (k + 'norm.weight', 'F32', [D], mat(1, D)),
             ('language_model.lm_head.weight', 'F32', [V, D], mat(V, D))]
        for i in range(2):
            b = f'{k}layers.{i}.'
            t += [(b + n, 'F32', [D], mat(1, D)) for n in ('input_layernorm.weight', 'post_attention_layernorm.weight')]
            t += [(b + f'mlp.{n}_proj.weight', 'F32', [o, c], mat(o, c)) for n, o, c in (('gate', 6, D), ('up', 6, D), ('down', D, 6))]
        b = k + 'layers.0.self_attn.'
        t += [(b + f'{n}_proj.weight', 'F32', [w, D], mat(w, D)) for n in 'qkvg']
        t += [(b + 'o_proj.weight', 'F32', [D, w], mat(D, w))]
        t += [(b + f'{n}_conv1d.weight', 'F32', conv_shape, mat(w, 4)) for n in 'qkv']
        t += [(b + 'f_a_proj.weight', 'F32', [hd, D], mat(hd, D)), (b + 'f_b_proj.weight', 'F32', [w, hd], mat(w, hd)),
              (b + 'b_proj.weight', 'F32', [H, D], mat(H, D)), (b + 'dt_bias', 'F32', [w], mat(1, w)),
              (b + 'A_log', 'F32', a_log_shape, f32(.1, .2, .3, tail)[:4 * (4 if a_log_shape == [4] else 3)]),
              (b + 'o_norm.weight', 'F32', [hd], mat(1, hd))]
        b = k + 'layers.1.self_attn.'
        t += [(b + n, 'F32', s, mat(s[0], s[1] if len(s) > 1 else 1)) for n, s in (
            ('q_proj.weight', [H * 6, D]), ('kv_a_proj_with_mqa.weight', [5 + 2, D]), ('kv_a_layernorm.weight', [5]),
            ('kv_b_proj.weight', [H * 8, 5]), ('g_proj.weight', [H * 4, D]), ('o_proj.weight', [D, H * 4]))]
        config = {'model_type': 'kimi_k3', 'text_config': dict(
            hidden_size=D, num_hidden_layers=2, vocab_size=V, first_k_dense_replace=2, intermediate_size=6,
            num_attention_heads=H, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, num_experts=4,
            num_experts_per_token=2, moe_intermediate_size=2, mla_use_nope=True, unknown_key={'kept': [1]},
            linear_attn_config=dict(num_heads=H, head_dim=hd, short_conv_kernel_size=4, kda_layers=[1], full_attn_layers=[2]))}
        write(self.path('in', 'model.safetensors'), st(t))
        write(self.path('in', 'config.json'), json.dumps(config))

    def circle(self):
        self.ok('convert', self.path('in'), self.path('c'))
        text = self.ok('info', self.path('c')).text
        self.assertIn('layer 0 KDA, layer 1 MLA', text)
        self.assertIn('top-k 2', text.replace('top-k: 2', 'top-k 2'))
        self.ok('convert', self.path('c'), self.path('back'))
        self.same_tree(self.path('in'), self.path('back'))

    def test_padded_a_log(self):
        self.build([4], [12, 1, 4])
        self.circle()
        self.assertEqual(self.ok('cat', '--as', 'f32', self.path('c'), 'layers.0.attn.a_log').text.split()[3], '9.89999962')

    def test_other_shapes(self):
        self.build([1, 1, 3, 1], [12, 4])
        self.circle()

    def test_older_spellings(self):
        import json as j
        self.build([4], [12, 1, 4])
        held = st_load(self.path('in', 'model.safetensors'))
        k = 'language_model.model.'
        extra = [(f'{k}layers.{i}.{p}.{q}_weight', 'F32', [8] if q == 'norm' else [1, 8], bytes(32))
                 for i in range(2) for p in ('self_attention_res', 'mlp_res') for q in ('norm', 'proj')]
        extra += [(k + f'output_attn_res.{q}_weight', 'F32', [8] if q == 'norm' else [1, 8], bytes(32)) for q in ('norm', 'proj')]
        config = j.load(open(self.path('in', 'config.json')))
        config['text_config']['attn_res_block_size'] = 1
        write(self.path('in', 'config.json'), j.dumps(config))
        write(self.path('in', 'model.safetensors'), st([(n, *v) for n, v in held.items()] + extra))
        self.circle()
        self.assertIn('layers.1.mlp_res.proj.weight', self.ok('ls', self.path('c')).text)


class FusedExperts(Case):
    """gate_up_proj in two layouts of one shape: the model type decides, never the shape."""
    NAME = 'model.layers.0.mlp.experts.gate_up_proj'

    def build(self, shape, value, model_type=None):
        data = f32(*[value(e, a, b) for e in range(shape[0]) for a in range(shape[1]) for b in range(shape[2])])
        write(self.path('in', 'model.safetensors'), st([(self.NAME, 'F32', shape, data)]))
        if model_type:
            write(self.path('in', 'config.json'), json.dumps({'model_type': model_type}))

    def matrix(self, name):
        return [[float(v) for v in line.split()] for line in self.ok('cat', self.path('c'), name).text.strip().split('\n')]

    def expect(self, gate, up):
        self.ok('verify', self.path('c'))
        for e in range(2):
            shift = lambda rows: [[v + 100 * e for v in r] for r in rows]
            self.assertEqual(self.matrix(f'layers.0.experts.{e}.gate.weight'), shift(gate))
            self.assertEqual(self.matrix(f'layers.0.experts.{e}.up.weight'), shift(up))
        shutil.rmtree(self.path('c'))

    def test_interleaved(self):
        want = [[0, 10], [2, 12], [4, 14]], [[1, 11], [3, 13], [5, 15]]
        self.build([2, 2, 6], lambda e, h, c: 100 * e + 10 * h + c)
        self.fails(6, [self.NAME, '--gate-up interleaved|halves'], 'convert', self.path('in'), self.path('c'))
        self.ok('convert', '--gate-up', 'interleaved', self.path('in'), self.path('c'))
        self.expect(*want)
        self.build([2, 2, 6], lambda e, h, c: 100 * e + 10 * h + c, 'gpt_oss')
        self.ok('convert', self.path('in'), self.path('c'))
        self.expect(*want)

    def test_halves(self):
        want = [[0, 1], [10, 11], [20, 21]], [[30, 31], [40, 41], [50, 51]]
        self.build([2, 6, 2], lambda e, r, h: 100 * e + 10 * r + h, 'mixtral')
        self.ok('convert', self.path('in'), self.path('c'))
        self.expect(*want)
        self.build([2, 6, 2], lambda e, r, h: 100 * e + 10 * r + h, 'never_heard_of')
        self.fails(6, 'never_heard_of', 'convert', self.path('in'), self.path('c'))
        self.ok('convert', '--gate-up', 'halves', self.path('in'), self.path('c'))
        self.expect(*want)

    def test_raw_keeps_it_whole(self):
        self.build([2, 6, 2], lambda e, r, h: 0)
        self.ok('convert', '--arch', 'raw', self.path('in'), self.path('c'))
        self.ok('convert', self.path('c'), self.path('back'))
        self.same_tree(self.path('in'), self.path('back'))


class TiedHead(Case):
    def build(self, tied, head):
        embed = f32(*range(8))
        t = [('embed_tokens.weight', 'F32', [4, 2], embed)]
        if head is not None:
            t.append(('lm_head.weight', 'F32', [4, 2], head(embed)))
        write(self.path('in', 'model.safetensors'), st(t))
        write(self.path('in', 'config.json'), json.dumps({'tie_word_embeddings': tied}))

    def test_four_variants(self):
        for head in (None, lambda e: e):
            self.build(True, head)
            self.ok('convert', self.path('in'), self.path('c'))
            self.ok('convert', self.path('c'), self.path('back'))
            self.same_tree(self.path('in'), self.path('back'))
            shutil.rmtree(self.path('c'))
            shutil.rmtree(self.path('back'))
        self.build(True, lambda e: bytes([e[0] ^ 1]) + e[1:])
        self.fails(6, ['lm_head.weight', 'differ'], 'convert', self.path('in'), self.path('c'))
        self.build(False, None)
        self.fails(4, 'lm_head.weight missing and tie_word_embeddings is false', 'convert', self.path('in'), self.path('c'))
        self.ok('convert', '--tie-head', self.path('in'), self.path('c'))


if __name__ == '__main__':
    main()
