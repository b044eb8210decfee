/* data_file.h - the bytes of a data folder: heads of shards, data.json, and what is hashed. The normative text is
 * docs/DATA.md. Everything is little-endian. */
#ifndef TSR_TRAIN_DATA_FILE_H
#define TSR_TRAIN_DATA_FILE_H

#include "format/base.h"
#include "train/data.h"

#include <jansson.h>

#define DATA_VERSION 1
#define DATA_FORMAT "tessera-data"
#define DATA_TOK_MAGIC "TSRTOKEN"
#define DATA_IDX_MAGIC "TSRBORDS"
#define DATA_JSON_BYTES_MAX ((size_t)64 << 20)
#define DATA_SHARD_COUNT_MAX (1u << 17) /* of a split */
#define DATA_NAME_BYTES 32              /* "train-00000.tok" */
#define DATA_HEX_BYTES 17

/* The first bytes of .tok and .idx. */
typedef struct data_head {
    char magic[8];
    uint32_t version;
    uint32_t dtype; /* of the ids: TSR_DT_U16 or TSR_DT_U32; of borders: TSR_DT_U64 */
    uint32_t split; /* tsr_split */
    uint32_t shard; /* its number in the split */
    uint64_t documents, tokens, text_bytes;
    uint64_t data_hash; /* XXH3-64 of all bytes behind the head */
    uint64_t head_hash; /* XXH3-64 of the 56 bytes above */
} data_head;
_Static_assert(sizeof(data_head) == 64, "layout");

typedef struct data_shard {
    uint64_t documents, tokens, text_bytes, tok_hash, idx_hash;
    uint64_t end; /* build.json only: one past the number of the input document that closed it */
} data_shard;

typedef struct data_split {
    data_shard *shards;
    size_t count, room;
    uint64_t documents, tokens, text_bytes; /* of all shards */
} data_split;

/* Files of a tokenizer that travel along when they are there; the first one must be. */
#define DATA_TOKENIZER_FILES 6
extern const char *const data_tokenizer_names[DATA_TOKENIZER_FILES];
typedef struct data_file {
    const char *name; /* one of them */
    uint64_t bytes, hash;
} data_file;

typedef struct data_meta {
    int64_t vocab;
    int32_t eos;
    data_file files[DATA_TOKENIZER_FILES];
    size_t file_count;
    data_split split[TSR_SPLIT_COUNT];
} data_meta;

void data_meta_free(data_meta *m);
/* Appends a shard and adds its counts. */
TSR_NODISCARD tsr_status data_split_add(data_split *s, const data_shard *shard, tsr_err *err);

/* TSR_DT_U16 where all ids fit, else TSR_DT_U32. */
tsr_dtype data_dtype(int64_t vocab);
/* "train-00000.tok"; idx: "train-00000.idx". */
void data_shard_name(char out[DATA_NAME_BYTES], tsr_split s, size_t shard, bool idx);
/* What the head of a shard's file must be, and how long the file. TSR_E_FORMAT: sizes do not fit. */
TSR_NODISCARD tsr_status data_head_of(data_head *out, uint64_t *file_bytes, const data_shard *shard,
                                      tsr_split s, size_t number, tsr_dtype dtype, bool idx, tsr_err *err);
/* The first difference of a head from what it must be, for the message; NULL: none. */
const char *data_head_differs(const data_head *have, const data_head *want);

/* Of everything that training depends on. */
TSR_NODISCARD tsr_status data_hash_of(const data_meta *m, uint64_t *out, tsr_err *err);

/* ---- JSON. Fields of a NULL object are absent; failures name path and field. ------------------------------------- */

void data_hex(uint64_t v, char out[DATA_HEX_BYTES]);
/* XXH3-64 of the object's compact text with sorted keys. */
TSR_NODISCARD tsr_status data_json_hash(const json_t *root, uint64_t *out, tsr_err *err);
/* Reads a JSON object from a file. TSR_E_MISSING: no such file. */
TSR_NODISCARD tsr_status data_json_read(json_t **out, const char *path, tsr_err *err);
TSR_NODISCARD tsr_status data_json_u64(const json_t *o, const char *path, const char *key, uint64_t *out,
                                       tsr_err *err);
/* 16 hex digits. */
TSR_NODISCARD tsr_status data_json_hex(const json_t *o, const char *path, const char *key, uint64_t *out,
                                       tsr_err *err);
/* NULL when out of memory. building: with `end`. */
json_t *data_shard_json(const data_shard *shard, tsr_split s, size_t number, bool building);
TSR_NODISCARD tsr_status data_shard_parse(const json_t *o, const char *path, tsr_split s, size_t number,
                                          bool building, data_shard *out, tsr_err *err);
/* The list of a split's shards at key "shards" of o. */
TSR_NODISCARD tsr_status data_shards_parse(const json_t *o, const char *path, tsr_split s, bool building,
                                           data_split *out, tsr_err *err);

#endif
