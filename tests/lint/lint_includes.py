#!/usr/bin/env python3
"""lint_includes.py ROOT - fails when a folder includes what its layer may not (docs/ARCHITECTURE.md)."""
import os
import re
import sys

PUBLIC = {'format/base.h', 'format/format.h', 'format/layout.h', 'kernels/kernels.h', 'kernels/numeric.h', 'kernels/ops.def', 'model/spec.h',
          'model/model.h', 'model/parallel.h', 'model/experts.h', 'model/source.h', 'model/tokenizer.h', 'model/sampler.h', 'model/generate.h', 'model/evaluate.h',
          'convert/convert.h', 'convert/weights.h', 'inspect/inspect.h', 'train/data.h', 'train/dist.h', 'train/recipe.h', 'train/train.h', 'train/plan.h'}
# format/io.h is the one door to raw file I/O: convert/ and train/ go through it too, so that faults can be injected there.
MAY = {
    'format': set(),
    'kernels': {'format/base.h'},
    'model': {'format/base.h', 'format/format.h', 'kernels/kernels.h', 'kernels/ops.def', 'kernels/numeric.h'},
    'convert': {'format/base.h', 'format/format.h', 'format/io.h', 'kernels/numeric.h', 'model/source.h',
                'model/spec.h'},
    'inspect': {'format/base.h', 'format/format.h', 'kernels/numeric.h', 'model/spec.h', 'convert/convert.h'},
    'train': {'format/base.h', 'format/format.h', 'format/io.h', 'kernels/kernels.h', 'kernels/ops.def', 'kernels/numeric.h', 'model/spec.h',
              'model/model.h', 'model/parallel.h', 'model/source.h', 'model/experts.h', 'model/tokenizer.h'},
    'cli': PUBLIC,
    'examples': {'format/base.h', 'format/format.h'},
}
ONE_DOOR = {'hdf5.h': {'format/shard_h5.c', 'format/h5_walk.c', 'train/routing_file.c'}, 'zstd.h': {'format/codec.c', 'plugin/h5zstd.c'},
            'xxhash.h': {'format/base.c'}, 'pcre2.h': {'model/pretoken.c'}, 'cblas.h': {'kernels/simd/blas.h'}, 'archive.h': {'format/tar_dir.c', 'format/pack.c', 'train/text_source.c'},
            'cuda_runtime.h': {'kernels/cuda/cuda_priv.cuh'}, 'dlfcn.h': {'kernels/plugin.c', 'train/dist_plugin.c'},
            'yaml.h': {'train/recipe_tree.c'}}


def main():
    root = sys.argv[1]
    bad = 0
    for top, may in MAY.items():
        for folder, _, files in os.walk(os.path.join(root, top)):
            for name in files:
                if not name.endswith(('.c', '.h', '.cu', '.cuh')):
                    continue
                path = os.path.relpath(os.path.join(folder, name), root)
                for number, line in enumerate(open(os.path.join(root, path), encoding='utf-8'), 1):
                    m = re.match(r'\s*#\s*include\s+["<]([^">]+)[">]', line)
                    if not m:
                        continue
                    inc = m.group(1)
                    home = inc.split('/')[0]
                    if home in MAY and home != top and inc not in may:
                        print(f'{path}:{number}: {top}/ may not include {inc}')
                        bad += 1
                    if inc in ONE_DOOR and path not in ONE_DOOR[inc]:
                        print(f'{path}:{number}: only {", ".join(sorted(ONE_DOOR[inc]))} may include {inc}')
                        bad += 1
    return bad != 0


sys.exit(main())
