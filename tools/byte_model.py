#!/usr/bin/env python3
"""byte_model.py DATA... TEXT - what a model of order 3 makes of a text: bits a byte.

Counts runs of four tokens in the training half of data folders of bytes (tessera data build without a tokenizer) and interpolates orders
3 to 0 (Witten and Bell). A yardstick for trained models: they should be below it."""
import math
import os
import sys
from collections import Counter

HEAD = 64  # bytes in front of the tokens, docs/DATA.md


def count(folders):
    grams = Counter()
    for folder in folders:
        for name in sorted(os.listdir(folder)):
            if name.startswith('train-') and name.endswith('.tok'):
                with open(os.path.join(folder, name), 'rb') as f:
                    tokens = f.read()[HEAD:]
                for k in range(4):  # a word of 64 bits is four tokens of 16; each place once
                    part = tokens[2 * k:]
                    grams.update(memoryview(part[:len(part) // 8 * 8]).cast('Q'))
    return grams


def tables(grams):
    """For each order: {context and token: count}, {context: (tokens seen, different ones)}."""
    out = []
    for order in range(4):
        full = Counter()
        for gram, n in grams.items():
            full[gram >> 16 * (3 - order)] += n
        seen, kinds = Counter(), Counter()
        for key, n in full.items():
            context = key & ((1 << 16 * order) - 1)
            seen[context] += n
            kinds[context] += 1
        out.append((full, seen, kinds))
    return out


def bits(text, levels):
    total = 0.0
    for i in range(3, len(text)):
        p = 1 / 258
        for order, (full, seen, kinds) in enumerate(levels):
            context = 0
            for k in range(order):
                context |= text[i - order + k] << 16 * k
            n = seen.get(context)
            if n:
                t = kinds[context]
                p = (full.get(context | text[i] << 16 * order, 0) + t * p) / (n + t)
        total -= math.log2(p)
    return total / (len(text) - 3)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    with open(sys.argv[-1], 'rb') as f:
        text = f.read()
    print(f'{bits(text, tables(count(sys.argv[1:-1]))):.4f}')


main()
