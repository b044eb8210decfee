"""tessera extend: weights and moments are carried, the context is raised, training goes on as if the stage had always been there."""
import json
import os
import random
import shutil

from tsrtest import Case, TINY, main, tree, write

MODEL = '''model:
  family: kimi-k3
  layers: 2
  hidden: 32
  vocab: 512
  first_dense: 1
  dense_width: 48
  kda_heads: 2
  kda_head_dim: 16
  full_attention_every: 2
  mla_heads: 2
  q_lora: 16
  kv_lora: 16
  qk_nope: 16
  qk_rope: 8
  v_head: 16
  experts: 8
  top_k: 2
  expert_width: 16
  res_block: 1
'''
SHORT = '  - {name: short, context: 16, steps: 4, batch_tokens: 128, schedule: cosine, lr: 0.01, warmup: 1}\n'
LONG = '  - {name: NAME, context: 64, steps: 4, batch_tokens: 128, schedule: cosine, lr: 0.01, warmup: 1}\n'


class ExtendCase(Case):
    def setUp(self):
        super().setUp()
        words = random.Random(3)
        text = ' '.join(words.choice(['one', 'two', 'three', 'four', 'tree', 'sea', 'stone']) for _ in range(6000))
        for i, part in enumerate([text[k:k + 150] for k in range(0, len(text), 150)]):
            write(self.path('text', f'{i:04}.txt'), part)
        self.ok('data', 'build', self.path('text'), '--out', self.path('data'))

    def recipe(self, name, stages, model=MODEL, more=''):
        return write(self.path(name), f'{model}data:\n  sources:\n    - {{name: text, path: data}}\nstages:\n{stages}'
                     f'checkpoint: {{every: 3, keep_last: 0}}\nlog: {{tensorboard: false}}\nseed: 5\n{more}')

    def train(self, recipe, out, *args):
        self.ok('train', recipe, '--out', self.path(out), *args)
        return self.path(out)

    def short(self, **kw):
        """A run of the first stage only, and the checkpoint at its end."""
        self.train(self.recipe('short.yaml', SHORT, **kw), 'old')
        return self.path('old', 'step-00000004')

    def state(self, path):
        return json.load(open(os.path.join(path, 'train.json')))

    def manifest(self, path):
        return json.load(open(os.path.join(path, 'manifest.json')))

    def names(self, path):
        return [t['name'] for t in self.ok('ls', path, '--json').json()['tensors']]

    def context_of(self, path):
        """Of the manifest, the asset and the recipe: they must agree."""
        text = self.manifest(path)['config']['text_config']
        asset = json.load(open(os.path.join(path, 'assets', 'config.json')))['text_config']
        model = self.state(path)['recipe']['model']
        self.assertEqual({text['max_position_embeddings'], asset['max_position_embeddings'], model['context']},
                         {model['context']})
        return model['context']


