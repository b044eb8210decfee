"""tinymodel - whole models in the released K3 layout, small enough to be written by plain Python.

random_model: every part of the architecture, random weights. chain_model: layers that add nothing, so that the token that
follows is read from a table: what a test wants to see generated is generated.
"""
import array
import json
import os
import random

from tsrtest import st, write

PREFIX = 'language_model.model.'


def f32s(values):
    return array.array('f', values).tobytes()


def bf16(values):
    b = f32s(values)
    out = bytearray(len(b) // 2)
    out[0::2], out[1::2] = b[2::4], b[3::4]
    return bytes(out)


def config(p, **more):
    kinds = [p['kinds'][i % len(p['kinds'])] for i in range(p['layers'])]
    text = dict(
        hidden_size=p['hidden'], num_hidden_layers=p['layers'], vocab_size=p['vocab'], first_k_dense_replace=p['dense_layers'],
        intermediate_size=p['dense'], num_attention_heads=p['heads'], q_lora_rank=p['q_lora'], kv_lora_rank=p['kv_lora'],
        qk_nope_head_dim=p['nope'], qk_rope_head_dim=p['rope'], v_head_dim=p['v_head'], num_experts=p['experts'],
        num_experts_per_token=p['top_k'], moe_intermediate_size=p['inter'], routed_expert_hidden_size=p['latent'],
        num_shared_experts=1, activation_situ_beta=4.0, activation_situ_linear_beta=25.0, rms_norm_eps=1e-5, hidden_act='situ',
        mla_use_nope=True, moe_renormalize=True, model_max_length=p['context'],
        linear_attn_config=dict(num_heads=p['kda_heads'], head_dim=p['kda_dim'], short_conv_kernel_size=4, gate_lower_bound=-5.0,
                                kda_layers=[i + 1 for i, k in enumerate(kinds) if k == 'K'],
                                full_attn_layers=[i + 1 for i, k in enumerate(kinds) if k == 'M']),
        quantization_config=dict(quant_method='compressed-tensors', format='mxfp4-pack-quantized'))
    if p['res_block']:
        text['attn_res_block_size'] = p['res_block']
    return dict(model_type='kimi_k3', text_config=text, **more), kinds


DEFAULTS = dict(hidden=32, layers=4, vocab=300, dense_layers=1, dense=24, heads=2, q_lora=12, kv_lora=16, nope=8, rope=4, v_head=8,
                experts=8, top_k=2, inter=32, latent=32, context=128, kda_heads=3, kda_dim=4, res_block=2, kinds='KM', conv_rank=3,
                a_log=4, tail=9.9, head=True)


def attention(p, kind, out, mat):
    d = p['hidden']
    if kind == 'K':
        w = p['kda_heads'] * p['kda_dim']
        for n in 'qkvg':
            out(f'self_attn.{n}_proj.weight', [w, d], mat(w * d, d ** -.5))
        for n in 'qkv':
            out(f'self_attn.{n}_conv1d.weight', [w, 1, 4] if p['conv_rank'] == 3 else [w, 4], mat(w * 4, .5))
        out('self_attn.f_a_proj.weight', [p['kda_dim'], d], mat(p['kda_dim'] * d, d ** -.5))
        out('self_attn.f_b_proj.weight', [w, p['kda_dim']], mat(w * p['kda_dim'], .5))
        out('self_attn.b_proj.weight', [p['kda_heads'], d], mat(p['kda_heads'] * d, d ** -.5))
        out('self_attn.dt_bias', [w], mat(w, 1, -2), 'F32')
        a = [.1 * (i + 1) for i in range(p['kda_heads'])]
        padded = a + [p['tail']] * (p['a_log'] - len(a)) if isinstance(p['a_log'], int) else a
        out('self_attn.A_log', [p['a_log']] if isinstance(p['a_log'], int) else p['a_log'], padded, 'F32')
        out('self_attn.o_norm.weight', [p['kda_dim']], mat(p['kda_dim'], .1, 1))
        out('self_attn.o_proj.weight', [d, w], mat(d * w, w ** -.5))
        return
    h = p['heads']
    for name, rows, cols in (('q_a_proj', p['q_lora'], d), ('q_b_proj', h * (p['nope'] + p['rope']), p['q_lora']),
                             ('kv_a_proj_with_mqa', p['kv_lora'] + p['rope'], d),
                             ('kv_b_proj', h * (p['nope'] + p['v_head']), p['kv_lora']), ('g_proj', h * p['v_head'], d),
                             ('o_proj', d, h * p['v_head'])):
        out(f'self_attn.{name}.weight', [rows, cols], mat(rows * cols, cols ** -.5))
    for name, n in (('q_a_layernorm', p['q_lora']), ('kv_a_layernorm', p['kv_lora'])):
        out(f'self_attn.{name}.weight', [n], mat(n, .1, 1))


def mixture(p, rng, out, raw, mat):
    d, e, lat, inter, m = p['hidden'], p['experts'], p['latent'], p['inter'], 'block_sparse_moe.'
    out(m + 'gate.weight', [e, d], mat(e * d, 2 * d ** -.5))
    out(m + 'gate.e_score_correction_bias', [e], mat(e, .05), 'F32')
    out(m + 'routed_expert_down_proj.weight', [lat, d], mat(lat * d, d ** -.5))
    out(m + 'routed_expert_up_proj.weight', [d, lat], mat(lat * d, lat ** -.5))
    out(m + 'routed_expert_norm.weight', [lat], mat(lat, .1, 1))
    for n, rows, cols in (('gate', inter, d), ('up', inter, d), ('down', d, inter)):
        out(f'{m}shared_experts.{n}_proj.weight', [rows, cols], mat(rows * cols, cols ** -.5))
    for i in range(e):
        for n, rows, cols in (('w1', inter, lat), ('w2', lat, inter), ('w3', inter, lat)):
            raw(f'{m}experts.{i}.{n}.weight_packed', [rows, cols // 2], rng.randbytes(rows * cols // 2))
            raw(f'{m}experts.{i}.{n}.weight_scale', [rows, cols // 32], bytes(rng.choices((122, 123, 124), k=rows * cols // 32)))


def random_model(path, seed=1, files=(), **over):
    """Writes config.json, model.safetensors and files ({name: bytes}); returns the settings. over: see DEFAULTS."""
    more = over.pop('more', {})
    p = {**DEFAULTS, **over}
    rng = random.Random(seed)
    cfg, kinds = config(p, **more)
    mat = lambda n, sd, mu=0: [rng.gauss(mu, sd) for _ in range(n)]
    items = []

    def put(name, shape, values, dtype='BF16'):
        items.append((name, dtype, shape, bf16(values) if dtype == 'BF16' else f32s(values)))
    d, k = p['hidden'], PREFIX
    put(k + 'embed_tokens.weight', [p['vocab'], d], mat(p['vocab'] * d, 1))
    res = ('self_attention_res', 'mlp_res') if p['res_block'] else ()
    for i, kind in enumerate(kinds):
        b = f'{k}layers.{i}.'
        out = lambda name, *a: put(b + name, *a)
        for n in ('input_layernorm', 'post_attention_layernorm'):
            out(n + '.weight', [d], mat(d, .1, 1))
        for n in res:
            out(n + '_norm.weight', [d], mat(d, .1, 1))
            out(n + '_proj.weight', [1, d], mat(d, .5))
        attention(p, kind, out, mat)
        if i < p['dense_layers']:
            for n, rows, cols in (('gate', p['dense'], d), ('up', p['dense'], d), ('down', d, p['dense'])):
                out(f'mlp.{n}_proj.weight', [rows, cols], mat(rows * cols, cols ** -.5))
        else:
            mixture(p, rng, out, lambda name, shape, data: items.append((b + name, 'U8', shape, data)), mat)
    put(k + 'norm.weight', [d], mat(d, .1, 1))
    if p['res_block']:
        put(k + 'output_attn_res_norm.weight', [d], mat(d, .1, 1))
        put(k + 'output_attn_res_proj.weight', [1, d], mat(d, .5))
    head = mat(p['vocab'] * d, d ** -.5)
    if p['head']:
        put('language_model.lm_head.weight', [p['vocab'], d], head)
    write(os.path.join(path, 'model.safetensors'), st(items))
    write(os.path.join(path, 'config.json'), json.dumps(cfg))
    for name, data in dict(files).items():
        write(os.path.join(path, name), data)
    return p


def chain_model(path, follows, vocab, files=(), **more):
    """A model that goes on with follows[id] after id; with id + 1 where the table says nothing."""
    random_model(path, 1, files, hidden=vocab, vocab=vocab, layers=2, dense_layers=2, res_block=0, more=more)
    name = os.path.join(path, 'model.safetensors')
    from tsrtest import st_load
    held = st_load(name)
    eye, head = [0.0] * (vocab * vocab), [0.0] * (vocab * vocab)
    for i in range(vocab):
        eye[i * vocab + i] = 1.0
        head[follows.get(i, (i + 1) % vocab) * vocab + i] = 1.0
    for key, (dtype, shape, data) in held.items():
        if 'o_proj' in key or 'down_proj' in key:
            held[key] = (dtype, shape, bytes(len(data)))
        elif key.endswith('embed_tokens.weight'):
            held[key] = (dtype, shape, bf16(eye))
        elif key.endswith('lm_head.weight'):
            held[key] = (dtype, shape, bf16(head))
        elif key.endswith('model.norm.weight'):
            held[key] = (dtype, shape, bf16([1.0] * vocab))
    write(name, st([(k, *v) for k, v in held.items()]))


def change(path, name, how):
    """Replaces one tensor's (dtype, shape, bytes) by how of it; how None: takes it out; a new name is added."""
    from tsrtest import st_load
    file = os.path.join(path, 'model.safetensors')
    held = st_load(file)
    new = how(held.get(name)) if how else None
    if new is None:
        held.pop(name, None)
    else:
        held[name] = new
    write(file, st([(k, *v) for k, v in held.items()]))


def change_config(path, **keys):
    file = os.path.join(path, 'config.json')
    cfg = json.load(open(file))
    cfg.update(keys)
    write(file, json.dumps(cfg))
