/* bench_codec.c - compression: ratios on data as models have it, and reading back against H5Dread of the
 * same data set, per thread and with all. Argument: MiB. */
#include "bench/bench.h"
#include "kernels/numeric.h"

#include <hdf5.h>
#include <pthread.h>
#include <unistd.h>
#include <zstd.h>

typedef struct kind {
    const char *name;
    tsr_dtype dtype;
    uint8_t *data; /* one item of 8 MiB */
} kind;

#define ITEM ((uint64_t)8 << 20)

typedef struct state {
    kind kinds[4];
    char path[500], file[600];
    tsr_ckpt *c;
    uint64_t rows; /* items of the bf16 family */
    int threads;
    void *buf[64];
} state;

static tsr_status fill(void *payload, const tsr_slot *slot, void *dst, tsr_err *err)
{
    (void)err;
    const state *s = payload;
    memcpy(dst, s->kinds[slot->tensor].data + slot->off, slot->bytes);
    return TSR_OK;
}

static void make_data(state *s)
{
    uint64_t n = ITEM / 2, rng = 5;
    float *f = malloc(n * sizeof *f);
    CHECK(f != NULL);
    for (int k = 0; k < 4; k++) {
        s->kinds[k].data = malloc(ITEM);
    }
    s->kinds[0] = (kind){ "bf16 weights", TSR_DT_BF16, s->kinds[0].data };
    s->kinds[1] = (kind){ "f32 Adam moments", TSR_DT_F32, s->kinds[1].data };
    s->kinds[2] = (kind){ "E8M0 scales", TSR_DT_E8M0, s->kinds[2].data };
    s->kinds[3] = (kind){ "MXFP4 codes", TSR_DT_MXFP4, s->kinds[3].data };
    bench_gauss(f, n, 0.02);
    tsr_from_f32(TSR_DT_BF16, f, n, s->kinds[0].data, NULL);
    bench_gauss(f, ITEM / 4, 1e-3);
    memcpy(s->kinds[1].data, f, ITEM);
    for (uint64_t i = 0; i < ITEM;
         i++) { /* the largest of 32 normal values lies within about one power of two */
        uint64_t v = bag_random(&rng);
        s->kinds[2].data[i] = (uint8_t)(118 + (v % 64 == 0) - (v % 61 == 0));
        s->kinds[3].data[i] = (uint8_t)(v >> 32);
    }
    free(f);
}

static size_t h5_zstd(unsigned flags, size_t cd_count, const unsigned cd[], size_t bytes, size_t *buf_bytes,
                      void **buf)
{
    (void)cd_count, (void)cd;
    CHECK((flags & H5Z_FLAG_REVERSE) != 0);
    unsigned long long n = ZSTD_getFrameContentSize(*buf, bytes);
    void *out = malloc(n);
    CHECK(out != NULL && ZSTD_decompress(out, n, *buf, bytes) == n);
    free(*buf);
    *buf = out;
    *buf_bytes = n;
    return n;
}

static void h5_read(void *payload)
{
    const state *s = payload;
    hid_t f = H5Fopen(s->file, H5F_ACC_RDONLY, H5P_DEFAULT);
    hid_t d = H5Dopen2(f, "/experts/layers.0.experts.{e}.w.weight", H5P_DEFAULT), t = H5Dget_type(d),
          space = H5Dget_space(d);
    CHECK(d >= 0);
    for (hsize_t e = 0; e < s->rows; e++) {
        hsize_t start[3] = { e, 0, 0 }, size[3] = { 1, ITEM / 2 / 1024, 1024 };
        hid_t mem = H5Screate_simple(3, size, NULL);
        CHECK(H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, size, NULL) >= 0);
        CHECK(H5Dread(d, t, mem, space, H5P_DEFAULT, s->buf[0]) >= 0);
        (void)H5Sclose(mem);
    }
    (void)H5Sclose(space);
    (void)H5Tclose(t);
    (void)H5Dclose(d);
    (void)H5Fclose(f);
}

typedef struct share {
    const state *s;
    int first, step;
} share;

static void *read_share(void *arg)
{
    const share *h = arg;
    tsr_err err;
    tsr_tensor_info t;
    uint32_t item;
    CHECK_OK(tsr_ckpt_find(h->s->c, "layers.0.experts.{e}.w.weight", &t, &item, &err));
    for (uint32_t e = (uint32_t)h->first; e < t.expert_count; e += (uint32_t)h->step) {
        CHECK_OK(tsr_ckpt_read(h->s->c, &t, e, 0, h->s->buf[h->first], t.item_bytes, TSR_READ_CHECK, &err));
    }
    return NULL;
}