class Carried(ExtendCase):
    def test_all(self):
        src, dst = self.short(), self.path('run', 'step-00000004')
        before = tree(src)
        os.mkdir(self.path('run'))
        r = self.ok('extend', src, dst, '--context', 64)
        self.assertEqual(tree(src), before)
        self.assertIn('16 -> 64', r.text)
        self.assertIn('nothing is rescaled', r.text)
        self.ok('verify', dst, '--deep')
        self.ok('diff', src, dst, '*')
        self.assertEqual(self.names(src), self.names(dst))
        self.assertEqual((self.context_of(src), self.context_of(dst)), (16, 64))
        old, new = self.state(src), self.state(dst)
        for key in ['step', 'tokens', 'skipped', 'mean_loss_hex', 'updates', 'usual_updates']:
            self.assertEqual(old[key], new[key], key)
        self.assertEqual((new['stage'], new['stage_step']), ('context-64', 0))
        self.assertEqual([s['name'] for s in new['recipe']['stages']], ['short', 'context-64'])
        self.assertEqual({**old['recipe']['stages'][0], 'name': 'context-64', 'context': 64}, new['recipe']['stages'][1])
        lineage = self.manifest(dst)['lineage']
        self.assertEqual(lineage[:-1], self.manifest(src)['lineage'])
        step = lineage[-1]
        self.assertEqual((step['op'], step['context'], step['context_before'], step['from'], step['optimizer']),
                         ('extend', 64, 16, 'step-00000004', 'carried'))
        for name in os.listdir(src):
            if name.endswith('.h5'):
                self.assertEqual(os.stat(os.path.join(src, name)).st_ino, os.stat(os.path.join(dst, name)).st_ino, name)
        for name in os.listdir(os.path.join(src, 'assets')):
            if name != 'config.json':
                a, b = (open(os.path.join(p, 'assets', name), 'rb').read() for p in (src, dst))
                self.assertEqual(a, b)

    def test_dropped(self):
        src = self.short()
        facts = self.ok('extend', src, self.path('new'), '--context', '1K', '--drop-optimizer', '--json').json()
        moments = [n for n in self.names(src) if n.startswith('optim.')]
        self.assertGreater(len(moments), 0)
        self.assertEqual(facts['optimizer_tensors_dropped'], len(moments))
        self.assertEqual(facts['context'], 1024)
        self.assertEqual(self.names(self.path('new')), [n for n in self.names(src) if not n.startswith('optim.')])
        state = self.state(self.path('new'))
        self.assertEqual((state['updates'], state['usual_updates'], state['stage']), ({}, 0, 'context-1K'))
        self.assertEqual(state['recipe']['stages'][1]['batch_tokens'], 1024)
        self.ok('diff', src, self.path('new'), 'layers.*', 'embed.*', 'head.*')
        self.ok('verify', self.path('new'), '--deep')

    def test_masters_are_weights(self):
        self.train(self.recipe('half.yaml', SHORT), 'old', '--set', 'checkpoint.dtype=bf16')
        src = self.path('old', 'step-00000004')
        self.ok('extend', src, self.path('new'), '--context', 64, '--drop-optimizer')
        masters = [n for n in self.names(src) if n.startswith('optim.master.')]
        self.assertGreater(len(masters), 0)
        self.assertEqual([n for n in self.names(self.path('new')) if n.startswith('optim.')], masters)

    def test_cut_and_compressed(self):
        self.train(self.recipe('cut.yaml', SHORT), 'old', '--set', 'checkpoint.experts=2', '--set', 'checkpoint.files=2',
                   '--set', 'checkpoint.compress=true')
        src, dst = self.path('old', 'step-00000004'), self.path('new')
        facts = self.ok('extend', src, dst, '--context', 64, '--json').json()
        self.assertEqual(facts['linked_files'], facts['files'])
        self.ok('diff', src, dst, '*')
        self.assertEqual({n for n in os.listdir(src) if n.endswith('.h5')}, {n for n in os.listdir(dst) if n.endswith('.h5')})
        self.ok('reshard', src, self.path('four'), '--map', '0,7;1-3;4;5-6')
        facts = self.ok('extend', self.path('four'), self.path('more'), '--context', 64, '--json').json()
        self.ok('diff', src, self.path('more'), '*')
        self.ok('verify', self.path('more'), '--deep')
        self.assertEqual(facts['linked_files'], facts['files'])

    def test_recipe_with_a_config(self):
        """The model as a config.json in the recipe: its context is raised there too, other keys stay."""
        config = json.load(open(os.path.join(self.short(), 'assets', 'config.json')))
        config['text_config']['note'] = 'stays'
        config['text_config']['model_max_length'] = 16
        config['max_position_embeddings'] = 16
        write(self.path('config.json'), json.dumps(config))
        model = 'model:\n  config: config.json\n'
        self.train(self.recipe('given.yaml', SHORT, model=model), 'given')
        src, dst = self.path('given', 'step-00000004'), self.path('run', 'step-00000004')
        os.mkdir(self.path('run'))
        self.ok('extend', src, dst, '--context', 64)
        for got in [self.manifest(dst)['config'], json.load(open(os.path.join(dst, 'assets', 'config.json'))),
                    self.state(dst)['recipe']['model']['config']]:
            text = got['text_config']
            self.assertEqual((text['max_position_embeddings'], text['model_max_length'], got['max_position_embeddings']), (64, 64, 64))
            self.assertEqual(text['note'], 'stays')
        self.train(self.path('given.yaml'), 'run')
        self.fails(2, 'promises', 'extend', self.path('run', 'step-00000008'), self.path('x'), '--context', 64)

    def test_from_a_tar_and_a_run(self):
        src = self.short()
        self.ok('pack', src, self.path('old.tar'))
        self.ok('extend', self.path('old.tar'), self.path('a'), '--context', 64)
        self.ok('extend', self.path('old'), self.path('b'), '--context', 64)
        self.ok('diff', self.path('a'), self.path('b'))
        self.ok('diff', self.path('a'), src, '*')


