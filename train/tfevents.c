/* tfevents.c - scalars in TensorBoard's event files: TFRecord framing around Event messages of protocol buffers. Sources: the
 * formats as TensorFlow documents them (tfrecord: length, masked CRC-32C of it, data, masked CRC-32C; event.proto, summary.proto). */
#include "train/metrics.h"

#include <string.h>

#define MESSAGE_MAX 4096

typedef struct message {
    uint8_t p[MESSAGE_MAX];
    size_t n;
} message;

uint32_t tf_crc32c(const void *data, size_t bytes)
{
    const uint8_t *p = data;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= p[i];
        for (int k = 0; k < 8; k++) {
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
        }
    }
    return ~crc;
}

static uint32_t masked(const void *data, size_t bytes)
{
    uint32_t crc = tf_crc32c(data, bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static void byte(message *m, unsigned b)
{
    TSR_ASSERT(m->n < MESSAGE_MAX);
    m->p[m->n++] = (uint8_t)b;
}

static void varint(message *m, uint64_t v)
{
    for (; v >= 128; v >>= 7) {
        byte(m, (unsigned)(v & 127) | 128);
    }
    byte(m, (unsigned)v);
}

static void fixed(message *m, const void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) { /* little-endian machines only, as the checkpoint is */
        byte(m, ((const uint8_t *)p)[i]);
    }
}

static void field(message *m, unsigned number, unsigned type)
{
    varint(m, number << 3 | type);
}

static void bytes_field(message *m, unsigned number, const void *p, size_t n)
{
    field(m, number, 2);
    varint(m, n);
    fixed(m, p, n);
}

static bool put(FILE *f, const message *m)
{
    uint64_t n = m->n;
    uint32_t a = masked(&n, sizeof n), b = masked(m->p, m->n);
    return fwrite(&n, sizeof n, 1, f) == 1 && fwrite(&a, sizeof a, 1, f) == 1 &&
           fwrite(m->p, 1, m->n, f) == m->n && fwrite(&b, sizeof b, 1, f) == 1 && fflush(f) == 0;
}

static void head(message *m, double wall_time, int64_t step)
{
    m->n = 0;
    field(m, 1, 1);
    fixed(m, &wall_time, sizeof wall_time);
    field(m, 2, 0);
    varint(m, (uint64_t)step);
}

bool tf_begin(FILE *f, double wall_time, int64_t step)
{
    static const uint8_t start[] = { 1 << 3, 1 }; /* SessionLog: status START */
    message m;
    head(&m, wall_time, 0);
    bytes_field(&m, 3, "brain.Event:2", 13);
    bool ok = put(f, &m);
    head(&m, wall_time, step);
    bytes_field(&m, 7, start, sizeof start);
    return ok && put(f, &m);
}

bool tf_scalars(FILE *f, double wall_time, int64_t step, const tf_value *v, size_t count)
{
    message m, summary = { .n = 0 };
    for (size_t i = 0; i < count; i++) {
        message one = { .n = 0 };
        float x = (float)v[i].value;
        bytes_field(&one, 1, v[i].tag, strlen(v[i].tag));
        field(&one, 2, 5);
        fixed(&one, &x, sizeof x);
        bytes_field(&summary, 1, one.p, one.n);
    }
    head(&m, wall_time, step);
    bytes_field(&m, 5, summary.p, summary.n);
    return put(f, &m);
}
