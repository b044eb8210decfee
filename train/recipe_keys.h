/* recipe_keys.h - private: tables of a recipe's keys, and what reads and writes a struct by them.
 *
 * One row per key says its name, type, place, range and default; reading, the resolved form and the hint for an unknown key all come
 * from it. docs/RECIPES.md explains the same keys to people. */
#ifndef TSR_TRAIN_RECIPE_KEYS_H
#define TSR_TRAIN_RECIPE_KEYS_H

#include "train/recipe.h"
#include "train/recipe_tree.h"

#include <jansson.h>
#include <stddef.h>

typedef enum key_type {
    KEY_END,
    KEY_I64,
    KEY_SIZE, /* int64_t; 8K, 1M and 1G are accepted, in powers of 1024 */
    KEY_I32,
    KEY_U32,
    KEY_U64,
    KEY_REAL,
    KEY_STEPS, /* double: whole steps, or a share of them below 1 */
    KEY_FLAG,
    KEY_CHOICE, /* int: the value of one of `choices` */
    KEY_NAME,   /* char[TSR_NAME_MAX] of letters, digits, _ and - */
    KEY_MAP,    /* of the table `keys`, in the same struct */
    KEY_OTHER   /* read and written by code */
} key_type;

typedef struct recipe_choice {
    const char *name; /* NULL ends the list */
    int value;
} recipe_choice;

typedef struct recipe_key recipe_key;
struct recipe_key {
    const char *name;
    key_type type;
    size_t offset;
    double low, high;
    const char *fallback; /* as it would be written; NULL: must be given; KEY_UNSET: decided afterwards */
    const recipe_choice *choices;
    const recipe_key *keys;
    const char *help; /* for messages: what it is and its unit */
};

/* A default that other values decide. The field is then KEY_UNSET_INT or NaN. */
#define KEY_UNSET ""
#define KEY_UNSET_INT INT64_MIN

typedef struct recipe_reader {
    const char *name; /* of the file */
    tsr_arena *arena;
    tsr_err *err;
} recipe_reader;

/* "tiny.yaml:12: stages.0: " in front of a message about a node; path may be "". */
TSR_NODISCARD tsr_status recipe_fail(const recipe_reader *r, const tsr_tree *at, const char *path,
                                     tsr_status code, const char *fmt, ...) TSR_PRINTF(5, 6);
/* path.key in the arena; "(out of memory)" when there is none. */
const char *recipe_path(const recipe_reader *r, const char *path, const char *key);
/* Reads a map (NULL: defaults only) by a table into the struct at base. Unknown keys are errors. */
TSR_NODISCARD tsr_status recipe_read(const recipe_reader *r, const tsr_tree *map, const char *path,
                                     const recipe_key *keys, void *base);
/* One value of a row. */
TSR_NODISCARD tsr_status recipe_read_value(const recipe_reader *r, const tsr_tree *at, const char *path,
                                           const recipe_key *k, void *base);
/* Copies a name of letters, digits, _ and -. */
TSR_NODISCARD tsr_status recipe_read_name(const recipe_reader *r, const tsr_tree *at, const char *path,
                                          char out[TSR_NAME_MAX]);
/* A list's or map's node; NULL for an absent one. TSR_E_FORMAT: another kind. */
TSR_NODISCARD tsr_status recipe_expect(const recipe_reader *r, const tsr_tree *at, const char *path,
                                       tsr_tree_kind kind, const tsr_tree **out);
/* The rows but KEY_OTHER into a JSON object. */
void recipe_write(json_t *o, const recipe_key *keys, const void *base);
/* The nearest of the names, or NULL when none is near. */
const char *recipe_nearest(const char *word, const char *const *names, size_t count);

/* recipe_model.c */
TSR_NODISCARD tsr_status recipe_read_model(const recipe_reader *r, tsr_recipe *out, const tsr_tree *model);
json_t *recipe_write_model(const tsr_recipe *r);
/* recipe_json.c: the shortest text that reads back as the same number. */
#define TSR_REAL_TEXT 32
void recipe_real_text(double x, char out[TSR_REAL_TEXT]);
/* JSON with sorted keys, two spaces an indent and numbers as short as can be; NULL: no memory. */
char *recipe_dump(const json_t *v);
/* recipe.c: the tables of what tsr_recipe_json writes. */
typedef struct recipe_stage_raw { /* a stage as it is written */
    tsr_stage s;
    int64_t tokens;
    double warmup, decay;
} recipe_stage_raw;
extern const recipe_key recipe_root_keys[], recipe_stage_keys[];

#endif