class Going(ExtendCase):
    def compare(self, a, b):
        self.ok('diff', a, b)
        x, y = self.state(a), self.state(b)
        for key in ['step', 'tokens', 'skipped', 'mean_loss_hex', 'updates', 'usual_updates', 'recipe', 'data', 'stage']:
            self.assertEqual(x[key], y[key], key)

    def losses(self, folder):
        rows = [json.loads(l) for l in open(os.path.join(folder, 'metrics.jsonl'))]
        return {r['step']: r['loss_hex'] for r in rows if 'loss_hex' in r}

    def test_as_if_it_had_been_there(self):
        """Extended and trained on, against a run whose recipe had both stages from the beginning."""
        src = self.short()
        os.mkdir(self.path('run'))
        self.ok('extend', src, self.path('run', 'step-00000004'), '--context', 64)
        self.train(self.path('short.yaml'), 'run')
        both = self.recipe('both.yaml', SHORT + LONG.replace('NAME', 'context-64'))
        self.train(both, 'whole')
        self.compare(self.path('run', 'step-00000008'), self.path('whole', 'step-00000008'))
        whole = self.losses(self.path('whole'))
        self.assertEqual(self.losses(self.path('run')), {k: v for k, v in whole.items() if k > 4})
        ops = [s['op'] for s in self.manifest(self.path('run', 'step-00000008'))['lineage']]
        self.assertEqual(ops, ['init', 'extend', 'train'])

    def test_by_recipe(self):
        src = self.short()
        os.mkdir(self.path('run'))
        middle = LONG.replace('NAME', 'middle').replace('64', '32')
        next_ = self.recipe('next.yaml', middle + LONG.replace('NAME', 'long'))
        facts = self.ok('extend', src, self.path('run', 'step-00000004'), '--context', 64, '--recipe', next_, '--json').json()
        self.assertEqual((facts['stages_done'], facts['stages_added'], facts['next_stage']), (1, 2, 'middle'))
        self.train(next_, 'run')
        self.train(self.recipe('three.yaml', SHORT + middle + LONG.replace('NAME', 'long')), 'whole')
        self.compare(self.path('run', 'step-00000012'), self.path('whole', 'step-00000012'))

    def test_moments_matter(self):
        src = self.short()
        for name, more in {'kept': [], 'dropped': ['--drop-optimizer']}.items():
            os.mkdir(self.path(name))
            self.ok('extend', src, self.path(name, 'step-00000004'), '--context', 64, *more)
            self.train(self.path('short.yaml'), name)
        kept, dropped = self.losses(self.path('kept')), self.losses(self.path('dropped'))
        self.assertEqual(kept[5], dropped[5])
        self.assertNotEqual(kept[8], dropped[8])

    def test_twice_and_stages_not_begun(self):
        self.train(self.recipe('two.yaml', SHORT + LONG.replace('NAME', 'never')), 'old', '--stop-at', 4)
        src = self.path('old', 'step-00000004')
        os.mkdir(self.path('run'))
        facts = self.ok('extend', src, self.path('run', 'step-00000004'), '--context', 128, '--json').json()
        self.assertEqual((facts['stages_done'], facts['stages_replaced'], facts['stages_added']), (1, 1, 1))
        self.train(self.path('two.yaml'), 'run')
        end = self.path('run', 'step-00000008')
        self.ok('extend', end, self.path('again'), '--context', 256)
        stages = self.state(self.path('again'))['recipe']['stages']
        self.assertEqual([(s['name'], s['context']) for s in stages], [('short', 16), ('context-128', 128), ('context-256', 256)])
        self.assertEqual([s['op'] for s in self.manifest(self.path('again'))['lineage']], ['init', 'extend', 'train', 'extend'])

    def test_other_data(self):
        """Sources of done stages need not be there any more."""
        src = self.short()
        os.rename(self.path('data'), self.path('books'))
        next_ = self.recipe('next.yaml', LONG.replace('NAME', 'long'))
        text = open(next_).read().replace('{name: text, path: data}', '{name: books, path: books}')
        write(next_, text)
        os.mkdir(self.path('run'))
        self.ok('extend', src, self.path('run', 'step-00000004'), '--context', 64, '--recipe', next_)
        self.train(next_, 'run')
        state = self.state(self.path('run', 'step-00000008'))
        self.assertEqual([d['name'] for d in state['data']], ['books'])

    def test_weights_only(self):
        """A converted model begins at step 0 of a recipe."""
        src = self.short()
        self.ok('convert', src, self.path('hf'))
        self.ok('convert', self.path('hf'), self.path('plain'))
        self.fails(2, 'only weights', 'extend', self.path('plain'), self.path('x'), '--context', 64)
        next_ = self.recipe('next.yaml', LONG.replace('NAME', 'long'))
        os.mkdir(self.path('run'))
        self.ok('extend', self.path('plain'), self.path('run', 'step-00000000'), '--context', 64, '--recipe', next_)
        self.train(next_, 'run')
        self.ok('train', next_, '--out', self.path('start'), '--start', self.path('plain'))
        self.ok('diff', self.path('run', 'step-00000004'), self.path('start', 'step-00000004'))


