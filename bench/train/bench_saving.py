#!/usr/bin/env python3
"""bench_saving.py TESSERA RECIPE [STEPS] - what saving costs a run (one save every 20 steps against none), and how long resuming takes
against reading the checkpoint's bytes. Prints ratios."""
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time


def rate(run):
    """Tokens a second over the steps behind the first three."""
    rows = [json.loads(line) for line in open(os.path.join(run, 'metrics.jsonl'))]
    rows = [r for r in rows if 'loss' in r]
    seconds = sum((b['tokens'] - a['tokens']) / b['tokens_per_s'] for a, b in zip(rows[2:], rows[3:]))
    return (rows[-1]['tokens'] - rows[2]['tokens']) / seconds


def read_all(folder):
    begin, total, room = time.time(), 0, bytearray(8 << 20)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, 'rb', buffering=0) as f:
                while n := f.readinto(room):
                    total += n
    return total, time.time() - begin


def main():
    tessera, recipe, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 63
    work = tempfile.mkdtemp(prefix='tsr-bench-')
    try:
        rng = random.Random(1)
        words = [''.join(rng.choice('abcdefghijklmnopqrstuvwxyz') for _ in range(rng.randint(1, 9))) for _ in range(2000)]
        os.mkdir(f'{work}/text')
        for i in range(64):
            with open(f'{work}/text/{i}.txt', 'w') as f:
                f.write(' '.join(rng.choice(words) for _ in range(20000)))
        subprocess.run([tessera, 'data', 'build', f'{work}/text', '--out', f'{work}/data', '--quiet'], check=True)

        def train(out, *more):
            subprocess.run([tessera, 'train', recipe, '--out', f'{work}/{out}', '--quiet', '--set', f'data.sources=[{{name: text, path: {work}/data}}]',
                            '--set', 'stages=[{name: a, context: 1K, steps: 1000, batch_tokens: 1K, lr: 0.001}]', '--set', 'eval.every=0', '--set',
                            'log.every=1', *more], check=True)
        rates = {'none': [], 'saved': []}
        for _ in range(2):
            for name, every in (('none', 0), ('saved', 20)):
                shutil.rmtree(f'{work}/{name}', ignore_errors=True)
                train(name, '--set', f'checkpoint.every={every}', '--set', 'checkpoint.keep_last=1', '--stop-at', str(steps))
                rates[name].append(rate(f'{work}/{name}'))
        a, b = max(rates['none']), max(rates['saved'])
        print(f'training: {a:.0f} tokens/s without saves, {b:.0f} with one every 20 steps: {100 * (1 - b / a):.1f} % less')
        ckpt = f'{work}/saved/step-{steps:08}'
        best = min(read_all(ckpt)[1] for _ in range(3))
        total = read_all(ckpt)[0]
        begin = time.time()
        train('saved', '--stop-at', str(steps))  # everything but a step
        opened = time.time() - begin
        print(f'resuming: {opened:.2f} s until the first step could begin; reading the {total / 1e6:.0f} MB takes {best:.2f} s: {opened / best:.1f} times')
    finally:
        shutil.rmtree(work)


main()
