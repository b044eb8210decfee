/* progress.h - how far a long command is, on standard error: a line that renews itself on terminals, or JSON
 * lines. */
#ifndef TSR_CLI_PROGRESS_H
#define TSR_CLI_PROGRESS_H

#include "format/base.h"

#include <stdio.h>

typedef enum tsr_meter_mode { TSR_METER_NONE, TSR_METER_LINE, TSR_METER_JSON } tsr_meter_mode;

typedef struct tsr_meter {
    tsr_meter_mode mode;
    FILE *to;
    const char *what;         /* of the report before */
    uint64_t start_ns;        /* when `what` began */
    uint64_t start_done;      /* bytes done then: what a resumed run finds finished is not part of its rate */
    uint64_t shown_ns;        /* when something was printed last */
    uint64_t (*now_ns)(void); /* monotonic clock; tests bring their own */
    bool ended;               /* the end of `what` was shown */
    bool on_line;             /* the cursor stands behind a line of ours */
} tsr_meter;

/* mode: "auto" (a line when `to` is a terminal), "json" or "none". */
void tsr_meter_init(tsr_meter *m, const char *mode, FILE *to);
/* The report function of tsr_progress; payload is the meter. At most ten times a second, and once at the end.
 */
void tsr_meter_report(void *payload, const char *what, uint64_t done, uint64_t total);
/* Takes the line away, so that something else can be printed. */
void tsr_meter_clear(tsr_meter *m);

#endif
