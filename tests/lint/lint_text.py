#!/usr/bin/env python3
"""lint_text.py ROOT - banned functions, paths of one machine, over-long functions and files.

The length rules are a ratchet: a listed exception may shrink, never grow."""
import os
import re
import sys

BANNED = {r'\bstrcpy\s*\(': 'memcpy or snprintf', r'\bstrcat\s*\(': 'snprintf', r'\bvsprintf\s*\(': 'vsnprintf',
          r'\bgets\s*\(': 'fgets', r'\batoi\s*\(': 'strtol', r'\bstrtok\s*\(': 'strcspn', r'\balloca\s*\(': 'malloc'}
PATHS = re.compile(r'(/(root|Users)/|/(home|mnt)/[a-z])')
SOURCE = ('format', 'kernels', 'model', 'convert', 'inspect', 'cli', 'examples', 'plugin', 'train')
FUNCTION_LINES, FILE_LINES = 75, 800
LONGER = {}  # 'path:function': lines


def functions(lines):
    """Yields (name, first line number, length) of function definitions (brace in column 0)."""
    start = None
    for i, line in enumerate(lines):
        if line.startswith('{') and i > 0 and not lines[i - 1].startswith('namespace'):
            k = i - 1
            while k > 0 and lines[k].startswith((' ', '\t')):
                k -= 1
            m = re.search(r'([A-Za-z_0-9]+)\s*\(', lines[k])
            start = (m.group(1) if m else '?', k + 1)
        elif line.startswith('}') and start:
            yield start[0], start[1], i + 2 - start[1]
            start = None


def main():
    root = sys.argv[1]
    bad = []
    for top in SOURCE + ('tests', 'bench', 'docs', 'tools', '.ci'):
        for folder, dirs, files in os.walk(os.path.join(root, top)):
            dirs[:] = [d for d in dirs if d not in ('corpus', 'data', '__pycache__')]
            for name in files:
                path = os.path.relpath(os.path.join(folder, name), root)
                try:
                    lines = open(os.path.join(root, path), encoding='utf-8').read().split('\n')
                except UnicodeDecodeError:
                    continue
                for n, line in enumerate(lines, 1):
                    if PATHS.search(line) and not path.startswith('tests/lint'):
                        bad.append(f'{path}:{n}: a path of one machine')
                if top not in SOURCE or not name.endswith(('.c', '.h', '.cu', '.cuh')):
                    continue
                if len(lines) > FILE_LINES:
                    bad.append(f'{path}: {len(lines)} lines (limit {FILE_LINES}): what wants to move out?')
                for n, line in enumerate(lines, 1):
                    for pattern, instead in BANNED.items():
                        if re.search(pattern, line):
                            bad.append(f'{path}:{n}: {pattern}: use {instead}')
                for fn, at, length in functions(lines):
                    if length > LONGER.get(f'{path}:{fn}', FUNCTION_LINES):
                        bad.append(f'{path}:{at}: {fn} has {length} lines (limit {FUNCTION_LINES})')
    print('\n'.join(bad))
    return bool(bad)


sys.exit(main())