class Refused(ExtendCase):
    def refuse(self, code, words, src, *args, dst='x'):
        self.fails(code, words, 'extend', src, self.path(dst), *args, source=src if os.path.isdir(src) else None)

    def test_usage(self):
        src = self.short()
        self.refuse(2, ['promises', '16 tokens', 'not longer'], src, '--context', 16)
        self.refuse(2, 'not longer', src, '--context', 8)
        self.refuse(2, '--context', src)
        self.refuse(2, '--context', src, '--context', 'many')
        self.refuse(2, ['step 5', 'step-00000004'], src, '--context', 64, dst='step-5')
        self.refuse(2, ['middle of stage short', 'step 4'], self.path('old', 'step-00000003'), '--context', 64)
        self.refuse(4, 'nowhere', self.path('nowhere'), '--context', 64)
        self.refuse(4, 'no.yaml', src, '--context', 64, '--recipe', self.path('no.yaml'))

    def test_conflicts(self):
        src = self.short()
        os.mkdir(self.path('there'))
        write(self.path('there', 'file'), 'x')
        self.refuse(6, 'there', src, '--context', 64, dst='there')
        write(self.path('file'), 'x')
        self.refuse(6, 'file', src, '--context', 64, dst='file')
        for key, value in {'hidden': 64, 'experts': 16, 'top_k': 1, 'kv_lora': 8, 'expert_width': 32}.items():
            lines = [f'  {key}: {value}' if l.startswith(f'  {key}:') else l for l in MODEL.split('\n')]
            next_ = self.recipe('other.yaml', LONG.replace('NAME', 'long'), model='\n'.join(lines))
            self.refuse(6, f'model.{key}', src, '--context', 64, '--recipe', next_)
        next_ = self.recipe('other.yaml', LONG.replace('NAME', 'long'),
                            model=MODEL.replace('full_attention_every: 2', 'full_attention_every: 1'))
        self.refuse(6, 'full_attention_every', src, '--context', 64, '--recipe', next_)
        next_ = self.recipe('other.yaml', LONG.replace('NAME', 'long'),
                            model=MODEL.replace('kimi-k3', 'kimi-linear').replace('  res_block: 1\n', ''))
        self.refuse(6, 'model.family', src, '--context', 64, '--recipe', next_)
        next_ = self.recipe('next.yaml', LONG.replace('NAME', 'long').replace('64', '32'))
        self.refuse(6, ['none has', '64'], src, '--context', 64, '--recipe', next_)
        next_ = self.recipe('next.yaml', LONG.replace('NAME', 'long'))
        self.refuse(6, ['longer than', 'long'], src, '--context', 32, '--recipe', next_)
        next_ = self.recipe('next.yaml', SHORT + LONG.replace('NAME', 'long'))
        self.refuse(6, ['short', 'done already'], src, '--context', 64, '--recipe', next_)

    def test_rotated(self):
        """The checkpoint of a model whose positions are rotated: by its own word, or of a family of such models."""
        for change, word in [({'mla_use_nope': False}, 'mla_use_nope'), ({'model_type': 'other'}, 'rope_theta')]:
            hf = self.path('hf')
            shutil.copytree(TINY, hf)
            path = os.path.join(hf, 'config.json')
            config = json.load(open(path))
            text = config.get('text_config', config)
            text['rope_theta'] = 10000.0
            for key, value in change.items():
                (config if key == 'model_type' else text)[key] = value
            write(path, json.dumps(config))
            self.ok('convert', hf, self.path('ckpt'), '--arch', 'raw')
            self.refuse(5, [word, 'rotated'], self.path('ckpt'), '--context', '2M')
            shutil.rmtree(hf)
            shutil.rmtree(self.path('ckpt'))

    def test_damage(self):
        src = self.short()
        shard = os.path.join(src, sorted(n for n in os.listdir(src) if n.startswith('dense') and n.endswith('.h5'))[0])
        blob = open(shard, 'rb').read()
        spoiled = bytearray(blob)
        spoiled[len(blob) // 2] ^= 1
        write(shard, bytes(spoiled))
        self.refuse(3, os.path.basename(shard), src, '--context', 64)
        write(shard, blob)
        state = open(os.path.join(src, 'train.json')).read()
        for text in [state[:-9], state.replace('"step": 4', '"step": -4'), state.replace('"lr": 0.01', '"lr": 0.02'), '[]']:
            self.assertNotEqual(text, state)
            write(os.path.join(src, 'train.json'), text)
            self.refuse(3, 'train.json', src, '--context', 64)
        write(os.path.join(src, 'train.json'), state)
        os.remove(shard)
        self.refuse(4, os.path.basename(shard), src, '--context', 64)


if __name__ == '__main__':
    main()
