"""traintest - very small training runs for the command line tests: a recipe, its data, and comparisons of runs."""
import hashlib
import json
import os
import random
import re
import sys

from tsrtest import Case, run, write

SYSTEM_PYTHON = '/usr/bin/python3'  # the distribution's, with its modules
try:
    import h5py
    import numpy
except ImportError:
    if os.path.exists(SYSTEM_PYTHON) and 'TSR_SYSTEM_PYTHON' not in os.environ:
        os.environ['TSR_SYSTEM_PYTHON'] = '1'
        os.execv(SYSTEM_PYTHON, [SYSTEM_PYTHON, *sys.argv])
    print('skipped: python3-h5py and python3-numpy are not installed')
    sys.exit(77)

MODEL = {'family': 'kimi-k3', 'layers': 4, 'hidden': 32, 'vocab': 512, 'first_dense': 1, 'dense_width': 48, 'kda_heads': 2,
         'kda_head_dim': 16, 'full_attention_every': 2, 'mla_heads': 2, 'q_lora': 16, 'kv_lora': 16, 'qk_nope': 8, 'qk_rope': 8,
         'v_head': 8, 'experts': 8, 'top_k': 2, 'shared_experts': 1, 'expert_width': 16, 'latent': 24, 'res_block': 2}


def stage(name, context, steps, batch_tokens=None, **more):
    return {'name': name, 'context': context, 'steps': steps, 'batch_tokens': batch_tokens or 2 * context, 'lr': 0.01, **more}


def recipe(*stages, data=('data',), **more):
    """A recipe as a map; stages: by default three, with several micro-batches a step."""
    stages = stages or (stage('a', 16, 5, 96, warmup=2), stage('b', 32, 4, 64, schedule='wsd', decay=0.5),
                        stage('c', 64, 3, 128, recompute=True, weight_decay_final=2))
    return {'model': dict(MODEL), 'data': {'sources': [{'name': os.path.basename(d), 'path': d} for d in data]},
            'stages': [dict(s) for s in stages], 'checkpoint': {'every': 0, 'keep_last': 0},
            'eval': {'every': 0, 'sequences': 4, 'buckets': 4}, 'log': {'samples': True}, 'micro_tokens': 32, 'seed': 7, **more}


def documents(count, seed=1, most=90):
    rng = random.Random(seed)
    words = ['the', 'sea', 'wind', 'and', 'rose', 'a', 'stone', 'of', 'night', 'fell']
    return [' '.join(rng.choice(words) for _ in range(rng.randint(1, most // 5))) for _ in range(count)]


def lines_of(path):
    """Strict JSON lines."""
    def refuse(word):
        raise ValueError(word)
    with open(path, encoding='utf-8') as f:
        return [json.loads(line, parse_constant=refuse) for line in f]


def stored_bytes(item):
    """The bytes of a data set; of a compressed one those that are stored, for which no filter is needed."""
    if item.chunks is None or item.id.get_create_plist().get_nfilters() == 0:
        return numpy.ascontiguousarray(item[()]).tobytes()
    at = [item.id.get_chunk_info(i).chunk_offset for i in range(item.id.get_num_chunks())]
    return b''.join(item.id.read_direct_chunk(offset)[1] for offset in at)


def tensors_of(ckpt):
    """{shard/data set: SHA-256 of its bytes} of all shards of a checkpoint."""
    out = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            out[f'{part}/{name}'] = hashlib.sha256(stored_bytes(item)).hexdigest()
    for name in sorted(os.listdir(ckpt)):
        if name.endswith('.h5') and name != 'routing.h5':
            part = re.sub(r'-of-.*', '', name)
            with h5py.File(os.path.join(ckpt, name), 'r') as f:
                f.visititems(visit)
    return out


def routing_rows(path):
    """{data set: rows} of a routing file."""
    out = {}
    with h5py.File(path, 'r') as f:
        f.visititems(lambda name, item: out.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return out


class TrainCase(Case):
    def data(self, texts=None, name='data', *args):
        src = write(self.path(name + '.jsonl'), ''.join(json.dumps({'text': t}) + '\n' for t in texts or documents(24)))
        self.ok('data', 'build', src, '--out', self.path(name), *args)
        return self.path(name)

    def recipe(self, *stages, name='r.yaml', **more):
        return write(self.path(name), json.dumps(recipe(*stages, **more)))

    def train(self, out, *args, code=0, file='r.yaml', **kw):
        r = run('train', self.path(file), '--out', self.path(out), *args, **kw)
        self.assertEqual(r.code, code, f'{args}: {r!r}')
        return r

    def step(self, out, n):
        return self.path(out, f'step-{n:08}')

    def steps(self, out):
        return sorted(int(n[5:]) for n in os.listdir(self.path(out)) if n.startswith('step-'))

    def metrics(self, out):
        return lines_of(self.path(out, 'metrics.jsonl'))

    def losses(self, out):
        return {m['step']: m['loss_hex'] for m in self.metrics(out) if 'loss_hex' in m}

    def warnings(self, r):
        return [line for line in r.err.decode().splitlines() if line.startswith('warning')]

    def same_steps(self, a, b, upto=None):
        """Every line of what a run tells is the same, but for its speed."""
        def told(out):
            kept = self.metrics(out)
            for m in kept:
                m.pop('tokens_per_s', None)
            return [m for m in kept if upto is None or m['step'] <= upto]
        self.assertEqual(told(a), told(b))
        if os.path.exists(self.path(a, 'samples.jsonl')):
            self.assertEqual(lines_of(self.path(a, 'samples.jsonl')), lines_of(self.path(b, 'samples.jsonl')))
        x, y = routing_rows(self.path(a, 'routing.h5')), routing_rows(self.path(b, 'routing.h5'))
        self.assertEqual(set(x), set(y))
        for name in x:
            self.assertEqual(x[name].tobytes(), y[name].tobytes(), name)

    def same_checkpoint(self, a, b):
        self.ok('diff', a, b)
        x, y = tensors_of(a), tensors_of(b)
        self.assertTrue(any('optim' in name for name in x), list(x)[:5])
        self.assertEqual(x, y)
        self.assertEqual(*(json.load(open(os.path.join(p, 'train.json'))) for p in (a, b)))

    def same_run(self, a, b):
        self.same_steps(a, b)
        self.assertEqual(max(self.steps(a)), max(self.steps(b)))
        last = max(self.steps(a))
        self.same_checkpoint(self.step(a, last), self.step(b, last))
