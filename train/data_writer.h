/* data_writer.h - writes a data folder: shards one after the other into a partial folder beside it, which can be continued, and
 * at the end the folder itself. One thread. */
#ifndef TSR_TRAIN_DATA_WRITER_H
#define TSR_TRAIN_DATA_WRITER_H

#include "train/data_file.h"

typedef struct data_writer data_writer;

/* Where the folder will be and where its parts are prepared (both malloc'ed). TSR_E_CONFLICT: path exists. */
TSR_NODISCARD tsr_status data_writer_places(const char *path, char **real, char **temp, tsr_err *err);

typedef struct data_writer_opts {
    const char *real, *temp; /* borrowed */
    uint64_t key;            /* of input and options: a partial folder must have the same */
    bool restart;
    int64_t vocab;
    int32_t eos;
    uint64_t shard_tokens;
} data_writer_opts;
/* Makes or enters the partial folder and locks it. TSR_E_CONFLICT: another key, or another process. */
TSR_NODISCARD tsr_status data_writer_open(data_writer **out, const data_writer_opts *o, tsr_err *err);
/* keep: leaves the partial folder, to be continued. */
void data_writer_close(data_writer **w, bool keep);
/* Documents of a split below this number are in finished shards. */
uint64_t data_writer_finished(const data_writer *w, tsr_split s);
/* Shards that are finished. */
size_t data_writer_shards(const data_writer *w);

/* Tokens of the split's current document; ids are below vocab. */
TSR_NODISCARD tsr_status data_writer_add(data_writer *w, tsr_split s, const int32_t *ids, size_t count,
                                         tsr_err *err);
/* Ends it. number: of the document in the input; text_bytes: of its text. Closes the shard when it is large enough. */
TSR_NODISCARD tsr_status data_writer_end(data_writer *w, tsr_split s, uint64_t number, uint64_t text_bytes,
                                         tsr_err *err);
/* A copy of a tokenizer's file; index into data_tokenizer_names, ascending. */
TSR_NODISCARD tsr_status data_writer_file(data_writer *w, size_t index, const void *p, size_t n,
                                          tsr_err *err);
/* Closes what is open and gives the folder its name. facts, an object, is completed and becomes data.json. */
TSR_NODISCARD tsr_status data_writer_commit(data_writer *w, json_t *facts, tsr_err *err);
const data_meta *data_writer_meta(const data_writer *w);

#endif
