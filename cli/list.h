/* list.h - one way to look at the tensors of a checkpoint of any format: what ls and info print. */
#ifndef TSR_CLI_LIST_H
#define TSR_CLI_LIST_H

#include "cli/cli.h"

#define TSR_LIST_NAME_BYTES 4400

/* An open checkpoint: a Tessera one by its index alone (no list of names is made), a foreign one as a view.
 */
typedef struct tsr_list {
    tsr_cli *cli;
    tsr_ckpt *ckpt;           /* NULL: foreign */
    tsr_view view;            /* foreign only */
    const char *what;         /* "Tessera checkpoint", "safetensors folder" */
    const tsr_layout *layout; /* of the source's names */
    uint32_t count;           /* plain tensors and families */
    uint8_t *seen_files;      /* scratch: one per shard */
} tsr_list;

TSR_NODISCARD tsr_status tsr_list_open(tsr_list *out, tsr_cli *cli, const char *path, tsr_err *err);
void tsr_list_close(tsr_list *l);

typedef struct tsr_list_row {
    char name[TSR_LIST_NAME_BYTES];
    tsr_dtype dtype;
    int rank;
    const int64_t *shape; /* of one item */
    tsr_class klass;
    int32_t layer;         /* -1: none */
    uint32_t expert_count; /* of a family; 0: a plain tensor or one expert */
    uint64_t bytes;        /* decoded, all experts */
    /* where it is stored; filled by tsr_list_storage */
    uint64_t stored_bytes;
    const char *file; /* the first shard that holds some of it, NULL when it has no bytes */
    uint32_t file_count;
    const char *codec; /* "raw", "shuffle+zstd", "mixed", "-" without bytes */
} tsr_list_row;

/* Row of a plain tensor, of a whole family (expert -1), or of one expert. source_names: as the source calls
 * it. */
TSR_NODISCARD tsr_status tsr_list_get(const tsr_list *l, uint32_t group, int64_t expert, bool source_names,
                                      tsr_list_row *row, tsr_err *err);
/* False for an expert that a part of a foreign checkpoint lacks. */
bool tsr_list_present(const tsr_list *l, uint32_t group, int64_t expert);
/* Fills the storage fields; reads index entries, never tensor data. */
TSR_NODISCARD tsr_status tsr_list_storage(tsr_list *l, uint32_t group, int64_t expert, tsr_list_row *row,
                                          tsr_err *err);

#endif
