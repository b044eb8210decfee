/* routing_file.h - for train/: routing of every step as HDF5, docs/ROUTING.md. Rows are kept in memory until they are flushed;
 * files are open during a flush only. */
#ifndef TSR_TRAIN_ROUTING_FILE_H
#define TSR_TRAIN_ROUTING_FILE_H

#include "train/balance.h"

typedef struct routing_file {
    char *run_path, *window_path; /* of the whole run; of the steps since the last checkpoint */
    const tsr_recipe *r;
    int32_t layers; /* with experts */
    int64_t rows, room;
    int64_t *step, *stage, *tokens; /* [room] */
    int64_t *count;                 /* [layers][room][experts] */
    float *mass, *bias;
    double *maxvio; /* [layers][room] */
    int32_t *layer; /* number of each */
} routing_file;

/* Drops rows beyond step from the run's file. *note: a line about a file that could not be read and was renamed; NULL. */
tsr_status routing_open(routing_file *f, const char *run, const tsr_recipe *r, const balance *k, int64_t step,
                        char **note, tsr_err *err);
void routing_add(routing_file *f, const balance *k, int64_t step, int32_t stage, int64_t tokens);
/* No room for another row. */
static inline bool routing_full(const routing_file *f)
{
    return f->rows == f->room;
}
/* Writes the rows to both files. */
tsr_status routing_flush(routing_file *f, tsr_err *err);
/* Hands over the file of the window (it exists after a flush; the taker removes it) and starts a new one. malloc'ed. */
char *routing_take_window(routing_file *f, int64_t step);
void routing_close(routing_file *f);

#endif
