#!/usr/bin/env python3
"""make.py - writes ranks.txt, config.json and cases.json beside itself: answers of tiktoken (pip install tiktoken) over
ranks made up here, under K3's pattern and K3's way of cutting long text. Seeds are fixed: running it again changes
nothing, unless tiktoken does."""
import base64
import json
import os
import random

import tiktoken

HERE = os.path.dirname(os.path.abspath(__file__))
UPPER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]'
LOWER = r'[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]'
TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = '|'.join([r'[\p{Han}]+', r'[^\r\n\p{L}\p{N}]?' + UPPER + '*' + LOWER + '+' + TAIL,
                    r'[^\r\n\p{L}\p{N}]?' + UPPER + '+' + LOWER + '*' + TAIL, r'\p{N}{1,3}', r' ?[^\s\p{L}\p{N}]+[\r\n]*',
                    r'\s*[\r\n]+', r'\s+(?!\S)', r'\s+'])
ADDED = {'[BOS]': 0, '[EOS]': 1, '<|end_of_msg|>': 2, '<|open|>': 3, '<|close|>': 4, '<|sep|>': 5}
TEXTS = [
    '', ' ', '\n', 'Hello world', 'hello', 'HELLO', 'helloWorld', 'McDonald', 'ABCdef', "it's IT'S don't DON'T we're I'LL he'd",
    'it\u2019s', 'a  b', 'a    b', '   hello', 'hello   ', 'a\t\t\tb', 'a \t \t b', 'a    !', 'a    7', 'a    \u4f60\u597d',
    'line1\nline2', 'line1\r\n\r\nline3', 'text   \n   more', 'a\n\n\n\nb', 'end \n', '\u4f60\u597d\u4e16\u754c',
    '\u4f60\u597dhello', 'hello\u4f60\u597d', '\u4f60a\u597db', '\u4f60\u597d123', '\u4f60\u597d\u3002\u4e16\u754c\uff01',
    '\u4f60\u597d \u4e16\u754c', '\u3053\u3093\u306b\u3061\u306f', '\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8',
    '\u3005\u3007\u3001', '7', '1234', '1234567890', '1,234,567', '3.14159', '\u0663\u0664\u0665\u0666', 'a\x00b\x01c',
    '\U0001f680\U0001f525', '\U0001f468\u200d\U0001f469\u200d\U0001f467', 'na\u00efve caf\u00e9 \u00fcber', 'e\u0301a\u0300 \u0301x',
    '\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440', '\u0645\u0631\u062d\u0628\u0627', "'\u017f it'\u017f", 'a\u180eb \u180e',
    'x\x1cy \x1c', 'x\x85y\xa0z\u3000w', '\ufeffbom', '<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>',
    'before<|sep|>after', '<|open|><|close|>', '<|not_a_token|> <| |> [BOS', '[BOS][EOS]x',
    'The routed experts do not fit in memory, so they stream from disk while the resident ones compute.',
    'def f(x):\n    return x ** 2  # square\n\n\nclass A(B):\n\tpass\n',
]


def ranks(seed, merges):
    rnd = random.Random(seed)
    tokens = [bytes([b]) for b in range(256)]
    rnd.shuffle(tokens)
    have = set(tokens)
    blobs = [t.encode() for t in TEXTS if len(t) > 1]
    while len(tokens) < 256 + merges:
        blob = rnd.choice(blobs)
        size = rnd.choice([2, 2, 2, 3, 3, 4, 5, 6])
        at = rnd.randrange(len(blob))
        token = blob[at:at + size]
        if len(token) > 1 and token not in have:
            have.add(token)
            tokens.append(token)
    return tokens


def runs(s, limit):
    """Cuts where a run of white space, or of anything else, would become longer than limit."""
    start = length = 0
    space = None
    for i, c in enumerate(s):
        length = length + 1 if c.isspace() == space else 1
        space = c.isspace()
        if length > limit:
            yield s[start:i]
            start, length = i, 1
    yield s[start:]


def main():
    tokens = ranks(1, 450)
    added = {k: len(tokens) + v for k, v in ADDED.items()}
    enc = tiktoken.Encoding('golden', pat_str=PATTERN, mergeable_ranks={t: i for i, t in enumerate(tokens)}, special_tokens=added)
    cases = []
    for allow, piece, run in ((False, 400000, 25000), (True, 400000, 25000), (False, 20, 4), (True, 9, 3)):
        for text in TEXTS:
            ids = []
            for i in range(0, len(text), piece):
                for s in runs(text[i:i + piece], run):
                    ids += enc.encode(s, allowed_special='all') if allow else enc.encode(s, disallowed_special=())
            cases.append({'text': text.encode().hex(), 'added': allow, 'piece': piece, 'run': run, 'ids': ids})
    with open(HERE + '/ranks.txt', 'w') as f:
        f.writelines(f'{base64.b64encode(t).decode()} {i}\n' for i, t in enumerate(tokens))
    with open(HERE + '/config.json', 'w') as f:
        json.dump({'added_tokens_decoder': {str(v): {'content': k, 'special': k[1] != '|'} for k, v in added.items()},
                   'bos_token': '[BOS]', 'eos_token': {'content': '[EOS]'}}, f, indent=1)
        f.write('\n')
    with open(HERE + '/cases.json', 'w') as f:
        f.write('[\n' + ',\n'.join(json.dumps(c, separators=(',', ':')) for c in cases) + '\n]\n')


main()
