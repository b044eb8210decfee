"""tsrtest - builders of small checkpoints and a runner for the command line tests.

Environment (set by meson): TESSERA the program, TSR_SAN=1 under sanitizers (no limits on time and memory then).
"""
import hashlib
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

TESSERA = os.environ.get('TESSERA', 'tessera')
SANITIZED = os.environ.get('TSR_SAN') == '1'
DATA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'data')
TINY = os.path.join(DATA, 'tiny-mxfp4')


def f32(*values):
    return struct.pack(f'<{len(values)}f', *values)


def st_raw(header, data=b'', pad=1):
    """A safetensors file from header text (bytes or str) and data; pad: multiple the header is filled to."""
    text = header if isinstance(header, bytes) else header.encode()
    text += b' ' * (-len(text) % pad)
    return struct.pack('<Q', len(text)) + text + data


def st(entries, meta=None, pad=1):
    """entries: (name, dtype, shape, bytes) in file order."""
    head, off = {}, 0
    if meta is not None:
        head['__metadata__'] = meta
    for name, dtype, shape, data in entries:
        head[name] = {'dtype': dtype, 'shape': list(shape), 'data_offsets': [off, off + len(data)]}
        off += len(data)
    return st_raw(json.dumps(head, separators=(',', ':'), ensure_ascii=False), b''.join(e[3] for e in entries), pad)


def st_load(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    blob = open(path, 'rb').read()
    n = struct.unpack('<Q', blob[:8])[0]
    head = json.loads(blob[8:8 + n])
    data = blob[8 + n:]
    return {k: (v['dtype'], v['shape'], data[v['data_offsets'][0]:v['data_offsets'][1]])
            for k, v in head.items() if k != '__metadata__'}


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'wb' if isinstance(data, bytes) else 'w') as f:
        f.write(data)
    return path


def tree(path):
    """{relative name: sha256 or link target} of everything below path."""
    out = {}
    for folder, dirs, files in os.walk(path):
        for name in files + dirs:
            full = os.path.join(folder, name)
            rel = os.path.relpath(full, path)
            if os.path.islink(full):
                out[rel] = '-> ' + os.readlink(full)
            elif os.path.isfile(full):
                out[rel] = hashlib.sha256(open(full, 'rb').read()).hexdigest()
            else:
                out[rel] = 'folder'
    return out


class Result:
    def __init__(self, code, out, err, seconds, peak):
        self.code, self.out, self.err, self.seconds, self.peak = code, out, err, seconds, peak

    @property
    def text(self):
        return self.out.decode()

    @property
    def error(self):
        """The first line of standard error."""
        return self.err.decode(errors='replace').split('\n')[0]

    def json(self):
        return json.loads(self.out, parse_constant=lambda c: (_ for _ in ()).throw(ValueError(c)))

    def __repr__(self):
        return f'exit {self.code}\nstdout: {self.out[:2000]!r}\nstderr: {self.err[:2000]!r}'


def run(*args, cwd=None, stdin=None, env=None, preexec=None):
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        p = subprocess.Popen([TESSERA, *map(str, args)], stdin=stdin or subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd,
                             env={**os.environ, **(env or {})}, preexec_fn=preexec)
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = 0
        seconds = time.monotonic() - begin
        out.seek(0)
        err.seek(0)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        return Result(code, out.read(), err.read(), seconds, usage.ru_maxrss * 1024)


def model_backends():
    """Names of what can run a model here; says what cannot."""
    facts = run('backends', '--json').json()
    names = []
    for b in facts['backends']:
        if not b['usable']:
            print(f'skipped: backend {b["name"]}: {b["why_not"] or "not in this build"}')
        elif any(row[b['name']] == '-' for row in facts['ops'].values()):
            print(f'skipped: backend {b["name"]}: has not every operation yet')
        else:
            names.append(b['name'])
    return names


class Case(unittest.TestCase):
    """A test in a fresh folder self.dir."""

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix='tsr-')
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)

    def path(self, *parts):
        return os.path.join(self.dir, *parts)

    def ok(self, *args, **kw):
        r = run(*args, **kw)
        self.assertEqual(r.code, 0, f'{args}: {r!r}')
        return r

    def fails(self, code, words, *args, source=None, **kw):
        """Runs a command that must be refused: exit code, one error line with all words, nothing left behind."""
        names = {2: 'E_USAGE', 3: 'E_FORMAT', 4: 'E_MISSING', 5: 'E_UNSUPPORTED', 6: 'E_CONFLICT', 7: 'E_IO', 8: 'E_LIMIT',
                 9: 'E_NUMERIC'}
        before, src = tree(self.dir), tree(source) if source else None
        r = run(*args, **kw)
        self.assertEqual(r.code, code, f'{args}: {r!r}')
        self.assertTrue(r.error.startswith(f'error[{names[code]}] '), repr(r))
        for word in [words] if isinstance(words, str) else words:
            self.assertIn(word, r.error)
        self.assertEqual(tree(self.dir), before, 'something was left behind, or the input changed')
        if source:
            self.assertEqual(tree(source), src)
        if not SANITIZED:
            # a child's peak begins with what its parent held when it was started
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 60 << 20:
                self.assertLess(r.peak, 64 << 20)
            self.assertLess(r.seconds, 5)
        return r

    def same_tree(self, a, b):
        self.assertEqual(tree(a), tree(b))


def main():
    result = unittest.main(exit=False, verbosity=2, warnings='ignore').result
    if result.testsRun and len(result.skipped) == result.testsRun:
        for _, why in result.skipped:
            print(f'skipped: {why}')
        sys.exit(77)
    sys.exit(0 if result.wasSuccessful() else 1)