static void read_ours(void *payload)
{
    const state *s = payload;
    pthread_t t[64];
    share h[64];
    for (int i = 0; i < s->threads; i++) {
        h[i] = (share){ s, i, s->threads };
        if (i > 0) {
            CHECK(pthread_create(&t[i], NULL, read_share, &h[i]) == 0);
        }
    }
    (void)read_share(&h[0]);
    for (int i = 1; i < s->threads; i++) {
        CHECK(pthread_join(t[i], NULL) == 0);
    }
}

static void ratios(state *s, const char *dir)
{
    static const int64_t shapes[4][2] = { { 4096, 1024 }, { 2048, 1024 }, { 8192, 1024 }, { 8192, 2048 } };
    tsr_tensor_decl d[4];
    tsr_err err;
    char path[500];
    (void)snprintf(path, sizeof path, "%s/ratios", dir);
    for (int k = 0; k < 4; k++) {
        d[k] = (tsr_tensor_decl){ .name = s->kinds[k].name,
                                  .dtype = s->kinds[k].dtype,
                                  .src_dtype = s->kinds[k].dtype,
                                  .rank = 2,
                                  .shape = shapes[k],
                                  .layer = -1,
                                  .partner = -1 };
    }
    tsr_save_opts o = { .compress = true };
    CHECK_OK(tsr_save(path, d, 4, fill, s, &o, &err));
    tsr_ckpt *c;
    CHECK_OK(tsr_ckpt_open(&c, path, &err));
    for (uint32_t k = 0; k < 4; k++) {
        tsr_tensor_info t;
        tsr_extent_info x;
        CHECK_OK(tsr_ckpt_tensor(c, k, &t, &err));
        CHECK_OK(tsr_ckpt_extent(c, &t, 0, 0, &x, &err));
        printf("%s: %s, %.3f of its size\n", t.name, tsr_codec_name((unsigned)x.codec),
               (double)x.stored_bytes / (double)x.raw_bytes);
    }
    tsr_ckpt_close(&c);
}

int main(int argc, char **argv)
{
    static const H5Z_class2_t filter = { H5Z_CLASS_T_VERS, 32015, 1, 1, "zstd", NULL, NULL, h5_zstd };
    state s = { .rows = bench_bytes(argc, argv, 256) / ITEM, .threads = 1 };
    tsr_err err;
    char *dir = test_dir("bench");
    CHECK(H5Zregister(&filter) >= 0);
    make_data(&s);
    ratios(&s, dir);
    static const int64_t shape[2] = { 4096, 1024 };
    tsr_tensor_decl d = { .name = "layers.0.experts.{e}.w.weight",
                          .dtype = TSR_DT_BF16,
                          .src_dtype = TSR_DT_BF16,
                          .rank = 2,
                          .shape = shape,
                          .klass = TSR_CLASS_EXPERTS,
                          .expert_count = (uint32_t)s.rows,
                          .partner = -1 };
    tsr_save_opts o = { .compress = true };
    (void)snprintf(s.path, sizeof s.path, "%s/c", dir);
    CHECK_OK(tsr_save(s.path, &d, 1, fill, &s, &o, &err));
    (void)snprintf(s.file, sizeof s.file, "%s/experts-00000-of-00001.h5", s.path);
    CHECK_OK(tsr_ckpt_open(&s.c, s.path, &err));
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    for (int i = 0; i < 64; i++) {
        s.buf[i] = i < cores ? malloc(ITEM) : NULL;
    }
    memset(s.buf[0], 0, ITEM); /* both sides must give the data back */
    h5_read(&s);
    CHECK(memcmp(s.buf[0], s.kinds[0].data, ITEM) == 0);
    memset(s.buf[0], 0, ITEM);
    read_ours(&s);
    CHECK(memcmp(s.buf[0], s.kinds[0].data, ITEM) == 0);
    bench_pair("read compressed bf16, one thread, checked", "H5Dread", s.rows * ITEM, read_ours, h5_read, &s);
    s.threads = cores < 64 ? (int)cores : 64;
    bench_pair("read compressed bf16, all threads, checked", "H5Dread", s.rows * ITEM, read_ours, h5_read,
               &s);
    tsr_ckpt_close(&s.c);
    test_dir_remove(dir);
    return 0;
}
