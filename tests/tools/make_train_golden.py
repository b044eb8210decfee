#!/usr/bin/env python3
"""Writes tests/data/train/optim.safetensors: parameters of a small model after five updates, worked out in f64 with numpy from
the rules in docs/RECIPES.md and kernels/ops/optim.h. Nothing is read from the program: which parameter has which optimizer, how
many matrices it is taken as and whether it decays is a table here.

Weights and gradients are numbers made from the parameter's name, so that the test can make them too:
number(seed, i) = (splitmix64(seed * 2^32 + i) >> 40) / 2^23 - 1, exact in f32; the seed is the CRC-32C of "NAME/STEP", step 0 for
the weights, which are divided by 8.
"""
import json
import os
import struct

import numpy as np

STEPS = 5
LR, LR_MATRICES, LR_OTHERS = 0.02, 0.5, 2.0
DECAY_MATRICES, DECAY_OTHERS = 0.3, 0.2
MU, B1, B2, EPS = 0.9, 0.8, 0.95, 1e-8
CLIP = 3.0
FROZEN_STEPS, FROZEN = 2, {'layers.0.attn.o.weight', 'layers.0.attn.q_conv.weight', 'layers.0.attn.k_conv.weight',
                           'layers.0.attn.v_conv.weight'}

# name: (shape, experts, matrices that Muon takes on their own; 0: AdamW, decays)
PARAMS = {
    'embed.weight': ((24, 16), 0, 0, True), 'head.weight': ((24, 16), 0, 0, True),
    'layers.1.moe.router.weight': ((4, 16), 0, 0, True),
    'layers.0.attn.a_log': ((8,), 0, 0, False), 'layers.0.attn.dt_bias': ((16,), 0, 0, False),
    'layers.0.attn.o_norm.weight': ((8,), 0, 0, False), 'layers.1.attn.q_a_norm.weight': ((12,), 0, 0, False),
    'layers.1.attn.kv_a_norm.weight': ((10,), 0, 0, False), 'layers.1.moe.latent_norm.weight': ((9,), 0, 0, False),
    'final_norm.weight': ((16,), 0, 0, False), 'output_res.norm.weight': ((16,), 0, 0, False),
    'output_res.proj.weight': ((1, 16), 0, 0, False),
    # delta attention: two heads of q, k and v
    'layers.0.attn.q.weight': ((16, 16), 0, 2, True), 'layers.0.attn.k.weight': ((16, 16), 0, 2, True),
    'layers.0.attn.v.weight': ((16, 16), 0, 2, True), 'layers.0.attn.g.weight': ((16, 16), 0, 1, True),
    'layers.0.attn.o.weight': ((16, 16), 0, 1, True), 'layers.0.attn.f_a.weight': ((8, 16), 0, 1, True),
    'layers.0.attn.f_b.weight': ((16, 8), 0, 1, True), 'layers.0.attn.b.weight': ((2, 16), 0, 1, True),
    'layers.0.mlp.gate.weight': ((20, 16), 0, 1, True), 'layers.0.mlp.up.weight': ((20, 16), 0, 1, True),
    'layers.0.mlp.down.weight': ((16, 20), 0, 1, True),
    # MLA: two heads of 6 + 4 rows of queries, of 6 + 5 rows of keys and values
    'layers.1.attn.q_a.weight': ((12, 16), 0, 1, True), 'layers.1.attn.q_b.weight': ((20, 12), 0, 2, True),
    'layers.1.attn.kv_a.weight': ((14, 16), 0, 1, True), 'layers.1.attn.kv_b.weight': ((22, 10), 0, 2, True),
    'layers.1.attn.g.weight': ((10, 16), 0, 1, True), 'layers.1.attn.o.weight': ((16, 10), 0, 1, True),
    'layers.1.moe.latent_down.weight': ((9, 16), 0, 1, True), 'layers.1.moe.latent_up.weight': ((16, 9), 0, 1, True),
    'layers.1.shared.gate.weight': ((7, 16), 0, 1, True), 'layers.1.shared.up.weight': ((7, 16), 0, 1, True),
    'layers.1.shared.down.weight': ((16, 7), 0, 1, True),
    'layers.1.experts.{e}.gate.weight': ((7, 9), 4, 4, True), 'layers.1.experts.{e}.up.weight': ((7, 9), 4, 4, True),
    'layers.1.experts.{e}.down.weight': ((9, 7), 4, 4, True),
}
for layer in range(2):
    for part in ('attn', 'mlp'):
        PARAMS[f'layers.{layer}.{part}_norm.weight'] = ((16,), 0, 0, False)
        PARAMS[f'layers.{layer}.{part}_res.norm.weight'] = ((16,), 0, 0, False)
        PARAMS[f'layers.{layer}.{part}_res.proj.weight'] = ((1, 16), 0, 0, False)
