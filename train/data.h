/* data.h - public: tokens of real text on disk, packed into sequences, in an order that can be sought.
 *
 * A data folder (made by tsr_data_build) holds token shards and data.json; docs/DATA.md describes the bytes. Documents keep
 * their borders: a sequence is a list of pieces of documents, and state never crosses from one document into the next. */
#ifndef TSR_TRAIN_DATA_H
#define TSR_TRAIN_DATA_H

#include "format/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tsr_split { TSR_SPLIT_TRAIN, TSR_SPLIT_HELD, TSR_SPLIT_COUNT } tsr_split;
const char *tsr_split_name(tsr_split s); /* "train", "held" */

/* ---- building ---------------------------------------------------------------------------------------------------- */

typedef struct tsr_data_build_opts {
    const char *
        tokenizer; /* folder with tiktoken.model and tokenizer_config.json; NULL: byte_added, see tokenizer.h */
    const char *text_key; /* of JSON lines; NULL: "text" */
    double
        held_out; /* share of the documents, in [0, 0.5], chosen by hash of (seed, number of the document) */
    uint64_t seed;
    uint64_t shard_tokens; /* a shard is closed by the document that reaches it; 0: 64 Mi */
    bool no_eos;           /* do not end documents by the tokenizer's end token */
    int threads;           /* 0: number of processors */
    uint64_t mem_limit;    /* bytes of buffers; 0: 256 MiB */
    bool restart;          /* throw a partial folder away */
    tsr_progress progress; /* of input bytes */
} tsr_data_build_opts;

typedef struct tsr_data_stats {
    uint64_t files, documents, bytes, skipped; /* skipped: empty documents */
    uint64_t docs[TSR_SPLIT_COUNT], tokens[TSR_SPLIT_COUNT];
    uint64_t resumed_docs; /* found finished */
} tsr_data_stats;

/* Tokenises files and folders (walked in byte order of their names) into the new folder `out`. By name: .jsonl .ndjson
 * (a document a line), .tar (a document a member; JSON lines inside likewise), anything else: one document of UTF-8 text; each also
 * compressed (.gz .zst .xz .bz2). Binary files (a NUL byte) and invalid UTF-8 are TSR_E_FORMAT, named with file, line or member.
 * Same input and options give the same bytes whatever the number of threads. Finished shards of a partial folder are kept when
 * input and options are the same (TSR_E_CONFLICT otherwise, or restart). TSR_E_CONFLICT: out exists; TSR_E_MISSING: an input. */
TSR_NODISCARD tsr_status tsr_data_build(const char *const *paths, size_t count, const char *out,
                                        const tsr_data_build_opts *o, tsr_data_stats *stats, tsr_err *err);

/* ---- reading ------------------------------------------------------------------------------------------------------- */

typedef struct tsr_data tsr_data;

/* Maps the shards. Checks sizes, heads and borders; tokens are checked against the vocabulary by tsr_data_verify.
 * TSR_E_MISSING: no data.json or a shard; TSR_E_FORMAT: damaged, err names file and field. */
TSR_NODISCARD tsr_status tsr_data_open(tsr_data **out, const char *path, tsr_err *err);
void tsr_data_close(tsr_data **d);
const char *tsr_data_path(const tsr_data *d);
uint64_t tsr_data_hash(const tsr_data *d); /* of everything in it: two folders of equal hash train alike */
int64_t tsr_data_vocab(const tsr_data *d); /* ids are below it */
int32_t tsr_data_eos(const tsr_data *d);   /* the token that ends documents; -1: none */
/* Files of the tokenizer, to travel with the model: "tiktoken.model" and so on; none for bytes. Borrowed; NULL beyond the last. */
const char *tsr_data_tokenizer_file(const tsr_data *d, size_t i);
int64_t tsr_data_docs(const tsr_data *d, tsr_split s);
int64_t tsr_data_tokens(const tsr_data *d, tsr_split s);
uint64_t tsr_data_text_bytes(const tsr_data *d, tsr_split s); /* of the text, before tokens were made of it */
int64_t tsr_data_doc_length(const tsr_data *d, tsr_split s, int64_t doc);
/* Tokens [off, off + n) of a document. */
void tsr_data_copy(const tsr_data *d, tsr_split s, int64_t doc, int64_t off, int64_t n, int32_t *dst);
/* Every byte against its checksum, every id against the vocabulary. */
TSR_NODISCARD tsr_status tsr_data_verify(const tsr_data *d, const tsr_progress *p, tsr_err *err);

/* ---- packing ---------------------------------------------------------------------------------------------------------- */

/* Tokens [off, off + n) of a document: inputs. The target of each is the token behind it; the last token of a document has
 * none. */
typedef struct tsr_piece {
    int64_t doc, off, n;
} tsr_piece;

/* Documents in sequences of at most `context` tokens: documents that fit stay whole (best fit, the longest first); longer ones
 * are cut into sequences of their own, and what is left at their end is packed like a short document. Every token is an input
 * of exactly one piece. A pure function of the documents' lengths and the context. */
typedef struct tsr_packed tsr_packed;
TSR_NODISCARD tsr_status tsr_packed_make(tsr_packed **out, const tsr_data *d, tsr_split s, int64_t context,
                                         tsr_err *err);
void tsr_packed_free(tsr_packed **p);
int64_t tsr_packed_count(const tsr_packed *p); /* sequences */
const tsr_piece *tsr_packed_pieces(const tsr_packed *p, int64_t sequence, int64_t *count);

/* ---- order ---------------------------------------------------------------------------------------------------------------- */

/* A permutation of [0, n) that can be asked at any place: a Feistel network on the smallest even number of bits that holds n,
 * walked until it falls into the range. key: whatever shall change the order. 0 <= i < n. */
int64_t tsr_shuffled(uint64_t key, int64_t n, int64_t i);
/* 64 well-mixed bits of a, b, c (splitmix64 rounds). */
uint64_t tsr_mix64(uint64_t a, uint64_t b, uint64_t c);

/* Which sequence stands at a place of a stage's endless stream of sequences. Places come in blocks of TSR_MIX_BLOCK; each block
 * has as many of each source as its weight says (largest remainders; at least one for a weight above 0), shuffled. A source's own
 * stream goes through its sequences epoch by epoch, each epoch in another order. A pure function of seed, stage, and place. */
#define TSR_MIX_BLOCK 4096
typedef struct tsr_mix {
    uint64_t seed; /* of the run and the stage, mixed */
    int32_t sources;
    const int64_t *count; /* sequences of each source; at least 1 where share > 0 */
    const int32_t *share; /* of TSR_MIX_BLOCK; they sum up to it */
} tsr_mix;
typedef struct tsr_place {
    int32_t source;
    int64_t epoch, index; /* the index-th of the source's epoch ... */
    int64_t sequence;     /* ... which is this one */
} tsr_place;
tsr_place tsr_mix_at(const tsr_mix *m, int64_t place);
/* Sequences of a source that stand before this place: where its stream is. */
int64_t tsr_mix_used(const tsr_mix *m, int64_t place, int32_t source);
/* share[i] from weights >= 0, of which one is above 0. */
void tsr_mix_shares(const double *weight, int32_t n, int32_t *share);

#ifdef __cplusplus
}
#endif
#endif
