/* checkpoint.h - for train/: writing checkpoints of a run while training goes on, and finding the one to resume from. */
#ifndef TSR_TRAIN_CHECKPOINT_H
#define TSR_TRAIN_CHECKPOINT_H

#include "train/layout.h"
#include "train/state.h"
#include "train/train.h"

#include <pthread.h>

/* Parameter or state, as it will be in the file. */
typedef struct save_entry {
    char name[300];
    const float *data; /* NULL where this rank has none */
    int64_t count;     /* of one item */
    uint32_t experts;  /* all of them; 0: plain */
    bool state, bf16;
    int32_t owner; /* of state: rank in its group */
} save_entry;

typedef struct saver {
    const char *run;
    const tsr_recipe *r;
    tsr_model *m;
    const optim *o;
    const layout *where;
    const tsr_train_hooks *hooks;
    uint64_t mem_limit;
    json_t *lineage;    /* array, oldest first */
    json_t *asset_list; /* names of files of the tokenizer, for messages */
    const feed *f;
    save_entry *entry;
    tsr_tensor_decl *decl;
    uint32_t count;
    /* the save that runs */
    tsr_save_job *job;
    pthread_t thread;
    bool running;
    int64_t step;
    tsr_status st;
    tsr_err err;
    char *asset_path; /* the routing file of the save that runs */
} saver;

tsr_status saver_open(saver *s, tsr_err *err);
/* Collective. Returns when everything is copied; an earlier save is waited for first. routing: file that goes along, NULL. */
tsr_status saver_start(saver *s, const progress_state *p, const char *routing, tsr_err *err);
/* Waits for the save that runs; its failure is returned here. */
tsr_status saver_wait(saver *s, tsr_err *err);
void saver_close(saver *s);

/* Path of the checkpoint to go on from; NULL: the run has none. malloc'ed. Says what it skips through hooks. */
tsr_status find_checkpoint(const tsr_train_opts *o, char **out, tsr_err *err);
/* Takes checkpoints beyond step out of the way: their names then begin with "superseded.". */
tsr_status set_aside(const tsr_train_opts *o, int64_t step, tsr_err *err);

#endif