for kind in 'qkv':
    PARAMS[f'layers.0.attn.{kind}_conv.weight'] = ((16, 1, 4), 0, 0, False)


def crc32c(data):
    c = 0xffffffff
    for b in data:
        c ^= b
        for _ in range(8):
            c = c >> 1 ^ (0x82f63b78 if c & 1 else 0)
    return c ^ 0xffffffff


def numbers(name, step, count):
    z = np.uint64(crc32c(f'{name}/{step}'.encode()) << 32) + np.arange(count, dtype=np.uint64)
    z = z + np.uint64(0x9e3779b97f4a7c15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xbf58476d1ce4e5b9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94d049bb133111eb)
    z = z ^ z >> np.uint64(31)
    return (z >> np.uint64(40)).astype('f8') / (1 << 23) - 1


def orthogonal(u):
    x = u / (np.sqrt((u * u).sum()) + 1e-7)
    if x.shape[0] > x.shape[1]:
        return orthogonal_wide(x.T).T
    return orthogonal_wide(x)


def orthogonal_wide(x):
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def main():
    shape = {n: ((p[1],) if p[1] else ()) + p[0] for n, p in PARAMS.items()}
    w = {n: (numbers(n, 0, int(np.prod(s))) / 8).reshape(s) for n, s in shape.items()}
    m = {n: np.zeros(s) for n, s in shape.items()}
    v = {n: np.zeros(s) for n, s in shape.items()}
    t = dict.fromkeys(PARAMS, 0)
    norms = []
    for step in range(1, STEPS + 1):
        moving = [n for n in sorted(PARAMS) if step > FROZEN_STEPS or n not in FROZEN]
        g = {n: numbers(n, step, int(np.prod(shape[n]))).reshape(shape[n]) for n in moving}
        norm = np.sqrt(sum((x * x).sum() for x in g.values()))
        norms.append(norm)
        factor = 1 + 0.25 * (step - 1)  # of weight decay
        for n in moving:
            (rows, *rest), experts, muon, decays = PARAMS[n]
            x = g[n] * (CLIP / norm)
            t[n] += 1
            if not muon:
                lr, decay = LR * step * LR_OTHERS, DECAY_OTHERS * factor * decays
                m[n] = B1 * m[n] + (1 - B1) * x
                v[n] = B2 * v[n] + (1 - B2) * x * x
                u = m[n] / (1 - B1 ** t[n]) / (np.sqrt(v[n] / (1 - B2 ** t[n])) + EPS)
            else:
                lr, decay = LR * step * LR_MATRICES, DECAY_MATRICES * factor * decays
                m[n] = MU * m[n] + x
                one = (muon, rows * max(experts, 1) // muon, rest[0])
                u = np.stack([orthogonal(y) for y in (x + MU * m[n]).reshape(one)]) * 0.2 * np.sqrt(max(one[1:]))
            w[n] = w[n] * (1 - lr * decay) - lr * u.reshape(shape[n])
    out = {n: w[n].astype('<f4') for n in sorted(PARAMS)}
    out['norms'] = np.array(norms, '<f8')
    head, at = {}, 0
    for n, x in out.items():
        head[n] = {'dtype': 'F64' if x.dtype == np.float64 else 'F32', 'shape': list(x.shape), 'data_offsets': [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(head, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'data', 'train', 'optim.safetensors')
    with open(path, 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text + b''.join(x.tobytes() for x in out.values()))


if __name__ == '__main__':
    main()
