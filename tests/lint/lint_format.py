#!/usr/bin/env python3
"""lint_format.py ROOT - the offset tables of docs/FORMAT.md are those of format/layout.h. With --print: the tables."""
import re
import sys

SIZES = {'char': 1, 'uint8_t': 1, 'uint32_t': 4, 'int32_t': 4, 'uint64_t': 8, 'tsr_section_rec': 16}
SECTIONS = 8


def structs(text):
    """{name: [(offset, size, field)]} of every struct in layout.h."""
    out = {}
    for m in re.finditer(r'typedef struct (\w+) \{(.*?)\n\} \w+;', text, re.S):
        at, rows = 0, []
        body = re.sub(r'/\*.*?\*/', '', m.group(2), flags=re.S)
        for kind, field, count in re.findall(r'(\w+) (\w+)(?:\[([^\]]+)\])?;', body):
            n = eval(count.replace('TSR_SEC_COUNT', str(SECTIONS))) if count else 1  # arithmetic of our own header
            size = SIZES[kind] * n
            rows.append((at, size, field))
            at += size
        out[m.group(1)] = rows
    return out


def tables(text):
    out = {}
    for m in re.finditer(r'<!-- layout: (\w+) -->\n((?:\|.*\n)+)', text):
        out[m.group(1)] = [(int(a), int(b), c) for a, b, c in re.findall(r'^\| (\d+) \| (\d+) \| `(\w+)`', m.group(2), re.M)]
    return out


def main():
    root = sys.argv[1]
    have = structs(open(f'{root}/format/layout.h').read())
    if '--print' in sys.argv:
        for name, rows in have.items():
            print(f'<!-- layout: {name} -->\n| offset | bytes | field | meaning |\n|---|---|---|---|')
            print('\n'.join(f'| {a} | {b} | `{c}` |  |' for a, b, c in rows) + '\n')
        return 0
    doc = tables(open(f'{root}/docs/FORMAT.md').read())
    bad = 0
    for name, rows in have.items():
        if doc.get(name) != rows:
            print(f'docs/FORMAT.md: {name}: table says {doc.get(name)}, layout.h {rows}')
            bad = 1
    return bad


sys.exit(main())
