/* progress.c - see progress.h. */
#include "cli/progress.h"
#include "cli/out.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define INTERVAL_NS 100000000u

static uint64_t clock_ns(void)
{
    struct timespec t = { 0 };
    (void)clock_gettime(CLOCK_MONOTONIC, &t); /* cannot fail on Linux */
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void tsr_meter_init(tsr_meter *m, const char *mode, FILE *to)
{
    bool line = strcmp(mode, "auto") == 0 && isatty(fileno(to));
    *m = (tsr_meter){ .to = to, .now_ns = clock_ns };
    m->mode = strcmp(mode, "json") == 0 ? TSR_METER_JSON : line ? TSR_METER_LINE : TSR_METER_NONE;
}

void tsr_meter_clear(tsr_meter *m)
{
    if (m->on_line) {
        (void)fputs("\r\033[K", m->to); /* standard error: nowhere to tell a failure */
        (void)fflush(m->to);
        m->on_line = false;
    }
}

static void print_line(tsr_meter *m, const char *what, uint64_t done, uint64_t total, double rate,
                       double left)
{
    char a[TSR_SIZE_TEXT], b[TSR_SIZE_TEXT];
    (void)fprintf(m->to, "\r\033[K%s %3.0f %%  %s / %s  %.1f MB/s", what,
                  total > 0 ? 100.0 * (double)done / (double)total : 100.0, tsr_size_text(done, a),
                  tsr_size_text(total, b), rate / 1e6);
    if (left >= 0) {
        uint64_t s = left < 3.6e7 ? (uint64_t)(left + 0.5) : 36000000;
        (void)fprintf(m->to, "  ETA %" PRIu64 ":%02" PRIu64 ":%02" PRIu64, s / 3600, s / 60 % 60, s % 60);
    }
    m->on_line = true;
}

static void print_json(tsr_meter *m, const char *what, uint64_t done, uint64_t total, double rate,
                       double left)
{
    (void)fprintf(m->to, "{\"progress\":\"%s\",\"done_bytes\":%" PRIu64 ",\"total_bytes\":%" PRIu64, what,
                  done, total);
    (void)fprintf(m->to, ",\"bytes_per_second\":%.0f,\"eta_seconds\":", rate);
    if (left >= 0) {
        (void)fprintf(m->to, "%.1f}\n", left);
    } else {
        (void)fputs("null}\n", m->to);
    }
}

void tsr_meter_report(void *payload, const char *what, uint64_t done, uint64_t total)
{
    tsr_meter *m = payload;
    if (m->mode == TSR_METER_NONE) {
        return;
    }
    uint64_t now = m->now_ns();
    bool new_phase = m->what == NULL || strcmp(m->what, what) != 0 || done < m->start_done;
    if (new_phase) {
        m->what = what;
        m->start_ns = now;
        m->start_done = done;
        m->ended = false;
    } else if (m->ended || (done < total && now - m->shown_ns < INTERVAL_NS)) {
        return;
    }
    m->shown_ns = now;
    m->ended = done >= total;
    double seconds = (double)(now - m->start_ns) / 1e9;
    double rate = seconds > 0 ? (double)(done - m->start_done) / seconds : 0;
    double left = rate > 0 && total >= done ? (double)(total - done) / rate : -1;
    if (m->mode == TSR_METER_JSON) {
        print_json(m, what, done, total, rate, left);
    } else {
        print_line(m, what, done, total, rate, left);
    }
    (void)fflush(m->to);
}
