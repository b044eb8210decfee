/* bench_experts.c - an expert that is not in memory: read_expert, and leasing it from a cache that lacks it, against bare
 * preads of the same bytes into the same amount of memory; what a lease costs when all is there. Argument: MiB. */
#include "bench/bench.h"
#include "convert/weights.h"
#include "model/experts.h"

#include <fcntl.h>
#include <unistd.h>

enum { EXPERTS = 8 };

typedef struct state {
    tsr_view view;
    tsr_weight_source source;
    tsr_experts *cache;
    int fd;
    int32_t layers, at[2]; /* each side takes layers in turn, so that nothing asked for is still there */
    uint64_t offset[64][EXPERTS], span[64][EXPERTS], bytes;
    uint8_t *buf; /* of EXPERTS */
} state;

static tsr_status fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    (void)payload;
    (void)err;
    uint64_t rng = slot->tensor * 1000 + slot->item + slot->off, *p = dst;
    for (uint64_t i = 0; i < slot->bytes / 8; i++) {
        p[i] = bag_random(&rng);
    }
    return TSR_OK;
}

static int32_t next_layer(state *s, int side)
{
    s->at[side] = (s->at[side] + 1) % s->layers;
    return s->at[side];
}

static void ours(void *payload)
{
    state *s = payload;
    tsr_err err;
    int32_t layer = next_layer(s, 0);
    for (int32_t e = 0; e < EXPERTS; e++) {
        const void *part[TSR_PART_COUNT];
        uint64_t read;
        CHECK_OK(s->source.read_expert(s->source.payload, layer, e, s->buf + (uint64_t)e * s->bytes, s->bytes,
                                       part, &read, &err));
        CHECK(read == s->span[layer][e] && part[TSR_PART_DOWN] != NULL);
    }
}

static void peer(void *payload)
{
    state *s = payload;
    int32_t layer = next_layer(s, 1);
    for (int32_t e = 0; e < EXPERTS; e++) {
        CHECK(pread(s->fd, s->buf + (uint64_t)e * s->bytes, s->span[layer][e], (off_t)s->offset[layer][e]) ==
              (ssize_t)s->span[layer][e]);
    }
}

static void lease(void *payload)
{
    static const int32_t ids[EXPERTS] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    state *s = payload;
    tsr_err err;
    tsr_expert_table table;
    int32_t layer = next_layer(s, 0), taken;
    CHECK_OK(tsr_experts_acquire(s->cache, layer, ids, EXPERTS, &taken, &table, &err));
    CHECK(taken == EXPERTS);
    tsr_experts_release(s->cache, layer);
}

static void open_cache(state *s, tsr_backend *b, uint64_t experts, int threads)
{
    uint8_t has[64];
    tsr_err err;
    memset(has, 1, sizeof has);
    tsr_experts_opts o = { .layers = s->layers,
                           .experts = EXPERTS,
                           .top_k = EXPERTS,
                           .cache_bytes = experts * tsr_align_up(s->bytes, 64),
                           .io_threads = threads,
                           .has_experts = has };
    CHECK_OK(tsr_experts_open(&s->cache, b, &s->source, &o, &err));
}

static void find_layers(state *s, const char *path)
{
    tsr_err err;
    tsr_file_info f;
    char full[700];
    const tsr_ckpt *c = s->view.source->ckpt;
    CHECK_OK(tsr_ckpt_file(c, tsr_ckpt_file_count(c) - 1, &f, &err));
    while (s->layers < 64 &&
           s->source.expert_bytes(s->source.payload, s->layers, &s->bytes, &err) == TSR_OK) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            tsr_expert_span span;
            CHECK_OK(tsr_ckpt_expert_span(c, s->layers, e, TSR_CLASS_EXPERTS, &span, &err));
            CHECK_OK(tsr_ckpt_file(c, span.file, &f, &err));
            s->offset[s->layers][e] = span.offset;
            s->span[s->layers][e] = span.bytes;
        }
        s->layers++;
    }
    CHECK(s->layers > 1 && s->source.expert_bytes(s->source.payload, 0, &s->bytes, &err) == TSR_OK);
    (void)snprintf(full, sizeof full, "%s/%s", path, f.name);
    s->fd = open(full, O_RDONLY);
    CHECK(s->fd >= 0);
}

int main(int argc, char **argv)
{
    tsr_err err;
    uint64_t bytes = bench_bytes(argc, argv, 256);
    char *dir = test_dir("bench"), path[500];
    tsr_tensor_decl *decls;
    uint32_t count;
    state s = { .layers = 0 };
    tsr_backend *b;
    bench_decls(bytes, &decls, &count);
    (void)snprintf(path, sizeof path, "%s/c", dir);
    CHECK_OK(tsr_save(path, decls, count, fill, NULL, &(tsr_save_opts){ .arch = "canonical" }, &err));
    CHECK_OK(tsr_view_open(&s.view, path, NULL, NULL, NULL, &err));
    CHECK_OK(tsr_view_weights(&s.source, &s.view, &err));
    CHECK_OK(tsr_backend_open(&b, "cpu", 1, &err));
    find_layers(&s, path);
    CHECK(posix_memalign((void **)&s.buf, 64, EXPERTS * s.bytes) ==
          0); /* as slots are: it matters to pread */
    memset(s.buf, 1, EXPERTS * s.bytes);
    bench_pair("read_expert, 8 experts one after another, warm", "pread", EXPERTS * s.span[0][0], ours, peer,
               &s);
    for (int threads = 1; threads <= 2; threads++) {
        char what[80];
        (void)snprintf(what, sizeof what, "lease 8 experts that are not there, %d thread%s", threads,
                       threads > 1 ? "s" : "");
        open_cache(&s, b, EXPERTS, threads);
        bench_pair(what, "pread", EXPERTS * s.span[0][0], lease, peer, &s);
        tsr_experts_stats st;
        tsr_experts_stats_get(s.cache, &st);
        CHECK(st.hits == 0);
        tsr_experts_close(&s.cache);
    }
    open_cache(&s, b, (uint64_t)s.layers * EXPERTS, 2);
    for (int i = 0; i < s.layers; i++) {
        lease(&s);
    }
    double t = bench_now();
    for (int i = 0; i < 100000; i++) {
        lease(&s);
    }
    printf("lease 8 experts that are there: %.2f us\n", (bench_now() - t) * 10);
    tsr_experts_close(&s.cache);
    tsr_backend_close(&b);
    tsr_view_weights_done(&s.source);
    tsr_view_close(&s.view);
    CHECK(close(s.fd) == 0);
    free(s.buf);
    test_dir_remove(dir);
    return 0;
}
